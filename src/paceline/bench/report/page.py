"""The report as one HTML page: nothing is loaded from anywhere, and it reads on a phone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from ..records import Report
from ..summary import Curve, Index, Row, Section, Summary, against, batch_curve, best, is_plain, slower_cells, summarise
from . import plots
from . import wording as say


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of a table."""

    text: str
    value: float | str | None = None  # what sorting goes by; None: nothing, goes last
    kind: str = ""
    title: str = ""
    fine: str = ""  # small print behind the text


@dataclass(frozen=True, kw_only=True)
class Line:
    """One row of a table."""

    cells: Sequence[Cell]
    plain: bool = False


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table."""

    label: str
    head: Sequence[str]
    rows: Sequence[Line]
    texts: int = 1  # columns of text, at the left; the rest are figures
    pinned: int = 0  # the column that stays in sight


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One figure at the top."""

    name: str
    value: str
    note: str
    bad: bool = False


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One plot of several."""

    title: str
    plot: Markup


@dataclass(frozen=True, kw_only=True)
class Part:
    """What the page shows of one section."""

    label: str
    total: Grid
    panels: Sequence[Panel] = ()
    peers: Grid | None = None
    legend: Markup = field(default_factory=Markup)
    acceptance: Markup | None = None
    acceptance_table: Grid | None = None
    shares: Markup | None = None
    floor: Markup | None = None
    plain_floor: float | None = None
    each: Grid | None = None


def render(report: Report | Summary, json_name: str = "report.json") -> str:
    """The whole page.

    Args:
        report: what to show.
        json_name: name of the raw data, in the folder that the page will be in.
    """
    summary = report if isinstance(report, Summary) else summarise(report)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_asset("page.html.j2")).render(**_context(summary, json_name)) + "\n"


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _context(summary: Summary, json_name: str) -> dict[str, Any]:
    report, index = summary.report, Index(summary.report)
    look = plots.marks(report.methods)
    first = say.main_section(summary)
    order = sorted(summary.sections, key=lambda section: section != first)  # the main one first, the rest as they are
    return {
        "report": report,
        "css": Markup(_asset("page.css")),  # our own files: not to be escaped
        "js": Markup(_asset("page.js")),
        "json_name": json_name,
        "created": say.created(report),
        "headline": say.headline(summary),
        "model": say.model_line(report),
        "machine": say.machine_line(report),
        "tiles": _tiles(summary),
        "findings": say.findings(summary),
        "differing": [say.failure_line(found) for found in say.failures(report)],
        "failed": say.failed_trials(summary),
        "slower": _slower(summary),
        "unavailable": say.unavailable_lines(report),
        "bests": _bests(summary, first),
        "parts": [_part(summary, index, section, look) for section in order],
        "curves": _curves(summary, look),
        "share_legend": plots.share_legend(),
        "synthetic": say.has_synthetic(report.methods),
        "command": say.command_line(report),
        "facts": _facts(report),
        "methods": _methods(report),
        "workloads": _workloads(report),
        "definitions": say.definitions(report),
    }


# -- the top


def _tiles(summary: Summary) -> list[Tile]:
    section = say.main_section(summary)
    if section is None:
        return []
    total = summary.total(section)
    ours, plain = best(total), next((r for r in total if is_plain(r.method) and r.method.engine == "paceline"), None)
    tiles = []
    if ours is not None and ours.speedup is not None:
        name = say.method_name(ours.method)
        tiles.append(
            Tile(name=f"{name} over plain", value=say.times(ours.speedup.value), note=say.bracket(ours.speedup))
        )
        speeds = f"plain decoding: {say.number(plain.speed)}" if plain else "tokens/s"
        tiles.append(Tile(name=f"{name}, tokens/s", value=say.number(ours.speed), note=speeds))
        depth = "1 + accepted / passes"
        tiles.append(Tile(name="accepted length", value=say.length(ours.figures.accepted_length), note=depth))
    rival = say.rival(summary)
    if rival is not None:
        tiles.append(Tile(name=f"over {rival[0]}", value=say.times(rival[1].value), note="the fastest peer here"))
    tiles += _exact_tile(summary)
    if plain is not None and plain.figures.floor_share is not None:
        share = say.share(plain.figures.floor_share)
        tiles.append(Tile(name="plain decoding, of its floor", value=share, note="reads at measured bandwidth"))
    return tiles


def _exact_tile(summary: Summary) -> list[Tile]:
    count = summary.exact
    if count is None:
        return []
    note = f"of {say.count_of(count.sequences, 'sequence')}"
    note += f", {count.explained:,} explained" if count.explained else ""
    note += f", {count.failures:,} differ" if count.failures else ""
    return [Tile(name="ids equal plain decoding", value=f"{count.identical:,}", note=note, bad=not count.passed)]


def _slower(summary: Summary) -> list[str]:
    rows = slower_cells(summary)
    return [f"{say.method_name(row.method)}, {say.row_label(row)}: {say.interval(row.speedup)}" for row in rows]


def _bests(summary: Summary, section: Section | None) -> Grid | None:
    found = say.best_by_workload(summary, section) if section is not None else []
    if len(found) < 2:
        return None
    rows = [Line(cells=[_text(title), _name(row), *_figures(row, BEST)]) for title, row in found]
    head = ["workload", "method", *(column.name for column in BEST)]
    return Grid(label="Best method by workload", head=head, rows=rows, texts=2)


# -- one section


def _part(summary: Summary, index: Index, section: Section, look: dict[str, plots.Mark]) -> Part:
    total, each = summary.total(section), summary.of(section)
    names = summary.workloads(section)
    offered = [row.method for row in total if row.figures.acceptance]
    floors = [
        r.figures.floor_tokens_per_s for r in total if is_plain(r.method) and r.figures.floor_tokens_per_s is not None
    ]
    plain_floor = floors[0] if floors else None
    timed = any(row.figures.shares for row in total)
    known_floor = any(row.figures.floor_share is not None for row in total)
    return Part(
        label=_upper(section.label()),
        total=_total(total, names),
        panels=_panels(summary, section, look),
        peers=_peers(index, section),
        legend=plots.legend(offered, look),
        acceptance=plots.acceptance_lines(total, look) if offered else None,
        acceptance_table=_acceptance(total) if offered else None,
        shares=plots.share_bars(total) if timed else None,
        floor=plots.floor_bars(total, plain_floor) if known_floor else None,
        plain_floor=plain_floor,
        each=_each(summary.report, each) if len(names) > 1 else None,
    )


def _panels(summary: Summary, section: Section, look: dict[str, plots.Mark]) -> list[Panel]:
    rows = [row for row in (*summary.total(section), *summary.of(section)) if row.speedup is not None]
    if not rows:
        return []
    axis = plots.speedup_scale(rows)
    names: list[str | None] = [*summary.workloads(section)]
    names = [None, *names] if len(names) > 1 else names
    panels = [(name, [row for row in rows if row.workload == name]) for name in names]
    return [
        Panel(title=_upper(say.workload_title(summary.report, name)), plot=plots.speedup_panel(found, axis, look))
        for name, found in panels
        if found
    ]


def _total(rows: Sequence[Row], names: Sequence[str]) -> Grid:
    label = f"Over all {len(names)} workloads" if len(names) > 1 else "All figures"
    columns = COLUMNS
    return Grid(
        label=label,
        head=["method", *(column.name for column in columns)],
        rows=[Line(cells=[_name(row), *_figures(row, columns)], plain=is_plain(row.method)) for row in rows],
    )


def _each(report: Report, rows: Sequence[Row]) -> Grid:
    return Grid(
        label="Every workload, every figure",
        head=["workload", "method", *(column.name for column in COLUMNS)],
        rows=[
            Line(
                cells=[_text(say.workload_title(report, row.workload)), _name(row), *_figures(row, COLUMNS)],
                plain=is_plain(row.method),
            )
            for row in rows
        ],
        texts=2,
        pinned=1,
    )


def _peers(index: Index, section: Section) -> Grid | None:
    found = against(index, section)
    if not found:
        return None
    names = [name for name in index.methods if any(name in ratios for ratios in found.values())]
    rows = []
    for name in names:
        ratios = [of.get(name) for of in found.values()]
        cells = [Cell(text=say.interval(r), value=r.value if r else None) for r in ratios]
        rows.append(Line(cells=[_text(say.method_name(index.methods[name])), *cells]))
    return Grid(label="Beside other engines", head=["method", *(f"over {peer}" for peer in found)], rows=rows)


def _acceptance(rows: Sequence[Row]) -> Grid:
    found = [row for row in rows if row.figures.acceptance]
    depth = max(len(row.figures.acceptance) for row in found)
    lines = []
    for row in found:
        pairs = zip(row.figures.acceptance, row.figures.offered, strict=True)
        cells = [Cell(text=say.share(share), value=share, title=f"of {many:,} passes") for share, many in pairs]
        cells += [Cell(text=say.NOTHING)] * (depth - len(cells))
        lines.append(Line(cells=[_name(row), *cells]))
    return Grid(label="Acceptance by position", head=["method", *map(str, range(1, depth + 1))], rows=lines)


def _curves(summary: Summary, look: dict[str, plots.Mark]) -> list[dict[str, Any]]:
    curves = batch_curve(summary)
    sections = dict.fromkeys(curve.section for curve in curves)
    return [_curve(section, [c for c in curves if c.section == section], look) for section in sections]


def _curve(section: Section, curves: Sequence[Curve], look: dict[str, plots.Mark]) -> dict[str, Any]:
    batches = sorted({batch for curve in curves for batch, _ in curve.points})
    rows = []
    for curve in curves:
        ratios = [dict(curve.points).get(batch) for batch in batches]
        cells = [Cell(text=say.interval(r), value=r.value if r else None) for r in ratios]
        rows.append(Line(cells=[_text(say.method_name(curve.method)), *cells]))
    return {
        "label": say.without_batch(section),
        "legend": plots.legend([curve.method for curve in curves], look),
        "plot": plots.batch_lines(curves, look),
        "table": Grid(label="Speed-up by batch size", head=["method", *(f"batch {b}" for b in batches)], rows=rows),
    }


# -- cells


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of a row."""

    name: str
    cell: Callable[[Row], Cell]


