"""From raw trials to figures: speeds, paired speed-ups with intervals, times, the floor.

Pure: a report goes in, figures come out, nothing is read or written, and the same report always gives the
same figures (the bootstrap's seed is fixed).

A speed-up is a ratio of tokens a second between two methods on the same prompts in the same repeat. Of each
group of prompts the median over its repeats counts, of the groups the geometric mean, and of several
workloads the geometric mean of theirs. The interval is a percentile bootstrap over groups, whose repeats stay together
(Davison and Hinkley 1997, section 3.8); over the repeats where there is a single group.

Axis letter: S resamples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from statistics import geometric_mean, median
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from .records import PLAIN, Cell, Exactness, Method, Report, Trial

RESAMPLES = 2000
CONFIDENCE = 0.95
TARGET_SETTINGS = ("exact", "kernels", "threads", "device")  # how the target runs, without the drafter
SEED = 20  # of the bootstrap

Floats = NDArray[np.float64]
Sample = tuple[float, Floats, int]  # log of a ratio, its [S] resamples, number of pairs


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A ratio and how sure it is."""

    value: float
    low: float  # 2.5 % of the resamples lie below
    high: float  # 2.5 % of the resamples lie above
    pairs: int  # paired trials; with a single one there is no spread, and low = value = high


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method on one workload, or over all workloads of a section."""

    section: Cell  # the cell without workload and new tokens, which all rows of one table share
    cell: Cell | None  # None: over all workloads
    method: Method
    trials: list[Trial]
    figures: dict[str, float | None]  # see `figures_of`
    reference: str | None  # the plain decoding that the speed-up is over
    speedup: Interval | None  # None: of the reference itself, or where no trial could be paired
    exact: list[Exactness]  # the ids that were compared
    workloads: int  # of the row

    @property
    def workload(self) -> str | None:
        """Return the workload's name; None: over all workloads."""
        return self.cell.workload if self.cell else None

    @property
    def speed(self) -> float | None:
        """Return the median tokens/s; over all workloads the geometric mean of the medians."""
        return self.figures["tokens_per_s"]

    @property
    def is_reference(self) -> bool:
        """Return whether speed-ups are over it."""
        return self.speedup is None and self.reference == self.method.name

    @property
    def failed(self) -> list[Trial]:
        """Return the trials that ended with an error."""
        return [trial for trial in self.trials if trial.error is not None]


class Summary:
    """A report's trials by cell and method, the sections they fall into, and every figure, in its own order."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.methods = {method.name: method for method in report.methods}
        self.trials: dict[tuple[Cell, str], list[Trial]] = {}
        for trial in report.trials:
            self.trials.setdefault((trial.cell, trial.method), []).append(trial)
        self.cells: dict[Cell, list[Cell]] = {}  # by section
        for cell in dict.fromkeys(cell for cell, _ in self.trials):
            self.cells.setdefault(_section(cell), []).append(cell)
        self.sections = sorted(self.cells, key=_order)
        self._samples: dict[tuple[str, str, Cell], Sample | None] = {}

    @cached_property
    def rows(self) -> list[Row]:
        """Return the rows by section, workload, method."""
        keys = [(cell, name) for section in self.sections for cell in self.cells[section] for name in self.methods]
        return [self._row(name, [cell], cell) for cell, name in keys if (cell, name) in self.trials]

    @cached_property
    def overall(self) -> list[Row]:
        """Return the rows over all workloads by section, method."""
        pairs = product(self.sections, self.methods)
        each = [(name, [c for c in self.cells[section] if (c, name) in self.trials]) for section, name in pairs]
        return [self._row(name, cells) for name, cells in each if cells]

    @property
    def main(self) -> Cell | None:
        """Return the section to report first."""
        return next(iter(self.sections), None)

    @property
    def exact(self) -> list[Exactness]:
        """Return the comparisons of this engine's methods."""
        return [e for e in self.report.exactness if self.report.is_own(e.method)]

    def of(self, section: Cell) -> list[Row]:
        """Return the rows of one section."""
        return [row for row in self.rows if row.section == section]

    def total(self, section: Cell | None) -> list[Row]:
        """Return the rows over all workloads of one section; none of none."""
        return [row for row in self.overall if row.section == section]

    def workloads(self, section: Cell) -> list[str]:
        """Return the names of workloads, in the order of the run."""
        return list(dict.fromkeys(cell.workload for cell in self.cells[section]))

    def dtype(self, method: Method) -> str:
        """Return the type that the method computes in; ``auto`` is the checkpoint's."""
        return str(self.report.model.get("dtype", "auto")) if method.dtype == "auto" else method.dtype

    def reference(self, method: Method, engine: str | None = None) -> str | None:
        """Return the plain decoding of the same dtype and application; None where there is none.

        It is that of ``engine``; default: of the method's own. Of several the one that runs the target most alike
        counts, then the one called `PLAIN`.
        """
        same = [
            m
            for m in self.methods.values()
            if (m.engine, m.application) == (engine or method.engine, method.application)
            and m.plain
            and self.dtype(m) == self.dtype(method)
        ]
        shared = {m.name: sum(method.settings.get(k) == m.settings.get(k) for k in TARGET_SETTINGS) for m in same}
        nearest = min(same, key=lambda m: (m.name != method.name, -shared[m.name], m.name != PLAIN), default=None)
        return nearest.name if nearest else None

    def sample(self, a: str, b: str, cell: Cell) -> Sample | None:
        """Return a sample of the ratio a/b; None where nothing pairs."""
        key = (a, b, cell)
        if key not in self._samples:
            logs = speed_logs(self.trials.get((cell, a), ()), self.trials.get((cell, b), ()))
            self._samples[key] = _sample([*logs.values()], f"{a}|{b}|{cell}") if logs else None
        return self._samples[key]

    def _row(self, name: str, cells: Sequence[Cell], cell: Cell | None = None) -> Row:
        method, reference = self.methods[name], self.reference(self.methods[name])
        each = [self.trials[of, name] for of in cells]
        figures = figures_of(trials := sum(each, []), self.report.machine.get("read_bandwidth_bytes_per_s"))
        medians = [speed for trials_of_one in each if (speed := median_speed(trials_of_one)) is not None]
        if len(medians) > 1:
            figures["tokens_per_s"] = geometric_mean(medians)
        return Row(
            section=_section(cells[0]),
            cell=cell,
            method=method,
            trials=trials,
            figures=figures,
            reference=reference,
            speedup=overall_ratio(self, name, reference, cells) if reference not in (None, name) else None,
            exact=[e for e in self.report.exactness if e.method == name and e.cell in cells],
            workloads=len(medians),
        )


