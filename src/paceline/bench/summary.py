"""From raw trials to figures: speeds, paired speed-ups with intervals, acceptance, times, the floor.

Pure: a report goes in, figures come out, nothing is read or written, and the same report always gives the
same figures (the bootstrap's seed is fixed).

A speed-up is a ratio of tokens a second between two methods on the same prompts in the same repeat. Of each
group of prompts the median over its repeats counts, of the groups the geometric mean, and of several
workloads the geometric mean of theirs. The interval is a percentile bootstrap over groups, and over repeats
within a group (Davison and Hinkley 1997, section 3.8: two nested levels, both resampled with replacement).

Axis letters: G groups, R repeats, S resamples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from statistics import geometric_mean, median
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from .records import PLAIN, Cell, Exactness, Method, Report, Trial

RESAMPLES = 2000
CONFIDENCE = 0.95
NEVER_SLOWER = 0.97  # a method is called slower than plain where its lower bound is below this
TARGET_SETTINGS = ("exact", "kernels", "attention", "threads", "device")  # how the target runs, drafter apart
SEED = 20  # of the bootstrap

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A ratio and how sure it is."""

    value: float
    low: float  # 2.5 % of the resamples lie below
    high: float  # 2.5 % of the resamples lie above
    groups: int  # groups of prompts behind it
    pairs: int  # paired trials behind it; with a single one there is no spread, and low = value = high

    def covers(self, ratio: float) -> bool:
        """Whether the ratio lies within the interval."""
        return self.low <= ratio <= self.high


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What the trials of one method say, ratios apart. None where the engine does not tell.

    The tokens of one pass arrive together: waits are between two arrivals, whatever number of tokens came at their end.
    """

    trials: int  # that went well
    failed: int
    error: str | None  # of the first failed trial
    tokens: int
    wall_ms: float
    speed: float | None  # tokens/s: median over trials; over several workloads the geometric mean of theirs
    speed_p10: float | None
    speed_p90: float | None
    accepted_length: float | None  # 1 + accepted / passes
    call_reduction: float | None  # passes of plain decoding for the same tokens, over those taken
    drafted: float | None  # nodes that a pass checked; None where none was
    row_layers: float | None  # a pass: rows times the layers that each went through
    upper_row_layers: float | None  # a pass: those in the layers that streams go through; None where none does
    pruned: float | None  # proposed nodes a pass that were pruned in mid-pass; None where none was
    rode: float | None  # share of passes with streams whose last accepted node carried them; else they ran later
    acceptance: tuple[float, ...]  # [d-1] share accepted at depth d, of the passes that had a node there
    draft: float | None  # share of the wall time, like the next two
    verify: float | None
    host: float | None
    ttft_ms: float | None  # median over requests
    wait_mean_ms: float | None  # a token: first to last arrival over the tokens that came after the first arrival
    wait_p50_ms: float | None
    wait_p90_ms: float | None
    wait_p99_ms: float | None
    floor_share: float | None  # time the reads alone would take, over the wall time


@dataclass(frozen=True, kw_only=True)
class Section(Cell):
    """What is the same for all rows of one table: of a cell no workload, and new tokens only where they differ."""

    dtype: str

    def label(self) -> str:
        """For headings."""
        parts = [f"batch {self.batch}", f"temperature {self.temperature:g}" if self.temperature else "greedy"]
        parts += [f"top {self.top_k}"] if self.top_k else []
        parts.append(self.dtype)
        parts += [f"context {self.context}"] if self.context is not None else []
        parts += [f"{self.max_new_tokens} new tokens"] if self.max_new_tokens else []
        return ", ".join(parts + (["EOS ignored"] if self.ignore_eos else []))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method on one workload, or over all workloads of a section."""

    section: Section
    cell: Cell | None  # None: over all workloads
    method: Method
    figures: Figures
    reference: str | None  # the plain decoding that the speed-up is over
    speedup: Interval | None  # None: of the reference itself, or where no trial could be paired
    exact: list[Exactness]  # what ids were compared
    workloads: int = 1  # behind the row

    @property
    def workload(self) -> str | None:
        """Its name; None: over all workloads."""
        return self.cell.workload if self.cell else None

    @property
    def speed(self) -> float | None:
        """Median tokens/s; over all workloads the geometric mean of the medians."""
        return self.figures.speed


# -- the whole


