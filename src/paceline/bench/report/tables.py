"""The tables of a report, made once: the terminal, Markdown and the page show the same cells.

A `Column` makes one cell of a row of the summary. Every other table is a function that takes the summary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..records import Report
from ..summary import Curve, Interval, Row, Section, Summary, batch_curve
from . import wording as say


@dataclass(frozen=True, kw_only=True, slots=True)
class TableCell:
    """One cell."""

    text: str
    value: float | str | None = None  # what sorting goes by; None: nothing, goes last
    kind: str = ""  # good, bad, plain (a row of plain decoding) or wrap
    title: str = ""  # what it stands for
    fine: str = ""  # small print behind the text


@dataclass(frozen=True, kw_only=True)
class FigureTable:
    """Rows under a head; the first columns are text, the others figures."""

    label: str
    head: Sequence[str]
    rows: Sequence[Sequence[TableCell]]
    texts: int = 1
    named: int = 0  # the column of the methods' names

    def words(self) -> list[list[str]]:
        """The words of every cell."""
        return [[cell.text + (f" ({cell.fine})" if cell.fine else "") for cell in row] for row in self.rows]


NONE = TableCell(text=say.NOTHING)


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of a row."""

    name: str
    short: str  # where there is little room
    cell: Callable[[Row], TableCell]


def _figure(name: str, short: str, path: str, show: Callable[[float | None], str] = say.number) -> Column:
    """A figure by its place in `Figures`, such as ``waits.p50_ms``."""

    def cell(row: Row) -> TableCell:
        value: Any = row.figures
        for part in path.split("."):
            value = getattr(value, part) if value is not None else None
        return TableCell(text=show(value), value=value)

    return Column(name, short, cell)


def _speed(row: Row) -> TableCell:
    spread, failed = row.figures.speed, row.figures.failed
    if spread is None:
        return TableCell(text="failed" if failed else say.NOTHING, kind="bad" if failed else "")
    title = f"{say.number(spread.low)} to {say.number(spread.high)} in {say.count_of(spread.count, 'trial')}"
    return TableCell(text=say.number(spread.median), value=spread.median, title=title)


def _spread(row: Row) -> TableCell:
    spread = row.figures.speed
    return TableCell(text=f"{say.number(spread.p10)} to {say.number(spread.p90)}", value=spread.p10) if spread else NONE


def _speedup(row: Row) -> TableCell:
    ratio = row.speedup
    if ratio is None:
        return TableCell(text=say.speedup(row), value=1.0 if row.reference == row.method.name else None)
    kind = "" if ratio.covers(1) else "good" if ratio.low > 1 else "bad"
    title = f"{say.count_of(ratio.pairs, 'pair')} in {say.count_of(ratio.groups, 'group')} of prompts"
    return TableCell(text=say.speedup(row), value=ratio.value, kind=kind, title=title)


def _exact(row: Row) -> TableCell:
    count, mark = row.exact, say.exact_mark(row.exact)
    if count is None:
        return NONE
    title = f"{count.identical} of {count.sequences} identical, {count.explained} explained, {count.failures} failed"
    return TableCell(text=mark, value=mark, kind="" if count.passed else "bad", title=title)


COLUMNS = {
    column.name: column
    for column in (
        Column("tokens/s", "tok/s", _speed),
        Column("p10 to p90", "p10 to p90", _spread),
        Column("speed-up", "speed-up", _speedup),
        _figure("accepted length", "length", "accepted_length", say.length),
        _figure("of the floor", "floor", "floor_share", say.share),
        Column("exact", "exact", _exact),
        _figure("call reduction", "calls ÷", "call_reduction", say.length),
        _figure("row-layers a pass", "rows×layers", "row_layers"),
        _figure("upper ones", "upper", "upper_row_layers"),
        _figure("nodes pruned a pass", "pruned", "pruned"),
        _figure("streams that rode", "rode", "rode", say.share),
        _figure("first token, ms", "TTFT", "ttft_ms"),
        _figure("a token, ms", "mean", "waits.mean_ms"),
        _figure("wait p50, ms", "p50", "waits.p50_ms"),
        _figure("p90, ms", "p90", "waits.p90_ms"),
        _figure("p99, ms", "p99", "waits.p99_ms"),
        _figure("draft", "draft", "shares.draft", say.share),
        _figure("verify", "verify", "shares.verify", say.share),
        _figure("host", "host", "shares.host", say.share),
        _figure("rest", "rest", "shares.rest", say.share),
        _figure("peak memory", "memory", "peak_bytes", say.size),
        _figure("tokens", "tokens", "tokens", lambda value: f"{value or 0:,.0f}"),
    )
}


