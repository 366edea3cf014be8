"""The report on a terminal: readable at 80 columns, the same figures as on the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from ..records import Report
from ..summary import Row, Section, Summary, summarise
from . import tables
from . import wording as say
from .tables import Column, FigureTable, TableCell

STYLES = {"bad": "bold red", "good": "green"}  # by a cell's kind
BAD, FAINT = STYLES["bad"], "dim"
WIDE = 132  # columns from which on a table shows everything
LISTED = 8  # lines of a list before the rest is counted
NARROW_COLUMNS = tables.columns("tok/s | speed-up | length | TTFT | p90 | floor | exact")
WIDE_COLUMNS = NARROW_COLUMNS + tables.columns(
    "mean | p50 | p99 | draft | verify | host | memory | calls ÷ | rows×layers | upper"
)


def render(report: Report | Summary) -> RenderableType:
    """Everything a reader of the terminal wants, top to bottom: findings, tables, what went wrong."""
    summary = summarise(report)
    parts: list[RenderableType] = [_head(summary)]
    for section in summary.sections:
        parts += [heading(section.label()), _SectionTable(summary, section, each=section == summary.main)]
    if len(summary.sections) > 1:
        parts.append(Text("\nThe other tables by workload are in the report.", style=FAINT))
    for label, _, table in tables.curves(summary):
        short = [[row[0], *(_short(cell) for cell in row[1:])] for row in table.rows]
        table = replace(table, head=["batch", *table.head[1:]], rows=short)
        parts += [heading(f"speed-up by batch size, {label}"), as_rich(table)]
    return Group(*parts, heading("checks"), *_checks(summary), _foot(summary))


@dataclass(frozen=True, slots=True)
class _SectionTable:
    """All methods, over all workloads and, if wanted, on each; more figures where the terminal is wide."""

    summary: Summary
    section: Section
    each: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        chosen = WIDE_COLUMNS if options.max_width >= WIDE else NARROW_COLUMNS
        table = rich_table("method", *(column.short for column in chosen))
        names = self.summary.workloads(self.section)
        if len(names) > 1:
            add_block(table, f"all {len(names)} workloads", _cells(self.summary.total(self.section), chosen))
        for name in names if self.each or len(names) == 1 else ():
            rows = [r for r in self.summary.of(self.section) if r.workload == name]
            add_block(table, say.workload_title(self.summary.report, name), _cells(rows, chosen))
        yield table


def _cells(rows: Iterable[Row], chosen: Sequence[Column]) -> Sequence[Sequence[TableCell]]:
    return tables.figures(rows, chosen).rows


# -- tables


def rich_table(first: str, *names: str) -> RichTable:
    """An empty table of methods: their names at the left, figures at the right."""
    table = RichTable(box=None, header_style=FAINT, padding=(0, 1, 0, 0), collapse_padding=True)
    table.add_column(first, overflow="fold")
    for name in names:
        table.add_column(name, justify="right", overflow="fold", no_wrap=not name.startswith("÷"))
    return table


def figures_table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1, **look: Any) -> RichTable:
    """A table of plain text: the first columns (``words``) to the left, figures to the right."""
    table = RichTable(box=None, **{"header_style": "bold", **look})
    for place, name in enumerate(head):
        table.add_column(name, justify="left" if place < words else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def add_block(table: RichTable, title: str, rows: Iterable[Sequence[TableCell]]) -> None:
    """A line with a title, and rows under it."""
    table.add_row(Text(title, style="bold"))
    for row in rows:
        table.add_row(*_row(row))


def as_rich(table: FigureTable) -> RichTable:
    """A whole table."""
    made = rich_table(*table.head)
    for row in table.rows:
        made.add_row(*_row(row))
    return made


def _row(row: Sequence[TableCell]) -> list[Text]:
    name = Text("  " + row[0].text)
    if row[0].fine:
        name.append(f" ({row[0].fine})", style=BAD)
    return [name, *(Text(cell.text, style=STYLES.get(cell.kind, "")) for cell in row[1:])]


def _short(cell: TableCell) -> TableCell:
    """A ratio without its interval."""
    return replace(cell, text=f"{cell.value:.2f}") if isinstance(cell.value, float) else cell


# -- lines


def _head(summary: Summary) -> RenderableType:
    report = summary.report
    lines = [Text(report.title, style="bold"), Text(say.headline(summary))]
    return Group(*lines, Text(say.model_line(report), style=FAINT), Text(say.machine_line(report), style=FAINT))


def _checks(summary: Summary) -> list[RenderableType]:
    report = summary.report
    troubles = say.troubles(summary)
    lines = [Text(say.exactness_line(summary), style=BAD if troubles["differing"] else "")]
    lines += _listed(troubles["differing"], BAD)
    lines += [Text(say.slower_line(summary)), *_listed(troubles["slower"]), *_listed(troubles["failed"], BAD)]
    lines += [Text(line, style="yellow") for line in troubles["unavailable"]]
    return [*lines, *(Text(line) for line in report.notes)]


def _listed(lines: Sequence[str], style: str = "") -> list[Text]:
    shown = [Text("  " + line, style=style) for line in lines[:LISTED]]
    rest = len(lines) - LISTED
    return shown + ([Text(f"  and {rest} more, in the report", style=style)] if rest > 0 else [])


def _foot(summary: Summary) -> RenderableType:
    lines = [
        f"{say.pairs_line(summary)}; brackets: {say.CONFIDENCE:.0%} interval",
        "length: 1 + accepted / passes; TTFT: median ms to the first token; p90: of the waits between arrivals, ms; "
        "floor: time that the reads alone take, of the wall time",
    ]
    if any(row.figures.upper_row_layers for row in summary.rows):
        lines.append(
            "calls ÷: call reduction, tokens a pass; rows×layers: row-layers a pass; upper: of them in streams' layers"
        )
    if any(row.exact and row.exact.explained for row in summary.rows):
        lines.append("yes*: first differences are near ties within the stated tolerance")
    if say.has_synthetic(summary.report.methods):
        lines.append("synthetic: right at a stated rate by looking answers up; measures the engine, not a drafter")
    return Padding(Group(*(Text(line, style=FAINT) for line in lines)), (1, 0, 0, 0))


def heading(text: str) -> Text:
    """Of a part."""
    return Text(f"\n{say.upper(text)}", style="bold cyan")
