"""What a study measures and what comes of it: a grid of methods, one interleaved run, a table with its plots.

The figures of every method are `bench.summary`'s. Over several tasks, counts are geometric means of the tasks' own.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from paceline.bench import report as say
from paceline.bench.config import BenchConfig
from paceline.bench.records import Method, Report
from paceline.bench.report import bullets, figures_table, table, text, write_text
from paceline.bench.run import Run
from paceline.bench.summary import Row, Summary, overall_ratio
from paceline.core.errors import ConfigError
from paceline.core.options import written

from . import figures
from .applications import with_plain
from .figures import Panel, Series
from .halves import SEED, conversations, halves
from .peer_runs import PeerRun
from .scores import workload_of

if TYPE_CHECKING:
    from .study import Options

ALL = "all"  # the task that stands for all of them
EVERY = "all"  # the top-k that leaves no token out
APART_S = 1800.0  # the most that a process of `apart` may take
T = TypeVar("T")
Plot = Callable[[Path], Path]


@dataclass(frozen=True)
class Entry:
    """One method, and its place in table and plot."""

    method: Method
    series: str
    x: float | str | None = None  # None: the value of `Grid.cell`


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Methods that answer the same prompts in one interleaved run, beside plain decoding."""

    title: str
    entries: Sequence[Entry]
    applications: Mapping[str, str] = field(default_factory=dict)  # folders of the trained sets that methods name
    x_label: str = ""  # of what is swept; empty: nothing is, and methods go by their names
    cell: str = ""  # the field of a cell that is swept, where methods are not
    cells: Mapping[str, Any] = field(default_factory=dict)  # fields of `BenchConfig` in place of the options'
    prompts: int = 0  # at least so many are needed
    choose: str = ""  # a field of `GridLine` by which half of the prompts chooses settings; the other half reports
    over: str | None = None  # the method that speed-ups are over; None: each one's own plain decoding
    plots: Sequence[str] = ("call_reduction", "speedup")  # fields of `GridLine`
    log_x: bool = False
    facts: Sequence[str] = ()  # lines on what was measured
    values: Mapping[str, Any] = field(default_factory=dict)  # the same for JSON
    # The last word on what it becomes, from the lines that are reported and those of the prompts that choose.
    finish: Callable[[Table, list[GridLine], list[GridLine]], Table] = lambda table, lines, choosing: table

    def config(self, options: Options) -> BenchConfig:
        """The run of this grid. Methods that name no dtype get that of the options."""
        own = [entry.method for entry in self.entries]
        methods = [replace(m, dtype=options.dtype) if m.dtype == "auto" else m for m in own]
        kept = ("model", "data", "repeats", "seed", "device", "threads")
        values = {
            "title": self.title,
            "workloads": tuple(map(workload_of, options.names)),
            "max_new_tokens": options.max_new_tokens,
            "ignore_eos": any(not method.ours for method in methods),  # else not all would give as many tokens
            **{name: getattr(options, name) for name in kept},
            **self.cells,
            "prompts": max(options.prompts, self.prompts, 2 * bool(self.choose and options.prompts)),
        }
        methods = with_plain(methods, self.applications)
        return BenchConfig(methods=tuple(methods), applications=self.applications, **values)


def measure(grid: Grid, options: Options, folder: Path, make: Callable[..., Run] = PeerRun) -> Report:
    """Run a grid, as the run that ``make`` gives, with its raw report in a folder.

    Raises:
        ConfigError: anything that cannot be as it was asked for; found before the first trial.
        KeyboardInterrupt: it was cut off; the report in the folder has what there is.
    """
    config = grid.config(options)
    given: dict[str, Any] = {"out": folder, "overwrite": options.overwrite, "command": options.command}
    report = make(config, **given, progress=Console(stderr=True, style="dim").print).execute()
    if report.interrupted:
        raise KeyboardInterrupt
    return report


def show(value: Any) -> str:
    """A setting's value as a method's text has it."""
    return f"{value:g}" if isinstance(value, float) else written(value)