def _text(text: str) -> Cell:
    return Cell(text=text, value=text)


def _name(row: Row) -> Cell:
    failed = f"{row.figures.failed} failed" if row.figures.failed else ""
    return Cell(
        text=say.method_name(row.method), value=row.method.name, title=say.method_detail(row.method), fine=failed
    )


def _figures(row: Row, columns: Sequence[Column]) -> list[Cell]:
    return [column.cell(row) for column in columns]


def _of(get: Callable[[Row], float | None], show: Callable[[float | None], str]) -> Callable[[Row], Cell]:
    def cell(row: Row) -> Cell:
        value = get(row)
        return Cell(text=show(value), value=value)

    return cell


def _speed(row: Row) -> Cell:
    spread = row.figures.speed
    if spread is None:
        return Cell(text="failed" if row.figures.failed else say.NOTHING, kind="bad" if row.figures.failed else "")
    title = f"{say.number(spread.low)} to {say.number(spread.high)} in {say.count_of(spread.count, 'trial')}"
    return Cell(text=say.number(spread.median), value=spread.median, title=title)


def _spread(row: Row) -> Cell:
    spread = row.figures.speed
    if spread is None:
        return Cell(text=say.NOTHING)
    return Cell(text=f"{say.number(spread.p10)} to {say.number(spread.p90)}", value=spread.p10)


