"""From a run of `streams_plans` to tables, verdicts and figures.

The figures of every method are `bench.summary`'s; here they are arranged by component or by what was swept. Over
several tasks, counts and speed-ups are geometric means of the tasks' own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from ..core.errors import ConfigError
from . import figures
from .figures import Panel, Series
from .records import Report
from .report import wording as say
from .report.markdown import table, text
from .streams_plans import FRONTIER, Plan
from .summary import Figures, Row, Summary, summarise

KEPT = 0.97  # of the whole tree's call reduction that pruning is to keep
SPENT = 0.40  # of its upper row-layers that pruning may take
ALL = "all"  # the task that stands for all of them
EVERY = "all"  # the top-k that leaves no token out
METRIC_NAMES = {
    "call_reduction": "call reduction (tokens a pass)",
    "speedup": "speed-up over plain decoding",
    "row_layers": "row-layers a pass",
    "upper_row_layers": "upper row-layers a pass",
    "tokens_per_s": "tokens/s",
}
_ONE = ("call_reduction", "speedup")  # metrics of which plain decoding has 1
FAMILIES = ("chain", "tree", "pruned", "cut", "auto")


@dataclass(frozen=True, kw_only=True)
class Line:
    """One method on one task, or over all tasks."""

    task: str  # a workload, or `ALL`
    method: str
    series: str
    x: float | str | None  # what was swept; None in the ablation
    call_reduction: float | None
    accepted_length: float | None
    row_layers: float | None  # a pass
    upper_row_layers: float | None  # a pass
    pruned: float | None  # nodes a pass
    tokens_per_s: float | None
    speedup: float | None
    speedup_low: float | None
    speedup_high: float | None
    exact: str  # yes, NO, or nothing where ids were not compared
    error: str | None

    def metric(self, name: str) -> float:
        """The figure of this name; NaN where there is none."""
        value = getattr(self, name)
        return math.nan if value is None else float(value)


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """What pruning keeps of the whole tree's call reduction, and what it spends above the pruning layer."""

    task: str
    method: str
    kept: float
    spent: float

    @property
    def good(self) -> bool:
        """Whether it keeps and saves as much as is wanted."""
        return self.kept >= KEPT and self.spent <= SPENT


# -- lines


def lines_of(plan: Plan, report: Report) -> list[Line]:
    """Every method of the plan on every task and over all, at every value of the cells."""
    summary = summarise(report)
    entries = {entry.method.name: entry for entry in plan.entries}
    found = []
    for row in (*summary.rows, *_totals(summary)):
        entry = entries.get(row.method.name)
        if entry is None:
            continue
        x = _swept(row, plan.cell) if plan.cell else entry.x
        found.append(_line(row, summary, entry.series, x))
    return sorted(found, key=lambda line: line.x == EVERY)  # top-k of all tokens comes after the largest k


def _totals(summary: Summary) -> tuple[Row, ...]:
    """Rows over all tasks, where there are several."""
    return tuple(row for row in summary.overall if len(summary.workloads(row.section)) > 1)


def _swept(row: Row, cell: str) -> float | str:
    value = getattr(row.section, cell)
    return float(value) if cell != "top_k" else f"{value}" if value else EVERY


def _line(row: Row, summary: Summary, series: str, x: float | str | None) -> Line:
    parts = [row.figures]
    if row.workload is None:
        parts = [r.figures for r in summary.of(row.section) if r.method.name == row.method.name]
    ratio = row.speedup
    return Line(
        task=ALL if row.workload is None else row.workload,
        method=row.method.name,
        series=series,
        x=x,
        call_reduction=_mean(parts, "call_reduction"),
        accepted_length=_mean(parts, "accepted_length"),
        row_layers=_mean(parts, "row_layers"),
        upper_row_layers=_mean(parts, "upper_row_layers"),
        pruned=row.figures.pruned,
        tokens_per_s=row.speed,
        speedup=ratio.value if ratio else None,
        speedup_low=ratio.low if ratio else None,
        speedup_high=ratio.high if ratio else None,
        exact=say.exact_mark(row.exact),
        error=row.figures.error,
    )


def _mean(parts: Sequence[Figures], name: str) -> float | None:
    """The geometric mean of a figure over tasks; None where one has none."""
    values = [getattr(part, name) for part in parts]
    return geometric_mean(values) if values and all(values) else None


def whole(lines: Iterable[Line]) -> list[Line]:
    """The lines over all tasks; of a single task its own."""
    found = list(lines)
    return [line for line in found if line.task == ALL] or found


# -- what the ablation says


def best(lines: Iterable[Line], metric: str) -> Line | None:
    """The line with the highest figure of this name."""
    able = [line for line in lines if getattr(line, metric) is not None]
    return max(able, key=lambda line: line.metric(metric), default=None)


