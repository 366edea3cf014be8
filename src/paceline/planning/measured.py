"""What passes take on the present machine: a law that is fitted to timed passes, in the place of published peaks.

    seconds = host + row x rows + max(weights / read, products / multiply) + K/V / fetch + attention / attend

Host is what a pass takes whatever it holds, a row what each adds to it (packing, norms, the choice of a token). Reading
weights and multiplying with them overlap, as in SPIRe's model; K/V is read beside them, and attention's own arithmetic,
rows x keys, is apart: on a CPU its rate is far from that of products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from ..core.errors import ConfigError
from .machines import Machine
from .throughput import ServedModel, pass_cost

LEAST_POINTS = 8  # timed passes that a law of six figures is fitted to
INTENSITIES = tuple(2 ** (n / 4) for n in range(41))  # FLOPs a byte that are tried: 1 to 1,024
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class TimedPass:
    """A pass and what it took."""

    network: ServedModel  # with the layers that were run
    batch: int
    context: int  # tokens that each sequence has in front of its rows
    rows: int  # of each sequence
    seconds: float


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
        parts = _parts(network, batch, context, rows, self.hoi)
        return float(parts @ np.array([self.host, self.row, self.weight, self.kv, self.attention]))

    def machine(self, about: str, memory: float, device: str) -> Machine:
        """This machine as the planner has others: what it was seen to read and to multiply.

        Args:
            about: its name.
            memory: bytes.
            device: as this engine calls it.
        """
        bandwidth = 1 / max(self.weight, 1e-15)
        source = "measured now: paceline plan --measured"
        given = {"name": "here", "about": about, "memory": memory, "device": device, "source": source}
        return Machine(flops=bandwidth * self.hoi, bandwidth=bandwidth, **given)  # type: ignore[arg-type]


def fit(points: Sequence[TimedPass]) -> PassLaw:
    """The law with the least relative errors, no term of it below 0.

    Raises:
        ConfigError: too few passes, or times that are not above 0.
    """
    if len(points) < LEAST_POINTS or not all(point.seconds > 0 for point in points):
        asked = f"a law of {len(points)} timed passes"
        raise ConfigError(asked, f"it takes {LEAST_POINTS} of more than 0 seconds", "time more passes")
    return min((_fit(points, hoi) for hoi in INTENSITIES), key=lambda law: sum(e * e for e in errors(law, points)))


def _fit(points: Sequence[TimedPass], hoi: float) -> PassLaw:
    """The best law of one intensity: least squares over every choice of terms, those below 0 left out."""
    table = np.stack([_parts(p.network, p.batch, p.context, p.rows, hoi) / p.seconds for p in points])
    scale = np.linalg.norm(table, axis=0)
    scale[scale == 0] = 1.0
    best, least = np.zeros(table.shape[1]), float("inf")
    for count in range(1, table.shape[1] + 1):
        for chosen in combinations(range(table.shape[1]), count):
            part: Floats = table[:, chosen] / scale[list(chosen)]
            values = np.linalg.lstsq(part, np.ones(len(points)), rcond=None)[0]
            left = float(np.square(part @ values - 1).sum())
            if (values >= 0).all() and left < least:
                best, least = np.zeros(table.shape[1]), left
                best[list(chosen)] = values / scale[list(chosen)]
    host, row, weight, kv, attention = (float(value) for value in best)
    return PassLaw(host=host, row=row, weight=weight, hoi=hoi, kv=kv, attention=attention)


def _parts(network: ServedModel, batch: int, context: float, rows: int, hoi: float) -> Floats:
    """[5] what the law's times are multiplied with: pass, rows, bytes of weights, bytes of K/V, FLOPs of attention."""
    cost = pass_cost(network, batch, context, rows)
    return np.array([1.0, batch * rows, max(cost.weights, cost.compute / hoi), cost.kv, cost.attention])


def errors(law: PassLaw, points: Sequence[TimedPass]) -> list[float]:
    """Predicted over measured time, less 1, of each pass."""
    return [law.seconds(p.network, p.batch, p.context, p.rows) / p.seconds - 1 for p in points]