def columns(names: str) -> list[Column]:
    """Columns by their names or short names, with bars between."""
    known = COLUMNS | {column.short: column for column in COLUMNS.values()}
    return [known[name.strip()] for name in names.split("|")]


# -- cells that several tables have


def words(text: str, kind: str = "") -> TableCell:
    """Text that is sorted by itself."""
    return TableCell(text=text, value=text, kind=kind)


def name_of(row: Row) -> TableCell:
    """The method, and how many of its trials failed."""
    fine = f"{row.figures.failed} failed" if row.figures.failed else ""
    kind, title = "plain" if row.method.plain else "", say.method_detail(row.method)
    return TableCell(text=say.method_name(row.method), value=row.method.name, kind=kind, title=title, fine=fine)


def _ratio(found: Interval | None) -> TableCell:
    return TableCell(text=say.interval(found), value=found.value if found else None)


# -- the tables


def figures(rows: Iterable[Row], chosen: Sequence[Column], label: str = "") -> FigureTable:
    """A row a method."""
    head = ["method", *(column.name for column in chosen)]
    return FigureTable(label=label, head=head, rows=[[name_of(r), *(c.cell(r) for c in chosen)] for r in rows])


def by_workload(report: Report, rows: Iterable[Row], chosen: Sequence[Column], label: str) -> FigureTable:
    """The same with the workload in front."""
    rows = list(rows)
    table = figures(rows, chosen, label)
    titles = (words(say.workload_title(report, row.workload)) for row in rows)
    made = [[title, *cells] for title, cells in zip(titles, table.rows, strict=True)]
    return replace(table, head=["workload", *table.head], rows=made, texts=2, named=1)


def acceptance(rows: Iterable[Row]) -> FigureTable | None:
    """Share accepted at each depth."""
    found = [row for row in rows if row.figures.acceptance]
    depth = max((len(row.figures.acceptance) for row in found), default=0)
    made = []
    for row in found:
        pairs = zip(row.figures.acceptance, row.figures.offered, strict=True)
        cells = [TableCell(text=say.share(share), value=share, title=f"of {many:,} passes") for share, many in pairs]
        made.append([name_of(row), *cells, *[NONE] * (depth - len(cells))])
    head = ["method", *(str(d + 1) for d in range(depth))]
    return FigureTable(label="Acceptance by position", head=head, rows=made) if made else None


def matrix(summary: Summary, section: Section) -> FigureTable | None:
    """Speed-up of every speculative method on every workload."""
    rows = {(row.workload, row.method.name): row for row in summary.of(section)}
    methods = [row.method for row in summary.total(section) if row.speedup]
    made = []
    for name in summary.workloads(section):
        found = [rows.get((name, method.name)) for method in methods]
        title = words(say.workload_title(summary.report, name))
        made.append([title, *(_ratio(row.speedup if row else None) for row in found)])
    head = ["workload", *map(say.method_name, methods)]
    return FigureTable(label="Speed-up by workload", head=head, rows=made) if methods else None


def curves(summary: Summary) -> list[tuple[str, Sequence[Curve], FigureTable]]:
    """Speed-up by batch size, where several were run: what else is the same, the curves, and their table."""
    found = batch_curve(summary)
    made: list[tuple[str, Sequence[Curve], FigureTable]] = []
    for section in dict.fromkeys(curve.section for curve in found):
        here = [curve for curve in found if curve.section == section]
        batches = sorted({batch for curve in here for batch, _ in curve.points})
        rows = [[words(say.method_name(c.method)), *(_ratio(dict(c.points).get(b)) for b in batches)] for c in here]
        table = FigureTable(label="Speed-up by batch size", head=["method", *map(str, batches)], rows=rows)
        made.append((section.label().removeprefix(f"batch {section.batch}, "), here, table))
    return made


def methods(report: Report) -> FigureTable:
    """What each name stands for."""
    rows = [[words(say.method_name(m)), words(say.method_detail(m), "wrap")] for m in report.methods]
    return FigureTable(label="Methods", head=["method", "what it is"], rows=rows, texts=2)


def workloads(report: Report) -> FigureTable:
    """Where the prompts are from."""
    keys = {"source": "wrap", "licence": "", "prompts": ""}
    rows = [
        [
            words(say.workload_title(report, name)),
            *(words(say.setting(facts.get(key, say.NOTHING)), kind) for key, kind in keys.items()),
        ]
        for name, facts in report.workloads.items()
    ]
    return FigureTable(label="Workloads", head=["workload", *keys], rows=rows, texts=3)
