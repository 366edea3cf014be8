"""A law of this machine's passes: passes are timed, the law is fitted to some and held against the others.

In it K/V is read next to weights and products; attention's own arithmetic, rows x keys, has a rate of its own:

    seconds = host + row x rows + max(weights / read, products / multiply) + K/V / fetch + attention / attend
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median

import numpy as np
from numpy.typing import NDArray

from paceline.api.llm import LLM
from paceline.bench.passes import time_passes
from paceline.core.errors import ConfigError
from paceline.plan.throughput import Cost, ServedModel, pass_cost

REPEATS = 9  # of each pass; medians count
LEAST_POINTS = 8  # timed passes that a law of six figures is fitted to
INTENSITIES = tuple(2 ** (n / 4) for n in range(41))  # FLOPs a byte that are tried: 1 to 1,024
Timed = Mapping[tuple[ServedModel, int, int, int], float]
"""Seconds of passes by network (the layers that were run), sequences, tokens in front of the rows of each, rows."""
Size = tuple[int, int, int, bool]  # sequences, tokens that each has, rows of each; a quarter of the layers alone
FITTED: tuple[Size, ...] = (
    *((1, 64, rows, False) for rows in (1, 2, 4, 8, 16, 32)),
    *((batch, 64, 1, False) for batch in (4, 16)),
    *((1, context, rows, False) for context in (512, 1536) for rows in (1, 8)),
    *((8, context, 1, False) for context in (512, 1536)),
    *((1, 64, rows, True) for rows in (1, 8)),
    (16, 512, 5, False),
)
HELD_OUT: tuple[Size, ...] = (
    *((1, 256, 5, False), (2, 128, 3, False), (4, 1024, 1, False), (8, 256, 1, False), (16, 1024, 1, False)),
    *((4, 512, 5, False), (1, 1024, 16, False), (1, 512, 1, True), (16, 128, 5, False)),
)


@dataclass(frozen=True, kw_only=True)
class PassLaw:
    """The law of the present machine. Times are in seconds."""

    host: float  # a pass, whatever it holds
    row: float  # a row: packing, norms, the choice of a token
    weight: float  # a byte of weights that is read
    hoi: float  # FLOPs of products that pass while a byte of weights is read
    kv: float  # a byte of K/V that is read
    attention: float  # a FLOP of attention's own arithmetic

    def seconds(self, network: ServedModel, batch: int, context: float, rows: int = 1) -> float:
        """A pass over ``rows`` rows of each of ``batch`` sequences with ``context`` tokens in front of them."""
        rates = self.host, self.row, self.weight, self.kv, self.attention
        terms = law_terms(pass_cost(network, batch, context, rows), batch * rows, self.hoi)
        return sum(rate * term for rate, term in zip(rates, terms, strict=True))


def law_terms(cost: Cost, rows: int, hoi: float) -> tuple[float, ...]:
    """What the law's rates are multiplied with: pass, rows, bytes of weights, bytes of K/V, FLOPs of attention."""
    return 1.0, rows, max(cost.weights, cost.compute / hoi), cost.kv, cost.attention


@dataclass(frozen=True, kw_only=True)
class MeasuredLaw:
    """The law of this machine, and the passes that it was fitted to and held against (see `errors_of`)."""

    law: PassLaw
    fitted: list[dict[str, float]]
    held_out: list[dict[str, float]]


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
    table = np.array([law_terms(pass_cost(*size), size[1] * size[3], hoi) for size in timed])
    table /= np.array([*timed.values()])[:, None]
    scale = np.linalg.norm(table, axis=0)
    scale[scale == 0] = 1.0
    best, least = np.zeros(table.shape[1]), float("inf")
    for count in range(1, table.shape[1] + 1):
        for chosen in combinations(range(table.shape[1]), count):
            part: NDArray[np.float64] = table[:, chosen] / scale[list(chosen)]
            values = np.linalg.lstsq(part, np.ones(len(timed)), rcond=None)[0]
            left = float(np.square(part @ values - 1).sum())
            if (values >= 0).all() and left < least:
                best, least = np.zeros(table.shape[1]), left
                best[list(chosen)] = values / scale[list(chosen)]
    host, row, weight, kv, attention = (float(value) for value in best)
    return PassLaw(host=host, row=row, weight=weight, hoi=hoi, kv=kv, attention=attention)


def errors(law: PassLaw, timed: Timed) -> list[float]:
    """Predicted over measured time, less 1, of each pass."""
    return [law.seconds(*size) / seconds - 1 for size, seconds in timed.items()]


def errors_of(law: PassLaw, timed: Timed) -> list[dict[str, float]]:
    """Passes with what they took, ``measured_ms``, and the law's relative ``error`` of each."""
    return [
        {"layers": network.shape.num_layers, "batch": batch, "context": context, "rows": rows}
        | {"measured_ms": 1e3 * seconds, "error": error}
        for ((network, batch, context, rows), seconds), error in zip(timed.items(), errors(law, timed), strict=True)
    ]


def measure_law(
    llm: LLM,
    network: ServedModel,
    progress: Callable[[int], None] | None = None,
    *,
    fitted: Sequence[Size] = FITTED,
    held_out: Sequence[Size] = HELD_OUT,
    repeats: int = REPEATS,
) -> MeasuredLaw:
    """Time passes of a target and fit the law of the machine to them.

    Args:
        llm, network: the target, loaded as it will be used, and its sizes.
        progress: called with the number of rounds done, of ``repeats + 1``.
        fitted, held_out: the passes; those beyond the model's positions are left out.

    Raises:
        ConfigError: a model with too few positions for enough passes.
    """
    decoder = llm.decoder
    quarter, room = max(1, decoder.num_layers // 4), decoder.config.max_position
    lower = replace(network, shape=network.shape.last_layers(quarter))
    sizes = [(b, c, r, quarter if part else None) for b, c, r, part in (*fitted, *held_out)]
    times = time_passes(decoder, [size for size in sizes if size[1] + size[2] <= room], repeats, progress)
    parts = [
        {
            (lower if part else network, batch, context, rows): median(taken) / 1e3
            for batch, context, rows, part in wanted
            if (taken := times.get((batch, context, rows, quarter if part else None)))
        }
        for wanted in (fitted, held_out)
    ]
    law = fit(parts[0])
    return MeasuredLaw(law=law, fitted=errors_of(law, parts[0]), held_out=errors_of(law, parts[1]))