def pruning(lines: Sequence[Line]) -> list[Pruned]:
    """Every pruned tree beside the whole tree of the same task, streams on every node."""
    trees = {line.task: line for line in lines if line.series == "tree" and not line.method.endswith(FRONTIER)}
    found = []
    for line in lines:
        tree = trees.get(line.task)
        if line.series != "pruned" or line.method.endswith(FRONTIER) or tree is None:
            continue
        if line.call_reduction and line.upper_row_layers and tree.call_reduction and tree.upper_row_layers:
            kept = line.call_reduction / tree.call_reduction
            spent = line.upper_row_layers / tree.upper_row_layers
            found.append(Pruned(task=line.task, method=line.method, kept=kept, spent=spent))
    return found


def verdicts(lines: Sequence[Line]) -> list[str]:
    """The sentences that the ablation ends in."""
    found = []
    tasks = sorted({line.task for line in lines}, key=lambda task: (task != ALL, task))
    for task in tasks:
        here = [line for line in lines if line.task == task]
        calls, fast = best(here, "call_reduction"), best(here, "speedup")
        if calls is not None:
            found.append(f"{task}: highest call reduction: {calls.method}, {calls.metric('call_reduction'):.2f}")
        if fast is not None:
            found.append(f"{task}: fastest: {fast.method}, {_speedup(fast)} times plain decoding")
        found += _pruning_verdict(task, [p for p in pruning(lines) if p.task == task])
    return found


def _pruning_verdict(task: str, found: Sequence[Pruned]) -> list[str]:
    if not found:
        return []
    wanted = f"{KEPT:.0%} of the whole tree's call reduction with at most {SPENT:.0%} of its upper row-layers"
    good = [p for p in found if p.good]
    if good:
        least = min(good, key=lambda p: p.spent)
        return [f"{task}: pruning keeps {wanted}: {least.method} keeps {least.kept:.1%} with {least.spent:.1%}"]
    close = max(found, key=lambda p: (p.spent <= SPENT, p.kept if p.spent <= SPENT else -p.spent))
    return [f"{task}: no pruning keeps {wanted}; {close.method} keeps {close.kept:.1%} with {close.spent:.1%}"]


# -- tables


def _speedup(line: Line) -> str:
    if line.speedup is None:
        return say.NOTHING
    return f"{line.speedup:.2f} [{line.speedup_low:.2f}, {line.speedup_high:.2f}]"


Show = Callable[[Line], str]
COLUMNS: tuple[tuple[str, Show], ...] = (
    ("call reduction", lambda line: say.length(line.call_reduction)),
    ("row-layers a pass", lambda line: say.number(line.row_layers)),
    ("upper ones", lambda line: say.number(line.upper_row_layers)),
    ("nodes pruned a pass", lambda line: say.number(line.pruned)),
    ("tokens/s", lambda line: say.number(line.tokens_per_s)),
    ("speed-up over plain", _speedup),
    ("ids equal plain", lambda line: "failed" if line.error else line.exact.replace("*", "\\*")),
)


def markdown(plan: Plan, report: Report, lines: Sequence[Line]) -> str:
    """The tables of a plan, what they say, and how they were made."""
    blocks = [f"# {text(plan.title)}"]
    if plan.name == "ablation":
        blocks.append("\n".join(f"- {text(line)}" for line in verdicts(lines)))
    for task in dict.fromkeys(line.task for line in (*whole(lines), *lines)):
        title = "All tasks (geometric means)" if task == ALL else say.workload_title(report, task)
        here = [line for line in lines if line.task == task]
        blocks += [f"## {text(title)}", _grid(plan, here)]
    return "\n\n".join([*blocks, *_how(plan, report)]) + "\n"


def _grid(plan: Plan, lines: Sequence[Line]) -> str:
    swept = bool(plan.x_label)
    head = ["setting", *([plan.x_label] if swept else []), *(name for name, _ in COLUMNS)]
    rows = [
        [
            text(line.series if swept else line.method),
            *([_x(line.x)] if swept else []),
            *(show(line) for _, show in COLUMNS),
        ]
        for line in lines
    ]
    return table(head, rows)


def _x(value: float | str | None) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _how(plan: Plan, report: Report) -> list[str]:
    sets = [
        f"set {s.folder}: {s.config.mode}, gamma {s.config.gamma}, streams through {s.config.msa_layers} of "
        f"{s.config.num_layers} layers"
        for s in plan.sets
    ]
    facts = [say.model_line(report), say.machine_line(report), say.run_line(report), *sets]
    facts += [f"{key}: {say.setting(value)}" for key, value in report.settings.items()]
    methods = [f"{m.name}: {say.method_detail(m)}" for m in report.methods]
    return [
        "## How it was measured",
        "\n".join(f"- {text(line)}" for line in (*facts, *report.notes)),
        "\n".join(f"- {text(line)}" for line in methods),
        f"To repeat it:\n\n```\n{say.command_line(report)}\n```",
    ]


# -- figures