def apart(work: Callable[..., T], *arguments: Any) -> T:
    """The result of a function that runs in a fresh process, where nothing that ran before counts as its memory.

    Raises:
        ConfigError: the process dies or takes too long; errors of the function are raised as they are.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(work, *arguments).result(APART_S)
        except TimeoutError as error:
            for process in list(pool._processes.values()):
                process.kill()
            raise ConfigError(f"{work.__name__}", f"no result within {APART_S:.0f} s", "ask for less") from error
        except BrokenProcessPool as error:
            raise ConfigError(f"{work.__name__}", "its process died", "ask for less if memory ran out") from error


# -- lines


@dataclass(frozen=True, kw_only=True)
class GridLine:
    """One method on one task, or over all tasks."""

    task: str  # a workload, or `ALL`
    method: str
    series: str
    x: float | str | None  # what was swept
    call_reduction: float | None
    accepted_length: float | None
    drafted: float | None  # nodes checked a pass
    row_layers: float | None  # a pass
    upper_row_layers: float | None  # a pass
    pruned: float | None  # nodes a pass
    tokens_per_s: float | None
    speedup: float | None
    speedup_low: float | None
    speedup_high: float | None
    pairs: int  # of trials behind the speed-up
    exact: str  # yes, NO, or nothing where ids were not compared
    error: str | None
    chosen: bool = False  # of its task and series the best one on the prompts that choose

    def metric(self, name: str) -> float:
        """The figure of this name; NaN where there is none."""
        value = getattr(self, name)
        return math.nan if value is None else float(value)

    @property
    def bracketed(self) -> str:
        """The speed-up and its interval; a single pair has none."""
        if self.speedup is None:
            return say.NOTHING
        interval = f"{self.speedup_low:.2f}, {self.speedup_high:.2f}" if self.pairs > 1 else "1 pair"
        return f"{self.speedup:.2f} [{interval}]"


def lines_of(grid: Grid, report: Report) -> list[GridLine]:
    """Every method of the grid on every task and over all, at every value of the cells."""
    summary = Summary(report)
    entries = {entry.method.name: entry for entry in grid.entries}
    totals = [row for row in summary.overall if len(summary.workloads(row.section)) > 1]
    rows = [row for row in (*summary.rows, *totals) if row.method.name in entries]
    found = [_line(row, summary, grid, entries[row.method.name]) for row in rows]
    return sorted(found, key=lambda line: line.x == EVERY)  # top-k of all tokens comes after the largest k


def _line(row: Row, summary: Summary, grid: Grid, entry: Entry) -> GridLine:
    same = [r for r in summary.of(row.section) if r.method.name == row.method.name]
    parts = [row] if row.workload is not None else same
    ratio = row.speedup
    if grid.over is not None:
        cells = [r.cell for r in parts if r.cell is not None]
        ratio = overall_ratio(summary, row.method.name, grid.over, cells) if row.method.name != grid.over else None
    counts: dict[str, Any] = {
        "call_reduction": _mean([_a_pass(part, "tokens") for part in parts]),
        "accepted_length": _mean([part.figures["accepted_length"] for part in parts]),
    }
    work = ("drafted", "row_layers", "upper_row_layers")
    counts |= {name: _mean([_a_pass(part, name) for part in parts]) for name in work}
    return GridLine(
        task=ALL if row.workload is None else row.workload,
        method=row.method.name,
        series=entry.series,
        x=_swept(getattr(row.section, grid.cell), grid.cell) if grid.cell else entry.x,
        **counts,
        pruned=_a_pass(row, "pruned"),
        tokens_per_s=row.speed,
        speedup=ratio.value if ratio else None,
        speedup_low=ratio.low if ratio else None,
        speedup_high=ratio.high if ratio else None,
        pairs=ratio.pairs if ratio else 0,
        exact=say.exact_mark(row.exact),
        error=row.failed[0].error if row.failed else None,
    )


def _a_pass(row: Row, count: str) -> float | None:
    """A count of the engine's statistics (`core.stats`) for a target pass; None where there is none."""
    good = [trial for trial in row.trials if trial.error is None]
    passes, total = sum(trial.passes for trial in good), sum(getattr(trial, count) for trial in good)
    return total / passes if passes and total else None


def with_choice(lines: Iterable[GridLine], choosing: Sequence[GridLine], metric: str) -> list[GridLine]:
    """Lines with a mark on those that are the best by a metric on other prompts, one of each task and series."""
    best = {id(line): best_by(_alike(line, choosing), metric) for line in lines}
    return [replace(line, chosen=_same(line, best[id(line)])) for line in lines]


