"""The report on a terminal: a short table, readable at 80 columns, and what a reader must know beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..records import Cell
from ..summary import Row, Summary
from . import wording as say
from .markdown import SPEEDS, TIMES, name_of

BAD, FAINT = "bold red", "dim"
LISTED = 8  # lines of a list before the rest is counted
SHORT = {  # columns by their names where there is little room
    "tok/s": SPEEDS["tokens/s"],
    "speed-up": SPEEDS["speed-up"],
    "length": SPEEDS["accepted length"],
    "TTFT": TIMES["first token, ms"],
    "p90": TIMES["p90, ms"],
    "floor": SPEEDS["of the floor"],
    "exact": SPEEDS["exact"],
}
FOOT = (
    f"brackets: {say.CONFIDENCE:.0%} interval; length: 1 + accepted / passes; TTFT: median ms to the first token; "
    "p90: of the waits between arrivals, ms; floor: time that the reads alone take, of the wall time; "
    "yes*: first differences are near ties; synthetic: right at a stated rate by looking answers up"
)


def render(summary: Summary) -> RenderableType:
    """Findings, a table for each section, what went wrong."""
    report = summary.report
    parts: list[RenderableType] = [Text(report.title, style="bold"), Text(say.headline(summary))]
    about = (say.facts_line("model", report.model), say.facts_line("machine", report.machine))
    parts += [Text(line, style=FAINT) for line in about]
    for section in summary.sections:
        parts += [
            Text(f"\n{say.cell_label(section).replace('batch', 'Batch', 1)}", style="bold cyan"),
            _section(summary, section),
        ]
    parts += [Text(), *map(Text, say.findings(summary))]
    wrong = say.troubles(summary)
    parts += [Text(f"  {line}", style=BAD) for line in wrong[:LISTED]]
    parts += [Text(f"  and {len(wrong) - LISTED} more, in the report")] if len(wrong) > LISTED else []
    return Group(*parts, *map(Text, report.notes), Text(f"\n{FOOT}", style=FAINT))


def figures_table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> Table:
    """So many columns of words on the left, figures on the right; a row of one cell is a title."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for place, name in enumerate(head):
        table.add_column(name, justify="left" if place < words else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row), style="bold" if len(row) == 1 else None)
    return table


def titled(title: str, rows: Iterable[Sequence[str]]) -> list[list[str]]:
    """A title, and rows under it."""
    return [[title], *([f"  {first}", *others] for first, *others in rows)]


def _section(summary: Summary, section: Cell) -> Table:
    """All methods over all workloads and, of the section that is shown first, on each."""
    names, rows = summary.workloads(section), list[list[str]]()
    if len(names) > 1:
        rows += titled(f"all {len(names)} workloads", map(_cells, summary.total(section)))
    for name in names if section == summary.main or len(names) == 1 else ():
        own = [_cells(row) for row in summary.of(section) if row.workload == name]
        rows += titled(say.workload_title(summary.report, name), own)
    return figures_table(["method", *SHORT], rows)


def _cells(row: Row) -> list[str]:
    return [name_of(row), *(show(row) for show in SHORT.values())]