def _speedup(row: Row) -> Cell:
    ratio = row.speedup
    if ratio is None:
        return Cell(text=say.speedup(row), value=1.0 if row.reference == row.method.name else None)
    kind = "good" if ratio.low > 1 else "bad" if ratio.high < 1 else ""
    title = f"{say.count_of(ratio.pairs, 'pair')} in {say.count_of(ratio.groups, 'group')} of prompts"
    return Cell(text=say.speedup(row), value=ratio.value, kind=kind, title=title)


def _exact(row: Row) -> Cell:
    count, mark = row.exact, say.exact_mark(row.exact)
    if count is None:
        return Cell(text=mark)
    title = f"{count.identical} of {count.sequences} identical, {count.explained} explained, {count.failures} failed"
    return Cell(text=mark, value=mark, kind="" if count.passed else "bad", title=title)


SPEED = (Column("tokens/s", _speed), Column("p10 to p90", _spread), Column("speed-up", _speedup))
LENGTH = Column("accepted length", _of(lambda row: row.figures.accepted_length, say.length))
WORK = (
    Column("call reduction", _of(lambda row: row.figures.call_reduction, say.length)),
    Column("row-layers a pass", _of(lambda row: row.figures.row_layers, say.number)),
    Column("upper ones", _of(lambda row: row.figures.upper_row_layers, say.number)),
)
FLOOR = Column("of the floor", _of(lambda row: row.figures.floor_share, say.share))
EXACT = Column("exact", _exact)
TIMES = (
    Column("first token, ms", _of(lambda row: row.figures.ttft_ms, say.number)),
    Column("a token, ms", _of(lambda row: row.figures.waits.mean_ms if row.figures.waits else None, say.number)),
    Column("wait p50, ms", _of(lambda row: row.figures.waits.p50_ms if row.figures.waits else None, say.number)),
    Column("p90, ms", _of(lambda row: row.figures.waits.p90_ms if row.figures.waits else None, say.number)),
    Column("p99, ms", _of(lambda row: row.figures.waits.p99_ms if row.figures.waits else None, say.number)),
    Column("draft", _of(lambda row: row.figures.shares.draft if row.figures.shares else None, say.share)),
    Column("verify", _of(lambda row: row.figures.shares.verify if row.figures.shares else None, say.share)),
    Column("host", _of(lambda row: row.figures.shares.host if row.figures.shares else None, say.share)),
    Column("peak memory", _of(lambda row: row.figures.peak_bytes, say.size)),
    Column("tokens", _of(lambda row: float(row.figures.tokens), lambda value: f"{value or 0:,.0f}")),
)
COLUMNS = (*SPEED, LENGTH, FLOOR, EXACT, *WORK, *TIMES)
BEST = (*SPEED, LENGTH, EXACT)


