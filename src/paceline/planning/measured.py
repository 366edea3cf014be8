"""What passes take on the present machine: a law that is fitted to timed passes, in the place of published peaks.

    seconds = host + row x rows + max(weights / read, products / multiply) + K/V / fetch + attention / attend

Host is what a pass takes whatever it holds, a row what each adds to it (packing, norms, the choice of a token). Reading
weights and multiplying with them overlap, as in SPIRe's model; K/V is read beside them, and attention's own arithmetic,
rows x keys, is apart: on a CPU its rate is far from that of products.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from ..core.errors import ConfigError
from .throughput import Cost, ServedModel, pass_cost

LEAST_POINTS = 8  # timed passes that a law of six figures is fitted to
INTENSITIES = tuple(2 ** (n / 4) for n in range(41))  # FLOPs a byte that are tried: 1 to 1,024
Floats = NDArray[np.float64]


Timed = Mapping[tuple[ServedModel, int, int, int], float]
"""Seconds of passes by network (the layers that were run), sequences, tokens in front of the rows of each, rows."""


@dataclass(frozen=True, kw_only=True)
class PassLaw:
    """The law of the present machine. Times are in seconds."""

    host: float  # a pass
    row: float  # a row
    weight: float  # a byte of weights that is read
    hoi: float  # FLOPs of products that pass while a byte of weights is read
    kv: float  # a byte of K/V that is read
    attention: float  # a FLOP of attention's own arithmetic

    def seconds(self, network: ServedModel, batch: int, context: float, rows: int = 1) -> float:
        """A pass over ``rows`` rows of each of ``batch`` sequences with ``context`` tokens in front of them."""
        return self.of(pass_cost(network, batch, context, rows), batch * rows)

    def of(self, cost: Cost, rows: int, share: float = 1.0) -> float:
        """A pass over so many rows in all that costs this, with a share of the machine."""
        parts = _parts(cost, rows, self.hoi) / np.array([1.0, *[share] * 4])
        return float(parts @ np.array([self.host, self.row, self.weight, self.kv, self.attention]))

    def with_cores(self, times: float) -> PassLaw:
        """With so many times the cores: rows and arithmetic go faster, reads and the host do not."""
        return replace(self, row=self.row / times, hoi=self.hoi * times, attention=self.attention / times)


def fit(timed: Timed) -> PassLaw:
    """The law with the least relative errors, no term of it below 0.

    Raises:
        ConfigError: too few passes, or times that are not above 0.
    """
    if len(timed) < LEAST_POINTS or not all(seconds > 0 for seconds in timed.values()):
        asked = f"a law of {len(timed)} timed passes"
        raise ConfigError(asked, f"it takes {LEAST_POINTS} of more than 0 seconds", "time more passes")
    return min((_fit(timed, hoi) for hoi in INTENSITIES), key=lambda law: sum(e * e for e in errors(law, timed)))


def _fit(timed: Timed, hoi: float) -> PassLaw:
    """The best law of one intensity: least squares over every choice of terms, those below 0 left out."""
    table = np.stack([_parts(pass_cost(*size), size[1] * size[3], hoi) / s for size, s in timed.items()])
    scale = np.linalg.norm(table, axis=0)
    scale[scale == 0] = 1.0
    best, least = np.zeros(table.shape[1]), float("inf")
    for count in range(1, table.shape[1] + 1):
        for chosen in combinations(range(table.shape[1]), count):
            part: Floats = table[:, chosen] / scale[list(chosen)]
            values = np.linalg.lstsq(part, np.ones(len(timed)), rcond=None)[0]
            left = float(np.square(part @ values - 1).sum())
            if (values >= 0).all() and left < least:
                best, least = np.zeros(table.shape[1]), left
                best[list(chosen)] = values / scale[list(chosen)]
    host, row, weight, kv, attention = (float(value) for value in best)
    return PassLaw(host=host, row=row, weight=weight, hoi=hoi, kv=kv, attention=attention)


def _parts(cost: Cost, rows: int, hoi: float) -> Floats:
    """[5] what the law's times are multiplied with: pass, rows, bytes of weights, bytes of K/V, FLOPs of attention."""
    return np.array([1.0, rows, max(cost.weights, cost.compute / hoi), cost.kv, cost.attention])


def errors(law: PassLaw, timed: Timed) -> list[float]:
    """Predicted over measured time, less 1, of each pass."""
    return [law.seconds(*size) / seconds - 1 for size, seconds in timed.items()]
