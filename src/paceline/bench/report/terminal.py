"""The report on a terminal: a short table, readable at 80 columns, and what a reader must know beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..summary import Row, Section, Summary
from . import wording as say
from .markdown import COLUMNS

BAD, GOOD, FAINT = "bold red", "green", "dim"
LISTED = 8  # lines of a list before the rest is counted
SHORT = {  # columns, and their names where there is little room
    "tok/s": "tokens/s",
    "speed-up": "speed-up",
    "length": "accepted length",
    "TTFT": "first token, ms",
    "p90": "p90, ms",
    "floor": "of the floor",
    "exact": "exact",
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
    parts += [Text(line, style=FAINT) for line in (say.model_line(report), say.machine_line(report))]
    for section in summary.sections:
        parts += [Text(f"\n{say.upper(section.label())}", style="bold cyan"), _section(summary, section)]
    found = say.troubles(summary)
    parts += [Text(), *map(Text, say.findings(summary)), *_listed(found["differing"], BAD), *_listed(found["slower"])]
    parts += [*_listed(found["failed"], BAD), *(Text(line, style="yellow") for line in found["unavailable"])]
    return Group(*parts, *map(Text, report.notes), Text(f"\n{FOOT}", style=FAINT))


def rich_table(*head: str, words: int = 1, style: str = "bold") -> Table:
    """An empty table: so many columns of words on the left, figures on the right."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style=style)
    for place, name in enumerate(head):
        table.add_column(name, justify="left" if place < words else "right", overflow="fold")
    return table


def figures_table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> Table:
    """The same with its rows."""
    table = rich_table(*head, words=words)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _section(summary: Summary, section: Section) -> Table:
    """All methods over all workloads and, of the section that is shown first, on each."""
    table, names = rich_table("method", *SHORT), summary.workloads(section)
    if len(names) > 1:
        add_rows(table, f"all {len(names)} workloads", map(_cells, summary.total(section)))
    for name in names if section == summary.main or len(names) == 1 else ():
        rows = [row for row in summary.of(section) if row.workload == name]
        add_rows(table, say.workload_title(summary.report, name), map(_cells, rows))
    return table


def add_rows(table: Table, title: str, rows: Iterable[Sequence[Text]]) -> None:
    """A line with a title, and rows under it."""
    table.add_row(Text(title, style="bold"))
    for first, *others in rows:
        table.add_row(Text("  ") + first, *others)


def _cells(row: Row) -> list[Text]:
    name = Text(say.method_name(row.method))
    name.append(f" ({row.figures.failed} failed)" if row.figures.failed else "", style=BAD)
    colours = {"exact": BAD if not all(found.passed for found in row.exact) else ""}
    if row.speedup and not row.speedup.covers(1):
        colours["speed-up"] = GOOD if row.speedup.low > 1 else BAD
    return [name, *(Text(COLUMNS[column](row), style=colours.get(column, "")) for column in SHORT.values())]


def _listed(lines: Sequence[str], style: str = "") -> list[Text]:
    shown = [Text("  " + line, style=style) for line in lines[:LISTED]]
    rest = len(lines) - LISTED
    return shown + ([Text(f"  and {rest} more, in the report", style=style)] if rest > 0 else [])