# -- the bottom


def _facts(report: Report) -> list[tuple[str, str]]:
    facts = [("machine", say.machine_line(report)), ("model", say.model_line(report))]
    facts += [("versions", ", ".join(f"{name} {version}" for name, version in report.versions.items()))]
    facts += [("commit", report.commit or "not known"), ("date", say.created(report))]
    return facts + [(str(key), say.setting(value)) for key, value in report.settings.items()]


def _methods(report: Report) -> Grid:
    lines = []
    for method in report.methods:
        detail = Cell(text=say.method_detail(method), value=say.method_detail(method), kind="wrap")
        lines.append(Line(cells=[_text(say.method_name(method)), detail]))
    return Grid(label="Methods", head=["method", "what it is"], rows=lines, texts=2)


def _workloads(report: Report) -> Grid:
    keys = ("source", "licence", "prompts")
    lines = []
    for name, facts in report.workloads.items():
        found = [say.setting(facts.get(key, say.NOTHING)) for key in keys]
        kinds = ("wrap", "", "")
        cells = [Cell(text=text, value=text, kind=kind) for text, kind in zip(found, kinds, strict=True)]
        lines.append(Line(cells=[_text(say.workload_title(report, name)), *cells]))
    return Grid(label="Workloads", head=["workload", *keys], rows=lines, texts=3)


def _upper(label: str) -> str:
    return label[:1].upper() + label[1:]