class Summary:
    """A report's trials by cell and method, the sections they fall into, and every figure, in its own order."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.methods = {method.name: method for method in report.methods}
        self.trials: dict[tuple[Cell, str], list[Trial]] = {}
        for trial in report.trials:
            self.trials.setdefault((trial.cell, trial.method), []).append(trial)
        self.cells = list(dict.fromkeys(cell for cell, _ in self.trials))
        self._bare = {cell: replace(cell, max_new_tokens=0) for cell in self.cells}
        bare = list(self._bare.values())
        self._many_lengths = {cell for cell, key in self._bare.items() if bare.count(key) > 1}
        found = [self.section(cell, name) for cell, name in self.trials]
        # Dtypes in the order of the methods, then the values of what a cell is made of.
        dtypes = list(dict.fromkeys(self.dtype(method) for method in report.methods))
        self.sections = tuple(sorted(dict.fromkeys(found), key=lambda s: (dtypes.index(s.dtype), _order(s))))
        self.samples: dict[tuple[str, str, Cell], tuple[float, Floats, int, int] | None] = {}

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """By section, workload, method."""
        found = [(s, entry) for s in self.sections for entry in self.in_section(s)]
        return tuple(self._row(section, method, {cell: trials}, cell) for section, (cell, method, trials) in found)

    @cached_property
    def overall(self) -> tuple[Row, ...]:
        """By section, method: over all workloads."""
        found = []
        for section in self.sections:
            entries = self.in_section(section)
            for name, method in self.methods.items():
                mine = {cell: trials for cell, other, trials in entries if other.name == name}
                found += [self._row(section, method, mine)] if mine else []
        return tuple(found)

    @cached_property
    def main(self) -> Section | None:
        """The one to show first: the first with a speculative method of this engine, else the first."""
        able = [s for s in self.sections if any(row.speedup and row.method.own for row in self.total(s))]
        return next(iter((*able, *self.sections)), None)

    @property
    def exact(self) -> list[Exactness]:
        """What was compared of this engine's methods."""
        return [e for e in self.report.exactness if self.report.is_own(e.method)]

    def of(self, section: Section) -> list[Row]:
        """The rows of one section."""
        return [row for row in self.rows if row.section == section]

    def total(self, section: Section | None) -> list[Row]:
        """The rows over all workloads of one section; none of none."""
        return [row for row in self.overall if row.section == section]

    def workloads(self, section: Section) -> list[str]:
        """Names, in the order of the run."""
        return list(dict.fromkeys(row.workload for row in self.of(section) if row.workload is not None))

    def dtype(self, method: Method) -> str:
        """What the method computes in; ``auto`` is the checkpoint's."""
        return str(self.report.model.get("dtype", "auto")) if method.dtype == "auto" else method.dtype

    def section(self, cell: Cell, method: str) -> Section:
        """Where a cell of a method belongs."""
        length = cell.max_new_tokens if cell in self._many_lengths else 0
        shared = {**vars(cell), "workload": "", "max_new_tokens": length}
        return Section(**shared, dtype=self.dtype(self.methods[method]))

    def in_section(self, section: Section) -> list[tuple[Cell, Method, list[Trial]]]:
        """Cells in the order of the run, methods in the order of the report."""
        order = {name: place for place, name in enumerate(self.methods)}
        keys = [key for key in self.trials if self.section(*key) == section]
        keys.sort(key=lambda key: (self.cells.index(key[0]), order[key[1]]))
        return [(cell, self.methods[name], self.trials[cell, name]) for cell, name in keys]

    def reference(self, method: Method, engine: str | None = None) -> str | None:
        """The plain decoding in the same dtype and of the same application; None where there is none.

        It is that of ``engine``; default: of the method's own. Of several the one counts that runs the target most
        alike, then the one called `PLAIN`.
        """
        same = [
            m
            for m in self.methods.values()
            if (m.engine, m.application) == (engine or method.engine, method.application)
            and m.plain
            and self.dtype(m) == self.dtype(method)
        ]
        shared = {m.name: sum(method.settings.get(k) == m.settings.get(k) for k in TARGET_SETTINGS) for m in same}
        found = min(same, key=lambda m: (m.name != method.name, -shared[m.name], m.name != PLAIN), default=None)
        return found.name if found else None

    def sample(self, a: str, b: str, cell: Cell) -> tuple[float, Floats, int, int] | None:
        """Log of the ratio a/b, its [S] resamples, groups and pairs; None where nothing pairs."""
        key = (a, b, cell)
        if key not in self.samples:
            logs = paired_logs(self.trials.get((cell, a), ()), self.trials.get((cell, b), ()))
            self.samples[key] = _sample(logs, f"{a}|{b}|{cell}") if logs else None
        return self.samples[key]

    def _row(
        self, section: Section, method: Method, of: Mapping[Cell, Sequence[Trial]], cell: Cell | None = None
    ) -> Row:
        reference, bandwidth = self.reference(method), self.report.machine.get("read_bandwidth_bytes_per_s")
        found = figures([trial for trials in of.values() for trial in trials], bandwidth)
        spreads = [spread for trials in of.values() if (spread := _spread(trials))]
        if len(spreads) > 1:
            speed, p10, p90 = map(geometric_mean, zip(*spreads, strict=True))
            found = replace(found, speed=speed, speed_p10=p10, speed_p90=p90)
        return Row(
            section=section,
            cell=cell,
            method=method,
            figures=found,
            reference=reference,
            speedup=overall_ratio(self, method.name, reference, of) if reference not in (None, method.name) else None,
            exact=[e for e in self.report.exactness if e.method == method.name and e.cell in of],
            workloads=len(spreads),
        )


