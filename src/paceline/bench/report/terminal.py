"""The report on a terminal: readable at 80 columns, the same figures as on the page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..records import Report
from ..summary import Index, Row, Section, Summary, TimeShares, Waits, against, batch_curve, slower_cells, summarise
from . import wording as say

BAD, GOOD, FAINT = "bold red", "green", "dim"
WIDE = 132  # columns from which on a table shows everything
LISTED = 8  # lines of a list before the rest is counted


def render(report: Report | Summary) -> RenderableType:
    """Everything a reader of the terminal wants, top to bottom: findings, tables, what went wrong."""
    summary = report if isinstance(report, Summary) else summarise(report)
    index = Index(summary.report)
    parts: list[RenderableType] = [_head(summary)]
    first = say.main_section(summary)
    for section in summary.sections:
        parts += [_heading(section.label()), SectionTable(summary, section, each=section == first)]
        parts += _peers(index, section)
    if len(summary.sections) > 1:
        parts.append(Text("\nThe other tables by workload are in the report.", style=FAINT))
    parts += _curves(summary)
    parts += [_heading("checks"), *_checks(summary), _foot(summary)]
    return Group(*parts)


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of a row."""

    name: str
    cell: Callable[[Row], Text | str]


@dataclass(frozen=True, slots=True)
class SectionTable:
    """All methods, over all workloads and, if wanted, on each; more figures where the terminal is wide."""

    summary: Summary
    section: Section
    each: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.max_width >= WIDE
        yield section_table(self.summary, self.section, COLUMNS + WIDE_COLUMNS if wide else COLUMNS, self.each)


def section_table(summary: Summary, section: Section, columns: Sequence[Column], each: bool = True) -> Table:
    """The table that `SectionTable` chooses the columns of."""
    table = _table(*(column.name for column in columns), first="method")
    names = summary.workloads(section)
    if len(names) > 1:
        _block(table, f"all {len(names)} workloads", summary.total(section), columns)
    for name in names if each or len(names) == 1 else ():
        rows = [r for r in summary.of(section) if r.workload == name]
        _block(table, say.workload_title(summary.report, name), rows, columns)
    return table


def _block(table: Table, title: str, rows: Iterable[Row], columns: Sequence[Column]) -> None:
    table.add_row(Text(title, style="bold"))
    for row in rows:
        table.add_row(_name(row), *(column.cell(row) for column in columns))


def _name(row: Row) -> Text:
    name = Text("  " + say.method_name(row.method))
    return name.append(f" ({row.figures.failed} failed)", style=BAD) if row.figures.failed else name


def _exact(row: Row) -> Text:
    mark = say.exact_mark(row.exact)
    return Text(mark, style=BAD if mark == "NO" else "")


def _wait(of: Callable[[Waits], float]) -> Callable[[Row], str]:
    return lambda row: say.number(of(row.figures.waits) if row.figures.waits else None)


def _part(of: Callable[[TimeShares], float]) -> Callable[[Row], str]:
    return lambda row: say.share(of(row.figures.shares) if row.figures.shares else None)


def _speedup(row: Row) -> Text:
    ratio = row.speedup
    if ratio is None or ratio.covers(1):
        return Text(say.speedup(row), style=FAINT if ratio is None else "")
    return Text(say.speedup(row), style=GOOD if ratio.low > 1 else BAD)


COLUMNS = (
    Column("tok/s", lambda row: say.number(row.speed)),
    Column("speed-up", _speedup),
    Column("length", lambda row: say.length(row.figures.accepted_length)),
    Column("TTFT", lambda row: say.number(row.figures.ttft_ms)),
    Column("p90", _wait(lambda waits: waits.p90_ms)),
    Column("floor", lambda row: say.share(row.figures.floor_share)),
    Column("exact", _exact),
)
WIDE_COLUMNS = (
    Column("mean", _wait(lambda waits: waits.mean_ms)),
    Column("p50", _wait(lambda waits: waits.p50_ms)),
    Column("p99", _wait(lambda waits: waits.p99_ms)),
    Column("draft", _part(lambda shares: shares.draft)),
    Column("verify", _part(lambda shares: shares.verify)),
    Column("host", _part(lambda shares: shares.host)),
    Column("memory", lambda row: say.size(row.figures.peak_bytes)),
    Column("calls ÷", lambda row: say.length(row.figures.call_reduction)),
    Column("rows×layers", lambda row: say.number(row.figures.row_layers)),
    Column("upper", lambda row: say.number(row.figures.upper_row_layers)),
)