def best_by(lines: Iterable[GridLine], metric: str) -> GridLine | None:
    """The line that is highest in a metric, of equals the first; None where none has it."""
    known = [line for line in lines if getattr(line, metric) is not None]
    return max(known, key=lambda line: line.metric(metric), default=None)


def _alike(line: GridLine, lines: Iterable[GridLine]) -> list[GridLine]:
    return [other for other in lines if (other.task, other.series) == (line.task, line.series)]


def _same(line: GridLine, other: GridLine | None) -> bool:
    return other is not None and (line.method, line.x) == (other.method, other.x)


def _swept(value: Any, cell: str) -> float | str:
    return float(value) if cell != "top_k" else f"{value}" if value else EVERY


def _mean(values: Sequence[float | None]) -> float | None:
    """The geometric mean; None where a task has no figure."""
    known = [value for value in values if value]
    return geometric_mean(known) if known and len(known) == len(values) else None


def whole(lines: Iterable[GridLine]) -> list[GridLine]:
    """The lines over all tasks; of a single task its own."""
    found = list(lines)
    return [line for line in found if line.task == ALL] or found


# -- tables


@dataclass(frozen=True, kw_only=True)
class Table:
    """What is shown and written of a table or figure."""

    title: str
    head: Sequence[str]
    parts: Mapping[str, Sequence[Sequence[str]]]  # rows under each heading; the terminal shows the first alone
    values: Mapping[str, Any]  # for JSON
    remarks: Sequence[str] = ()  # what it says, in sentences
    how: Sequence[Sequence[str]] = ()  # lists of lines on how it was measured
    plots: Mapping[str, Plot] = field(default_factory=dict)  # by what is added to the name, with suffix
    same: bool = True  # whether ids equal plain decoding's

    def show(self) -> None:
        """Print it."""
        console = Console(highlight=False, soft_wrap=True)
        if not console.is_terminal:
            console.width = max(console.width, 160)  # a pipe limits no table
        console.print(self.title, style="bold", markup=False)
        console.print(figures_table(self.head, next(iter(self.parts.values()), ())))
        for remark in self.remarks:
            console.print(remark, markup=False)

    def markdown(self, command: Sequence[str]) -> str:
        """The page; ends with a newline."""
        blocks = [f"# {text(self.title)}", bullets(self.remarks)]
        for heading, rows in self.parts.items():
            blocks += [f"## {text(heading)}" if heading else "", table(self.head, rows)]
        blocks += ["## How it was measured" if self.how else "", *map(bullets, self.how)]
        blocks.append(f"To repeat it:\n\n```\n{shlex.join(command)}\n```")
        return "\n\n".join(block for block in blocks if block) + "\n"

    def write(self, folder: Path, name: str, command: Sequence[str]) -> list[Path]:
        """NAME.json, NAME.md and the plots.

        Raises:
            ConfigError: a file that cannot be written.
        """
        values = {"name": name, "title": self.title, "command": list(command), **self.values}
        text = json.dumps({**values, "remarks": list(self.remarks)}, indent=1) + "\n"
        texts = {".json": text, ".md": self.markdown(command)}
        files = [write_text(folder / f"{name}{suffix}", text, "file") for suffix, text in texts.items()]
        return files + [plot(folder / f"{name}{suffix}") for suffix, plot in self.plots.items()]


COLUMNS: Mapping[str, Callable[[GridLine], str]] = {
    "chosen": lambda line: "yes" if line.chosen else "",
    "nodes a pass": lambda line: say.number(line.drafted),
    "call reduction": lambda line: say.length(line.call_reduction),
    "row-layers a pass": lambda line: say.number(line.row_layers),
    "upper ones": lambda line: say.number(line.upper_row_layers),
    "nodes pruned a pass": lambda line: say.number(line.pruned),
    "tokens/s": lambda line: say.number(line.tokens_per_s),
    "speed-up over plain": lambda line: line.bracketed,
    "ids equal plain": lambda line: "failed" if line.error else line.exact,
}
METRIC_NAMES = {
    "call_reduction": "call reduction (tokens a pass)",
    "speedup": "speed-up over plain decoding",
    "accepted_length": "accepted length",
    "row_layers": "row-layers a pass",
    "upper_row_layers": "upper row-layers a pass",
    "tokens_per_s": "tokens/s",
}
ONE = ("call_reduction", "speedup", "accepted_length")  # metrics of which plain decoding has 1


