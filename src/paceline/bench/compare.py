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
from typing import Any
from zlib import crc32

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from .records import Cell, Report
from .report import wording as say
from .report.terminal import FAINT, figures_table, titled
from .summary import SEED, Interval, Summary, bootstrap, draw_groups, interval_of, speed_logs, speeds

Logs = dict[tuple[str, ...], list[float]]  # prompts of a group -> logs, one a repeat
MARKS = {"faster": "▲", "slower": "▼", "same": "=", "unknown": "?"}
NOTE = (
    "Ratios B/A with 95% intervals; ▲ faster, ▼ slower, = the interval covers 1, ? too few trials. The runs were not "
    "interleaved: a machine that was slower at the time moves tok/s, and hardly the speed-ups over plain decoding, "
    "which are paired within each run."
)


@dataclass(frozen=True, kw_only=True)
class ComparedRow:
    """One method in one cell of both reports, or over all such cells; every ratio is B over A."""

    method: str  # as shown
    cell: Cell | None  # None: over all of them
    tokens_per_s: tuple[float, float]  # of A and of B
    ratio: Interval  # of tokens/s
    speedup_ratio: Interval | None  # of speed-ups over plain decoding


def verdict(ratio: Interval | None) -> str:
    """``faster``, ``slower``, ``same`` where the interval covers 1, ``unknown`` where there is no interval."""
    if ratio is None or ratio.pairs < 2:
        return "unknown"
    if ratio.low <= 1.0 <= ratio.high:
        return "same"
    return "faster" if ratio.low > 1 else "slower"


def compare(a: Report, b: Report) -> list[ComparedRow]:
    """What both reports measured: over all common cells first, then by cell."""
    left, right = Summary(a), Summary(b)
    common = [key for key in _measured(left) if key in _measured(right)]
    methods = list(dict.fromkeys(name for _, name in common))
    totals = [_row(left, right, name, [cell for cell, n in common if n == name], None) for name in methods]
    return [*totals, *(_row(left, right, name, [cell], cell) for cell, name in common)]


def only(a: Report, b: Report) -> list[str]:
    """Methods in cells that report ``a`` has and ``b`` lacks."""
    left, others = Summary(a), _measured(Summary(b))
    missing = (key for key in _measured(left) if key not in others)
    return [f"{say.method_name(left.methods[name])}, {say.cell_label(cell)}" for cell, name in missing]


def _measured(summary: Summary) -> list[tuple[Cell, str]]:
    return [key for key, trials in summary.trials.items() if speeds(trials)]


def differences(a: Report, b: Report) -> list[tuple[str, str, str]]:
    """What is not the same about two runs (machine.cores, ..), and both values."""
    found = []
    for part in ("machine", "versions", "commit", "model", "settings", "workloads", "unavailable"):
        found += _different(part, getattr(a, part), getattr(b, part))
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
    paired = [(_logs(left, name, c, paired=True), _logs(right, name, c, paired=True)) for c in cells]
    ratio = _ratio(sides, f"{name}|{cell}")
    assert ratio is not None  # a common cell has finished trials on both sides
    return ComparedRow(
        method=say.method_name(left.methods[name]),
        cell=cell,
        tokens_per_s=(exp(_mean([a for a, _ in sides])), exp(_mean([b for _, b in sides]))),
        ratio=ratio,
        speedup_ratio=_ratio([(a, b) for a, b in paired if a and b], f"{name}|{cell}|speed-up"),
    )


def _logs(summary: Summary, name: str, cell: Cell, paired: bool = False) -> Logs:
    """Logs of speeds; paired: of their ratios to plain decoding's, and none of plain decoding itself."""
    trials, reference = summary.trials[cell, name], summary.reference(summary.methods[name])
    plain = summary.trials.get((cell, reference), ()) if reference not in (None, name) else ()
    prompts = {trial.group: tuple(trial.prompts) for trial in trials}
    return {prompts[group]: logs for group, logs in speed_logs(trials, plain if paired else None).items()}


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
        pairs=sum(min(sum(map(len, a.values())), sum(map(len, b.values()))) for a, b in matched),
    )


# -- on the terminal


def render_terminal(a: Report, b: Report) -> RenderableType:
    """Differences of the runs first, then the figures, then what only one of them has."""
    parts: list[RenderableType] = [Text(f"A: {a.title}"), Text(f"B: {b.title}"), Text()]
    differing, compared, rows = differences(a, b), compare(a, b), []
    table = figures_table(["differs", "A", "B"], differing, words=3)
    parts.append(table if differing else Text("the runs differ in nothing known"))
    for cell in dict.fromkeys(row.cell for row in compared):
        title = "all common cells" if cell is None else say.cell_label(cell)
        rows += titled(title, (_cells(row) for row in compared if row.cell == cell))
    figures = figures_table(["method", "A tok/s", "B tok/s", "tok/s B/A", "speed-up B/A"], rows)
    parts += [Text(), figures if rows else Text("no method ran in the same cell in both")]
    for side, lines in (("A", only(a, b)), ("B", only(b, a))):
        parts += [Text(f"\nonly in {side}:"), *(Text(f"  {line}") for line in lines)] if lines else []
    return Group(*parts, Text(f"\n{NOTE}", style=FAINT))


def _cells(row: ComparedRow) -> list[str]:
    both = (row.ratio, row.speedup_ratio)
    ratios = (f"{say.interval(ratio)} {MARKS[verdict(ratio)]}" if ratio else say.NOTHING for ratio in both)
    return [row.method, *map(say.number, row.tokens_per_s), *ratios]