def _peers(index: Index, section: Section) -> list[RenderableType]:
    """How many times as fast as the other engines' plain decoding every method is."""
    found = against(index, section)
    if not found:
        return []
    table = _table(*(f"÷ {peer}" for peer in found), first="beside other engines")
    for name in dict.fromkeys(name for ratios in found.values() for name in ratios):
        cells = [say.interval(ratios.get(name)) for ratios in found.values()]
        table.add_row("  " + say.method_name(index.methods[name]), *cells)
    return [Text(), table]


def _curves(summary: Summary) -> list[RenderableType]:
    """Speed-up against batch size, where several were run: one table a dtype and temperature."""
    parts: list[RenderableType] = []
    curves = batch_curve(summary)
    for section in dict.fromkeys(curve.section for curve in curves):
        here = [curve for curve in curves if curve.section == section]
        batches = sorted({batch for curve in here for batch, _ in curve.points})
        table = _table(*map(str, batches), first="batch")
        for curve in here:
            points = dict(curve.points)
            table.add_row(
                "  " + say.method_name(curve.method),
                *(Text(f"{points[b].value:.2f}") if b in points else say.NOTHING for b in batches),
            )
        label = say.without_batch(section)
        parts += [_heading(f"speed-up by batch size, {label}"), table]
    return parts


def _head(summary: Summary) -> RenderableType:
    report = summary.report
    lines = [Text(report.title, style="bold"), Text(say.headline(summary))]
    lines += [Text(line) for line in (say.peer_headline(summary),) if line]
    return Group(*lines, Text(say.model_line(report), style=FAINT), Text(say.machine_line(report), style=FAINT))


def _checks(summary: Summary) -> list[RenderableType]:
    report, slow = summary.report, slower_cells(summary)
    bad = say.failures(report)
    lines = [Text(say.exactness_line(summary), style=BAD if bad else "")]
    lines += _listed((say.failure_line(found) for found in bad), BAD)
    lines += [Text(line) for line in (say.agreement_line(report),) if line]
    lines.append(Text(say.slower_line(slow, summary)))
    lines += _listed(f"{say.method_name(r.method)}, {say.row_label(r)}: {say.interval(r.speedup)}" for r in slow)
    lines += _listed(say.failed_trials(summary), BAD)
    lines += [Text(line, style="yellow") for line in say.unavailable_lines(report)]
    return [*lines, *(Text(line) for line in report.notes)]


def _listed(lines: Iterable[str], style: str = "") -> list[Text]:
    many = list(lines)
    shown = [Text("  " + line, style=style) for line in many[:LISTED]]
    rest = len(many) - LISTED
    return shown + ([Text(f"  and {rest} more, in the report", style=style)] if rest > 0 else [])


def _foot(summary: Summary) -> RenderableType:
    lines = [
        f"{say.pairs_line(summary)}; brackets: {say.CONFIDENCE:.0%} interval",
        "length: 1 + accepted / passes; TTFT: median ms to the first token; p90: of the waits between arrivals, ms; "
        "floor: time that the reads alone take, of the wall time",
    ]
    if any(row.figures.upper_row_layers for row in summary.rows):
        lines.append(
            "calls ÷: call reduction, tokens a pass; rows×layers: row-layers a pass; upper: those above the pruning"
        )
    if any(row.exact and row.exact.explained for row in summary.rows):
        lines.append("yes*: first differences are near ties within the stated tolerance")
    if say.has_synthetic(summary.report.methods):
        lines.append("synthetic: right at a stated rate by looking answers up; measures the engine, not a drafter")
    return Padding(Group(*(Text(line, style=FAINT) for line in lines)), (1, 0, 0, 0))


def _heading(text: str) -> Text:
    return Text(f"\n{text[:1].upper()}{text[1:]}", style="bold cyan")


def _table(*names: str, first: str) -> Table:
    table = Table(box=None, header_style=FAINT, padding=(0, 1, 0, 0), collapse_padding=True)
    table.add_column(first, overflow="fold")
    for name in names:
        table.add_column(name, justify="right", overflow="fold", no_wrap=not name.startswith("÷"))
    return table