def _order(section: Section) -> tuple[float, ...]:
    s = section
    return (s.temperature, s.top_k, s.context or 0, s.max_new_tokens, s.ignore_eos, s.batch)


# -- ratios


def overall_ratio(summary: Summary, a: str, b: str, cells: Iterable[Cell]) -> Interval | None:
    """How many times as fast as ``b`` method ``a`` is: the geometric mean over the cells in which both ran.

    Any two methods may be asked about: a drafter over plain decoding, plain decoding over a peer's. None where no
    trials pair.
    """
    found = [sample for cell in cells if (sample := summary.sample(a, b, cell)) is not None]
    if not found:
        return None
    values, resamples, groups, pairs = zip(*found, strict=True)
    return interval_of(float(np.mean(values)), resamples, sum(groups), sum(pairs))


def interval_of(value: float, resamples: Sequence[Floats], groups: int, pairs: int) -> Interval:
    """A ratio with its bounds, from logs: of the ratio itself, and of its [S] resamples in each cell."""
    low, high = percentile_bounds(np.mean(resamples, axis=0))
    return Interval(
        value=float(np.exp(value)), low=float(np.exp(low)), high=float(np.exp(high)), groups=groups, pairs=pairs
    )


def paired_logs(a: Iterable[Trial], b: Iterable[Trial]) -> list[list[float]]:
    """Logs of the ratios a/b of tokens/s, one list a group, one entry a repeat that both finished."""
    left, right = speeds(a), speeds(b)
    groups: dict[int, list[float]] = {}
    for group, repeat in sorted(left.keys() & right.keys()):
        ratio = left[group, repeat] / right[group, repeat]
        groups.setdefault(group, []).append(float(np.log(ratio)))
    return list(groups.values())


def speeds(trials: Iterable[Trial]) -> dict[tuple[int, int], float]:
    """Tokens/s by (group, repeat). Failed trials, and those in which no token came out, have none."""
    return {(t.group, t.repeat): t.tokens_per_s for t in trials if t.error is None and t.tokens_per_s > 0}


def _sample(logs: list[list[float]], label: str) -> tuple[float, Floats, int, int]:
    # The label keeps the draws of different cells independent, whatever order they are asked in.
    generator = np.random.default_rng([SEED, crc32(label.encode())])
    value = float(np.mean([median(group) for group in logs]))
    groups = draw_groups(len(logs), generator)
    return value, bootstrap(logs, generator, groups), len(logs), sum(map(len, logs))


def draw_groups(many: int, generator: np.random.Generator, resamples: int = RESAMPLES) -> NDArray[np.intp]:
    """[S, G] groups drawn with replacement."""
    return generator.integers(0, many, (resamples, many))


