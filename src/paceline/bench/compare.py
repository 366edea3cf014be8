"""Two reports side by side: what was different about the runs, and what became faster or slower.

The trials of two runs are not paired in time, so a slow machine moves every tokens/s of a run. Speed-ups over
plain decoding are paired within each run and hardly feel that: where both are shown, they are the safer ones.
Where both runs asked the same prompts, groups are matched by their prompts, which takes the differences
between prompts out of the interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp
from statistics import fmean, median
from typing import Any, Literal
from zlib import crc32

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from .records import Cell, Report
from .report import wording as say
from .report.terminal import BAD, FAINT, GOOD, add_rows, figures_table, rich_table
from .summary import SEED, Interval, Summary, bootstrap, draw_groups, interval_of, speeds

Verdict = Literal["faster", "slower", "same", "unknown"]
Logs = dict[tuple[str, ...], list[float]]  # prompts of a group -> logs, one a repeat
MARKS: dict[Verdict, tuple[str, str]] = {  # mark, and its style
    "faster": ("▲", GOOD),
    "slower": ("▼", BAD),
    "same": ("=", ""),
    "unknown": ("?", ""),
}


@dataclass(frozen=True, kw_only=True)
class ComparedRow:
    """One method in one cell, or over all cells that both reports have."""

    method: str  # as shown
    cell: Cell | None  # None: over all of them
    tokens_per_s: tuple[float, float]  # of a and of b
    ratio: Interval  # of tokens/s, b over a
    speedup_ratio: Interval | None  # of speed-ups over plain decoding, b over a


@dataclass(frozen=True, kw_only=True)
class ReportComparison:
    """Two reports side by side."""

    a: str  # titles
    b: str
    differences: list[tuple[str, str, str]]  # what of the runs is not the same (machine.cores, ..), and both values
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


def compare(a: Report, b: Report) -> ReportComparison:
    """How report ``b`` differs from report ``a``; every ratio is b over a."""
    left, right = Summary(a), Summary(b)
    mine, theirs = ([key for key, trials in side.trials.items() if speeds(trials)] for side in (left, right))
    common = [key for key in mine if key in theirs]
    methods = list(dict.fromkeys(name for _, name in common))
    totals = [_row(left, right, name, [cell for cell, n in common if n == name], None) for name in methods]

    def only(side: Summary, keys: list[tuple[Cell, str]]) -> tuple[str, ...]:
        return tuple(
            f"{say.method_name(side.methods[name])}, {say.cell_label(cell)}"
            for cell, name in keys
            if (cell, name) not in common
        )

    return ReportComparison(
        a=a.title,
        b=b.title,
        differences=differences(a, b),
        rows=(*totals, *(_row(left, right, name, [cell], cell) for cell, name in common)),
        only_a=only(left, mine),
        only_b=only(right, theirs),
    )


def differences(a: Report, b: Report) -> list[tuple[str, str, str]]:
    """What is not the same about two runs: machine, versions, commit, model, settings, methods, workloads."""
    found = []
    for part in ("machine", "versions", "model", "settings", "workloads", "unavailable"):
        found += _different(part, getattr(a, part), getattr(b, part))
    if a.commit != b.commit:
        found.append(("commit", str(a.commit), str(b.commit)))
    ours, theirs = ({m.name: asdict(m) for m in report.methods} for report in (a, b))
    for name in ours.keys() & theirs.keys():
        found += _different(f"method {name}", ours[name], theirs[name])
    return sorted(found)


def _different(what: str, a: Any, b: Any) -> list[tuple[str, str, str]]:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        keys = dict.fromkeys((*a, *b))
        return [d for key in keys for d in _different(f"{what}.{key}", a.get(key, "none"), b.get(key, "none"))]
    return [] if a == b else [(what, str(a), str(b))]


def _row(left: Summary, right: Summary, name: str, cells: Sequence[Cell], cell: Cell | None) -> ComparedRow:
    sides = [(_logs(left, name, c), _logs(right, name, c)) for c in cells]
    ratios = [
        (a, b) for c in cells if (a := _logs(left, name, c, paired=True)) and (b := _logs(right, name, c, paired=True))
    ]
    ratio = _ratio(sides, f"{name}|{cell}")
    assert ratio is not None  # a common cell has finished trials on both sides
    return ComparedRow(
        method=say.method_name(left.methods[name]),
        cell=cell,
        tokens_per_s=(exp(_mean([a for a, _ in sides])), exp(_mean([b for _, b in sides]))),
        ratio=ratio,
        speedup_ratio=_ratio(ratios, f"{name}|{cell}|speed-up"),
    )


def _logs(summary: Summary, name: str, cell: Cell, paired: bool = False) -> Logs:
    """Logs of speeds; paired: of their ratios to plain decoding's, and none of plain decoding itself."""
    trials = summary.trials[cell, name]
    values = speeds(trials)
    if paired:
        reference = summary.reference(summary.methods[name])
        plain = speeds(summary.trials.get((cell, reference), ())) if reference not in (None, name) else {}
        values = {key: speed / plain[key] for key, speed in values.items() if key in plain}
    found: Logs = {}
    for trial in trials:
        if (trial.group, trial.repeat) in values:
            found.setdefault(tuple(trial.prompts), []).append(float(np.log(values[trial.group, trial.repeat])))
    return found


