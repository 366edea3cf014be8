"""Two reports side by side: what was different about the runs, and what became faster or slower.

The trials of two runs are not paired in time, so a slow machine moves every tokens/s of a run. Speed-ups over
plain decoding are paired within each run and hardly feel that: where both are shown, they are the safer ones.
Where both runs asked the same prompts, groups are matched by their prompts, which takes the differences
between prompts out of the interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any, Literal
from zlib import crc32

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .records import Cell, Report, Trial
from .report import wording as say
from .summary import SEED, Floats, Index, Interval, bootstrap, draw_groups, percentile_bounds, speeds

Verdict = Literal["faster", "slower", "same", "unknown"]
Logs = dict[tuple[str, ...], list[float]]  # prompts of a group -> logs, one a repeat
STYLES: dict[Verdict, tuple[str, str]] = {  # mark, style
    "faster": ("▲", "green"),
    "slower": ("▼", "bold red"),
    "same": ("=", ""),
    "unknown": ("?", "dim"),
}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Something about the runs that is not the same."""

    what: str  # "machine.cores"
    a: str
    b: str


@dataclass(frozen=True, kw_only=True)
class ComparedRow:
    """One method in one cell, or over all cells that both reports have."""

    method: str  # as shown
    cell: Cell | None  # None: over all of them
    tokens_per_s: tuple[float, float]  # of a and of b
    ratio: Interval  # of tokens/s, b over a
    speedups: tuple[float, float] | None  # over plain decoding, in a and in b
    speedup_ratio: Interval | None  # of them, b over a

    @property
    def verdict(self) -> Verdict:
        """What became of the speed."""
        return verdict(self.ratio)

    @property
    def speedup_verdict(self) -> Verdict:
        """What became of the speed-up over plain decoding."""
        return verdict(self.speedup_ratio)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two reports side by side."""

    a: str  # titles
    b: str
    differences: tuple[Difference, ...]
    rows: tuple[ComparedRow, ...]  # over all cells first, then by cell
    only_a: tuple[str, ...]  # methods in cells that the other one lacks
    only_b: tuple[str, ...]


def verdict(ratio: Interval | None) -> Verdict:
    """``same`` where the interval covers 1; ``unknown`` where there is no interval."""
    if ratio is None or ratio.pairs < 2:
        return "unknown"
    if ratio.covers(1.0):
        return "same"
    return "faster" if ratio.low > 1 else "slower"


def compare(a: Report, b: Report) -> Comparison:
    """How report ``b`` differs from report ``a``; every ratio is b over a."""
    left, right = Index(a), Index(b)
    mine, theirs = _usable(left), _usable(right)
    common = [key for key in mine if key in theirs]
    methods = list(dict.fromkeys(name for _, name in common))
    totals = [_row(left, right, name, [cell for cell, n in common if n == name], None) for name in methods]
    each = [_row(left, right, name, [cell], cell) for cell, name in common]
    return Comparison(
        a=a.title,
        b=b.title,
        differences=tuple(differences(a, b)),
        rows=tuple((*totals, *each)),
        only_a=tuple(_key_label(left, key) for key in mine if key not in theirs),
        only_b=tuple(_key_label(right, key) for key in theirs if key not in mine),
    )


def differences(a: Report, b: Report) -> list[Difference]:
    """What is not the same about two runs: machine, versions, commit, model, settings, methods, workloads."""
    found = []
    for part in ("machine", "versions", "model", "settings", "workloads", "unavailable"):
        found += _different(part, getattr(a, part), getattr(b, part))
    if a.commit != b.commit:
        found.append(Difference(what="commit", a=str(a.commit), b=str(b.commit)))
    ours, theirs = ({m.name: asdict(m) for m in report.methods} for report in (a, b))
    for name in ours.keys() & theirs.keys():
        found += _different(f"method {name}", ours[name], theirs[name])
    return sorted(found, key=lambda d: d.what)


def _different(what: str, a: Any, b: Any) -> list[Difference]:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        keys = dict.fromkeys((*a, *b))
        return [d for key in keys for d in _different(f"{what}.{key}", a.get(key, "none"), b.get(key, "none"))]
    return [] if a == b else [Difference(what=what, a=str(a), b=str(b))]


# -- ratios


def _usable(index: Index) -> list[tuple[Cell, str]]:
    return [key for key, trials in index.trials.items() if speeds(trials)]


def _key_label(index: Index, key: tuple[Cell, str]) -> str:
    cell, name = key
    return f"{say.method_name(index.methods[name])}, {say.cell_label(cell)}"


def _row(left: Index, right: Index, name: str, cells: Sequence[Cell], cell: Cell | None) -> ComparedRow:
    sides = [(_speed_logs(left, name, c), _speed_logs(right, name, c)) for c in cells]
    ratios = [(_speedup_logs(left, name, c), _speedup_logs(right, name, c)) for c in cells]
    ratios = [(a, b) for a, b in ratios if a and b]
    ratio = _ratio(sides, f"{name}|{cell}")
    assert ratio is not None  # a common cell has finished trials on both sides
    return ComparedRow(
        method=say.method_name(left.methods[name]),
        cell=cell,
        tokens_per_s=(_mean([a for a, _ in sides]), _mean([b for _, b in sides])),
        ratio=ratio,
        speedups=(_mean([a for a, _ in ratios]), _mean([b for _, b in ratios])) if ratios else None,
        speedup_ratio=_ratio(ratios, f"{name}|{cell}|speed-up"),
    )


def _speed_logs(index: Index, name: str, cell: Cell) -> Logs:
    trials = index.trials[cell, name]
    return _by_prompts(trials, {key: float(np.log(speed)) for key, speed in speeds(trials).items()})


def _speedup_logs(index: Index, name: str, cell: Cell) -> Logs:
    """Logs of the paired ratios to plain decoding; none of plain decoding itself."""
    reference = index.reference(index.methods[name])
    if reference is None or reference == name:
        return {}
    trials, plain = index.trials[cell, name], speeds(index.trials.get((cell, reference), ()))
    mine = speeds(trials)
    return _by_prompts(trials, {key: float(np.log(mine[key] / plain[key])) for key in mine.keys() & plain.keys()})


def _by_prompts(trials: Sequence[Trial], values: Mapping[tuple[int, int], float]) -> Logs:
    found: Logs = {}
    for trial in trials:
        if (trial.group, trial.repeat) in values:
            found.setdefault(tuple(trial.prompts), []).append(values[trial.group, trial.repeat])
    return found


def _mean(sides: Sequence[Logs]) -> float:
    """Geometric mean over cells and groups of the medians over repeats."""
    return float(np.exp(fmean(fmean(median(group) for group in side.values()) for side in sides)))


def _ratio(sides: Sequence[tuple[Logs, Logs]], label: str) -> Interval | None:
    """Geometric mean over cells of b over a, with a bootstrap interval."""
    if not sides:
        return None
    generator = np.random.default_rng([SEED, crc32(label.encode())])
    matched = [_matched(a, b) for a, b in sides]
    resamples = np.mean([_difference(a, b, generator) for a, b in matched], axis=0)  # [S]
    low, high = percentile_bounds(resamples)
    return Interval(
        value=_mean([b for _, b in matched]) / _mean([a for a, _ in matched]),
        low=float(np.exp(low)),
        high=float(np.exp(high)),
        groups=sum(min(len(a), len(b)) for a, b in matched),
        pairs=sum(min(sum(map(len, a.values())), sum(map(len, b.values()))) for a, b in matched),
    )


def _matched(a: Logs, b: Logs) -> tuple[Logs, Logs]:
    """The groups whose prompts are in both; all groups where no prompts are."""
    common = [key for key in a if key in b]
    return ({key: a[key] for key in common}, {key: b[key] for key in common}) if common else (a, b)


def _difference(a: Logs, b: Logs, generator: np.random.Generator) -> Floats:
    """[S] resampled means of b less those of a; matched groups are drawn together, repeats never are."""
    groups = draw_groups(len(a), generator)
    others = groups if a.keys() == b.keys() else draw_groups(len(b), generator)
    return bootstrap([*b.values()], generator, others) - bootstrap([*a.values()], generator, groups)


# -- on the terminal


def render_terminal(comparison: Comparison) -> RenderableType:
    """Differences of the runs first, then the figures, then what only one of them has."""
    parts: list[RenderableType] = [Text(f"A: {comparison.a}"), Text(f"B: {comparison.b}"), Text()]
    parts.append(_difference_table(comparison) if comparison.differences else Text("the runs differ in nothing known"))
    parts += [Text(), main_table(comparison) if comparison.rows else Text("no method ran in the same cell in both")]
    for side, only in (("A", comparison.only_a), ("B", comparison.only_b)):
        if only:
            parts += [Text(f"\nonly in {side}:"), *(Text(f"  {line}") for line in only)]
    note = (
        "Ratios B/A with 95% intervals; ▲ faster, ▼ slower, = the interval covers 1, ? too few trials. "
        "The runs were not interleaved: a machine that was slower at "
        "the time moves tok/s, and hardly the speed-ups over plain decoding, which are paired within each run."
    )
    return Group(*parts, Text(f"\n{note}", style="dim"))


def main_table(comparison: Comparison) -> Table:
    """The figures: over all common cells, then by cell."""
    table = Table(box=None, header_style="dim", padding=(0, 1, 0, 0))
    table.add_column("method", overflow="fold")
    for name in ("A tok/s", "B tok/s", "tok/s B/A", "speed-up B/A"):
        table.add_column(name, justify="right", no_wrap=True)
    for cell in dict.fromkeys(row.cell for row in comparison.rows):
        title = "all common cells" if cell is None else say.cell_label(cell)
        table.add_row(Text(title, style="bold"))
        for row in comparison.rows:
            if row.cell == cell:
                table.add_row(*_cells(row))
    return table


def _cells(row: ComparedRow) -> tuple[Text | str, ...]:
    return (
        Text("  " + row.method),
        say.number(row.tokens_per_s[0]),
        say.number(row.tokens_per_s[1]),
        _judged(row.ratio, row.verdict),
        _judged(row.speedup_ratio, row.speedup_verdict) if row.speedup_ratio else say.NOTHING,
    )


def _judged(ratio: Interval | None, judged: Verdict) -> Text:
    mark, style = STYLES[judged]
    return Text(f"{say.interval(ratio)} {mark}", style=style)


def _difference_table(comparison: Comparison) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 1, 0, 0))
    for name in ("differs", "A", "B"):
        table.add_column(name, overflow="fold")
    for found in comparison.differences:
        table.add_row(*(Text(value) for value in (found.what, found.a, found.b)))
    return table