def bootstrap(logs: Sequence[Sequence[float]], generator: np.random.Generator, groups: NDArray[np.intp]) -> Floats:
    """[S] means over groups of the medians over repeats, the repeats of every group drawn anew each time.

    Args:
        logs: one list a group, one entry a repeat.
        groups: [S, G] the groups of each resample (see `draw_groups`).
    """
    counts = np.array([len(group) for group in logs])  # [G]
    values = np.full((len(logs), int(counts.max())), np.inf)  # [G, R], +inf where a repeat is missing
    for place, group in enumerate(logs):
        values[place, : len(group)] = group
    size = counts[groups][..., None]  # [S, G, 1]
    repeats = (generator.random((*groups.shape, values.shape[1])) * size).astype(np.intp)  # [S, G, R]
    drawn = values[groups[..., None], repeats]
    drawn[np.arange(values.shape[1]) >= size] = np.inf
    drawn.sort(axis=-1)  # missing repeats go last, so that the middle of the first `size` is the median
    lower = np.take_along_axis(drawn, (size - 1) // 2, axis=-1)[..., 0]
    upper = np.take_along_axis(drawn, size // 2, axis=-1)[..., 0]
    return ((lower + upper) / 2).mean(axis=1)


def percentile_bounds(resamples: Floats) -> tuple[float, float]:
    """The bounds that leave out the same share of the resamples on both sides."""
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(resamples, [tail, 1 - tail])
    return float(low), float(high)


# -- figures of one method


def figures(trials: Sequence[Trial], bandwidth: float | None) -> Figures:
    """All figures of a list of trials but the ratios.

    Args:
        trials: of one method; failed ones are counted and left out.
        bandwidth: bytes/s at which the machine reads memory; None: there is no floor.
    """
    good = [t for t in trials if t.error is None]
    failed = [t for t in trials if t.error is not None]

    def total(name: str) -> Any:
        return sum(getattr(t, name) for t in good)

    def a_pass(name: str) -> float | None:
        return total(name) / passes if passes and total(name) else None

    tokens, wall, passes = total("tokens"), total("wall_ms"), total("passes")
    offered, taken = _sum_lists(t.depth_offered for t in good), _sum_lists(t.depth_accepted for t in good)
    speed, p10, p90 = _spread(good) or (None,) * 3
    ttft = [value for t in good for value in t.ttft_ms]
    waits, came = [wait for t in good for wait in t.waits_ms], sum(sum(t.arrivals) for t in good)
    p50_ms, p90_ms, p99_ms = map(float, np.quantile(waits, [0.5, 0.9, 0.99])) if waits else (None,) * 3
    known = sum(total(f"{part}_ms") for part in ("draft", "verify", "host"))
    whole = max(known, wall)  # two clocks may disagree by a hair: the parts never add up to more than the whole
    floor_ms = 1000 * total("bytes_read") / bandwidth if bandwidth and wall else None
    return Figures(
        trials=len(good),
        failed=len(failed),
        error=failed[0].error if failed else None,
        tokens=tokens,
        wall_ms=wall,
        speed=speed,
        speed_p10=p10,
        speed_p90=p90,
        accepted_length=1 + total("accepted") / passes if passes else None,
        call_reduction=tokens / passes if passes else None,
        **{name: a_pass(name) for name in ("drafted", "row_layers", "upper_row_layers", "pruned")},
        rode=total("rode") / total("stream_drafts") if total("stream_drafts") else None,
        acceptance=tuple(a / o if o else 0.0 for a, o in zip(taken, offered, strict=True)),
        **{part: total(f"{part}_ms") / whole if known else None for part in ("draft", "verify", "host")},
        ttft_ms=median(ttft) if ttft else None,
        wait_mean_ms=sum(waits) / came if came else None,
        wait_p50_ms=p50_ms,
        wait_p90_ms=p90_ms,
        wait_p99_ms=p99_ms,
        floor_share=floor_ms / wall if floor_ms else None,
    )


def _spread(trials: Iterable[Trial]) -> tuple[float, float, float] | None:
    """Median, 10th and 90th percentile of tokens/s; None where no trial has any."""
    found = list(speeds(trials).values())
    if not found:
        return None
    middle, p10, p90 = (float(value) for value in np.quantile(found, [0.5, 0.1, 0.9]))
    return middle, p10, p90


def _sum_lists(lists: Iterable[list[int]]) -> list[int]:
    return [sum(counts) for counts in zip_longest(*lists, fillvalue=0)]


# -- what a reader asks first


def best(rows: Iterable[Row]) -> Row | None:
    """The fastest speculative method of this engine by its speed; synthetic ones apart."""
    methods = [(row, row.method) for row in rows if row.speed is not None]
    able = [row for row, method in methods if method.own and not method.synthetic and not method.plain]
    return max(able, key=lambda row: row.speed or 0.0, default=None)


def slower_cells(summary: Summary) -> list[Row]:
    """Rows of speculative methods of this engine, synthetic ones apart, that may be slower than plain decoding."""
    able = [row for row in summary.rows if row.method.own and not row.method.synthetic]
    return [row for row in able if row.speedup and row.speedup.low < NEVER_SLOWER]