def _mean(sides: Sequence[Logs]) -> float:
    """Mean over cells and groups of the medians over repeats."""
    return fmean(fmean(median(group) for group in side.values()) for side in sides)


def _ratio(sides: Sequence[tuple[Logs, Logs]], label: str) -> Interval | None:
    """Geometric mean over cells of b over a, with a bootstrap interval; matched by prompts where any are in both."""
    if not sides:
        return None
    generator = np.random.default_rng([SEED, crc32(label.encode())])
    matched, resamples = [], []
    for a, b in sides:
        common = [key for key in a if key in b]
        if common:
            a, b = {key: a[key] for key in common}, {key: b[key] for key in common}
        # Matched groups are drawn together, repeats never are.
        groups = draw_groups(len(a), generator)
        others = groups if common else draw_groups(len(b), generator)
        resamples.append(bootstrap([*b.values()], generator, others) - bootstrap([*a.values()], generator, groups))
        matched.append((a, b))
    return interval_of(
        _mean([b for _, b in matched]) - _mean([a for a, _ in matched]),
        resamples,
        groups=sum(min(len(a), len(b)) for a, b in matched),
        pairs=sum(min(sum(map(len, a.values())), sum(map(len, b.values()))) for a, b in matched),
    )


# -- on the terminal


def render_terminal(comparison: ReportComparison) -> RenderableType:
    """Differences of the runs first, then the figures, then what only one of them has."""
    parts: list[RenderableType] = [Text(f"A: {comparison.a}"), Text(f"B: {comparison.b}"), Text()]
    differing = figures_table(["differs", "A", "B"], comparison.differences, words=3)
    parts.append(differing if comparison.differences else Text("the runs differ in nothing known"))
    table = rich_table("method", "A tok/s", "B tok/s", "tok/s B/A", "speed-up B/A")
    for cell in dict.fromkeys(row.cell for row in comparison.rows):
        title = "all common cells" if cell is None else say.cell_label(cell)
        add_rows(table, title, (_cells(row) for row in comparison.rows if row.cell == cell))
    parts += [Text(), table if comparison.rows else Text("no method ran in the same cell in both")]
    for side, only in (("A", comparison.only_a), ("B", comparison.only_b)):
        parts += [Text(f"\nonly in {side}:"), *(Text(f"  {line}") for line in only)] if only else []
    note = (
        "Ratios B/A with 95% intervals; ▲ faster, ▼ slower, = the interval covers 1, ? too few trials. "
        "The runs were not interleaved: a machine that was slower at "
        "the time moves tok/s, and hardly the speed-ups over plain decoding, which are paired within each run."
    )
    return Group(*parts, Text(f"\n{note}", style=FAINT))


def _cells(row: ComparedRow) -> list[Text]:
    ratios = []
    for ratio in (row.ratio, row.speedup_ratio):
        mark, style = MARKS[verdict(ratio)]
        ratios.append(Text(f"{say.interval(ratio)} {mark}" if ratio else say.NOTHING, style=style if ratio else ""))
    return [Text(row.method), *(Text(say.number(speed)) for speed in row.tokens_per_s), *ratios]