def plots(plan: Plan, lines: Sequence[Line], folder: Path) -> list[Path]:
    """The figures of a plan: of a sweep one, of the ablation bars and the trade that pruning makes."""
    if plan.name == "ablation":
        return [_ablation_bars(lines, folder / "ablation.svg"), _trade(lines, folder / "ablation-pruning.svg")]
    return [figures.lines([_panel(plan, whole(lines), m) for m in plan.metrics], folder / f"{plan.name}.svg")]


def _panel(plan: Plan, lines: Sequence[Line], metric: str) -> Panel:
    series = [
        _series(name, [line for line in lines if line.series == name], metric)
        for name in dict.fromkeys(line.series for line in lines)
    ]
    name = METRIC_NAMES[metric]
    return Panel(
        title=name[:1].upper() + name[1:],
        x_label=plan.x_label,
        y_label=name,
        series=series,
        log_x=plan.log_x,
        line_at=1.0 if metric in _ONE else None,
        y_from=None if metric in _ONE else 0.0,
    )


def _series(name: str, lines: Sequence[Line], metric: str) -> Series:
    low, high = (
        [line.metric(f"speedup_{end}") for line in lines] if metric == "speedup" else None for end in ("low", "high")
    )
    x: list[Any] = [line.x for line in lines]
    return Series(label=name, x=x, y=[line.metric(metric) for line in lines], low=low, high=high)


def _ablation_bars(lines: Sequence[Line], path: Path) -> Path:
    shown = whole(lines)
    order = list(dict.fromkeys(line.method.removesuffix(FRONTIER) for line in shown))
    kinds = {"streams on every node": False, "streams at the frontier": True}
    panels = []
    for metric in ("call_reduction", "speedup", "upper_row_layers"):
        series = []
        for label, frontier in kinds.items():
            named = {ln.method.removesuffix(FRONTIER): ln for ln in shown if _rides(ln, shown) == frontier}
            if named:
                series.append(_bar(label, order, named, metric))
        name = METRIC_NAMES[metric]
        at = 1.0 if metric in _ONE else None
        panels.append(Panel(title=name[:1].upper() + name[1:], x_label=name, y_label="", series=series, line_at=at))
    return figures.bars(panels, path)


def _rides(line: Line, lines: Sequence[Line]) -> bool:
    """Whether the streams of this method ride at the frontier; the automatic budget does where any method does."""
    if line.series != "auto":
        return line.method.endswith(FRONTIER)
    return any(other.method.endswith(FRONTIER) for other in lines)


def _bar(label: str, order: Sequence[str], named: Mapping[str, Line], metric: str) -> Series:
    def values(name: str) -> list[float]:
        return [named[m].metric(name) if m in named else math.nan for m in order]

    low, high = (values(f"speedup_{end}") if metric == "speedup" else None for end in ("low", "high"))
    return Series(label=label, x=list(order), y=values(metric), low=low, high=high)


def _trade(lines: Sequence[Line], path: Path) -> Path:
    """Call reduction against upper row-layers, streams on every node."""
    shown = [line for line in whole(lines) if not _rides(line, lines) and line.upper_row_layers]
    series = [
        Series(
            label=line.method,
            x=[line.metric("upper_row_layers")],
            y=[line.metric("call_reduction")],
            colour=FAMILIES.index(line.series),
        )
        for line in shown
    ]
    tree = next((line for line in shown if line.series == "tree"), None)
    panel = Panel(
        title=f"What is kept, and what it costs (broken line: {KEPT:.0%} of the whole tree)",
        x_label="upper row-layers a pass",
        y_label=METRIC_NAMES["call_reduction"],
        series=series,
        log_x=True,
        names=True,
        line_at=KEPT * tree.metric("call_reduction") if tree else None,
    )
    return figures.points([panel], path)


# -- files


def write(plan: Plan, report: Report, folder: Path) -> list[Path]:
    """NAME.json, NAME.md and the figures.

    Raises:
        ConfigError: a file that cannot be written.
    """
    lines = lines_of(plan, report)
    values = {
        "name": plan.name,
        "title": plan.title,
        "command": report.command,
        "commit": report.commit,
        "machine": report.machine,
        "settings": report.settings,
        "sets": [{"folder": s.folder, **s.config.to_json()} for s in plan.sets],
        "lines": [asdict(line) for line in lines],
        "pruning": [{**asdict(p), "good": p.good} for p in pruning(lines)],
        "verdicts": verdicts(lines) if plan.name == "ablation" else [],
    }
    data = write_text(folder / f"{plan.name}.json", json.dumps(values, indent=1) + "\n")
    page = write_text(folder / f"{plan.name}.md", markdown(plan, report, lines))
    return [data, page, *plots(plan, lines, folder)]


def write_text(path: Path, content: str) -> Path:
    """A text file in a folder that is made where it is missing.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"file {path}", f"cannot be written ({error.strerror})", "name another folder") from error
    return path