def _section(cell: Cell) -> Cell:
    return replace(cell, workload="", max_new_tokens=0)


def _order(section: Cell) -> tuple[float, ...]:
    return section.temperature, section.top_k, section.context or 0, section.ignore_eos, section.batch


# -- ratios


def overall_ratio(summary: Summary, a: str, b: str, cells: Iterable[Cell]) -> Interval | None:
    """Return how many times as fast as ``b`` method ``a`` is: the geometric mean over the cells in which both ran.

    Any two methods may be compared: a drafter with plain decoding, plain decoding with a peer's. None where no trials
    pair.
    """
    samples = [sample for cell in cells if (sample := summary.sample(a, b, cell)) is not None]
    if not samples:
        return None
    values, resamples, pairs = zip(*samples, strict=True)
    low, high = percentile_bounds(np.mean(resamples, axis=0))
    bounds = {"low": float(np.exp(low)), "high": float(np.exp(high))}
    return Interval(value=float(np.exp(np.mean(values))), **bounds, pairs=sum(pairs))


def speed_logs(a: Iterable[Trial], b: Iterable[Trial] | None = None) -> dict[int, list[float]]:
    """Return logs of tokens/s, or of the ratios a/b, by group, one entry a repeat that is finished (in both)."""
    left = speeds(a)
    right = dict.fromkeys(left, 1.0) if b is None else speeds(b)
    groups: dict[int, list[float]] = {}
    for group, repeat in sorted(left.keys() & right.keys()):
        groups.setdefault(group, []).append(float(np.log(left[group, repeat] / right[group, repeat])))
    return groups


def speeds(trials: Iterable[Trial]) -> dict[tuple[int, int], float]:
    """Return tokens/s by (group, repeat), without failed trials and those in which no token came out."""
    return {(t.group, t.repeat): t.tokens_per_s for t in trials if t.error is None and t.tokens_per_s > 0}


def _sample(logs: list[list[float]], label: str) -> Sample:
    # The label keeps the draws of different cells independent, whatever their order.
    generator = np.random.default_rng([SEED, crc32(label.encode())])
    value = float(np.mean([median(group) for group in logs]))
    return value, bootstrap(logs, generator), sum(map(len, logs))


def bootstrap(logs: Sequence[Sequence[float]], generator: np.random.Generator, resamples: int = RESAMPLES) -> Floats:
    """Return [S] means over groups of the medians over repeats, groups drawn again with replacement each time.

    Args:
        logs: one list a group, one entry a repeat; of a single group the repeats are drawn, and their median counts.
    """
    alone = len(logs) == 1
    values = np.array(logs[0] if alone else [median(group) for group in logs])
    drawn = values[generator.integers(0, len(values), (resamples, len(values)))]
    return np.median(drawn, axis=1) if alone else drawn.mean(axis=1)


def percentile_bounds(resamples: Floats) -> tuple[float, float]:
    """Return the bounds that leave out the same share of the resamples on both sides."""
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(resamples, [tail, 1 - tail])
    return float(low), float(high)


# -- figures of one method


def figures_of(trials: Iterable[Trial], bandwidth: float | None) -> dict[str, float | None]:
    """Return the figures of one method's trials other than ratios, by name; None where the engine reports none.

    tokens_per_s: median over trials. accepted_length: 1 + accepted / passes. ttft_ms: median over requests.
    wait_p90_ms: 90th percentile of the waits between two arrivals. floor_share: time that the reads alone would take,
    over the wall time.

    Args:
        trials: failed ones are left out.
        bandwidth: bytes/s at which the machine reads memory; None: there is no floor.
    """
    good = [t for t in trials if t.error is None]
    wall, passes, read = sum(t.wall_ms for t in good), sum(t.passes for t in good), sum(t.bytes_read for t in good)
    ttft, waits = [ms for t in good for ms in t.ttft_ms], [ms for t in good for ms in t.waits_ms]
    return {
        "tokens_per_s": median_speed(good),
        "accepted_length": 1 + sum(t.accepted for t in good) / passes if passes else None,
        "ttft_ms": median(ttft) if ttft else None,
        "wait_p90_ms": float(np.quantile(waits, 0.9)) if waits else None,
        "floor_share": 1000 * read / bandwidth / wall if bandwidth and wall and read else None,
    }


def median_speed(trials: Iterable[Trial]) -> float | None:
    """Return the median of tokens/s; None where no trial has any."""
    values = [*speeds(trials).values()]
    return median(values) if values else None


# -- the summary


def best(rows: Iterable[Row]) -> Row | None:
    """Return the speculative method of this engine with the highest speed-up."""
    able = [(row.speedup.value, row) for row in rows if row.speedup and row.method.ours and not row.method.plain]
    return max(able, key=lambda pair: pair[0], default=(0.0, None))[1]