def table_of(grid: Grid, report: Report) -> Table:
    """A part for all tasks and one for each, and a plot of what was swept.

    Where a setting is chosen, all that is shown is of the prompts that chose nothing.
    """
    lines, choosing, said = split_lines(grid, report)
    columns = {name: show for name, show in COLUMNS.items() if grid.choose or name != "chosen"}
    parts = {}
    for task in dict.fromkeys(line.task for line in (*whole(lines), *lines)):
        title = "All tasks (geometric means)" if task == ALL else say.workload_title(report, task)
        parts[title] = [_row(grid, line, columns) for line in lines if line.task == task]
    panels = [panel_of(grid, lines, metric) for metric in grid.plots]
    made = Table(
        title=grid.title,
        head=["setting", *([grid.x_label] if grid.x_label else []), *columns],
        parts=parts,
        values={
            **{name: getattr(report, name) for name in ("commit", "machine", "settings")},
            **grid.values,
            "lines": [asdict(line) for line in lines],
            **({"chosen_on": [asdict(line) for line in choosing]} if grid.choose else {}),
        },
        how=how(report, [*grid.facts, *said]),
        plots={".svg": lambda path: figures.lines(panels, path)} if grid.x_label else {},
        same=all(found.passed for found in report.exactness),
    )
    return grid.finish(made, lines, choosing)


def split_lines(grid: Grid, report: Report) -> tuple[list[GridLine], list[GridLine], list[str]]:
    """Lines to report, with those that were chosen marked; those of the prompts that choose; and how, in a sentence."""
    if not grid.choose:
        return lines_of(grid, report), [], []
    first, second = halves(report)
    choosing, lines = lines_of(grid, first), lines_of(grid, second)
    asked, told = (", ".join(f"{n} of {w}" for w, n in conversations(part.trials).items()) for part in (first, second))
    name = METRIC_NAMES[grid.choose]
    said = f"chosen by {name} on {asked or 'no prompt'} (split seed {SEED}); all figures are of the others: {told}"
    return with_choice(lines, choosing, grid.choose), choosing, [said]


def _row(grid: Grid, line: GridLine, columns: Mapping[str, Callable[[GridLine], str]]) -> list[str]:
    x = f"{line.x:g}" if isinstance(line.x, int | float) else str(line.x)
    return [*((line.series, x) if grid.x_label else (line.method,)), *(show(line) for show in columns.values())]


def how(report: Report, facts: Sequence[str] = ()) -> list[list[str]]:
    """How a run was measured, and what its methods are."""
    return [say.how_lines(report, facts), [f"{m.name}: {say.method_detail(m)}" for m in report.methods]]


def panel_of(grid: Grid, lines: Sequence[GridLine], metric: str) -> Panel:
    """A metric over what was swept, all tasks together: a line for each series."""
    shown = whole(lines)
    series = []
    for label in dict.fromkeys(line.series for line in shown):
        of_series = [line for line in shown if line.series == label]
        series.append(series_of(label, [line.x for line in of_series], of_series, metric))
    return panel(metric, series, x_label=grid.x_label, y_label=METRIC_NAMES[metric], log_x=grid.log_x)


def series_of(label: str, x: Sequence[Any], lines: Sequence[GridLine | None], metric: str) -> Series:
    """A metric of lines, NaN where there is none; speed-ups have their intervals."""
    ends = ("low", "high") if metric == "speedup" else ()

    def values(name: str) -> list[float]:
        return [math.nan if line is None else line.metric(name) for line in lines]

    spread: dict[str, Any] = {end: values(f"speedup_{end}") for end in ends}
    return Series(label=label, x=x, y=values(metric), **spread)


def panel(metric: str, series: Sequence[Series], **labels: Any) -> Panel:
    """Axes for a metric; where plain decoding has 1, there is a broken line."""
    name = METRIC_NAMES[metric]
    one = metric in ONE
    rules: dict[str, Any] = {"line_at": 1.0 if one else None, "y_from": None if one else 0.0, **labels}
    return Panel(title=name[:1].upper() + name[1:], series=series, **rules)
