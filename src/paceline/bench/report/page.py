"""The report as one HTML page: nothing is loaded from anywhere, and it reads on a phone.

The plots need matplotlib. Where there is none the page is whole without them and says what to install.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from ..figures import Series, drawable
from ..records import Report
from ..summary import Section, Summary, best, summarise
from . import plots, tables
from . import wording as say
from .tables import FigureTable

COLUMNS = [
    column
    for name, column in tables.COLUMNS.items()
    if name not in ("rest", "nodes pruned a pass", "streams that rode")
]
BEST = tables.columns("tokens/s | p10 to p90 | speed-up | accepted length | exact")


def render(report: Report | Summary, json_name: str = "report.json") -> str:
    """The whole page.

    Args:
        report: what to show.
        json_name: name of the raw data, in the folder that the page will be in.
    """
    summary = summarise(report)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_asset("page.html.j2")).render(**_context(summary), json_name=json_name) + "\n"


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _context(summary: Summary) -> dict[str, Any]:
    report = summary.report
    look = plots.looks(report.methods)
    order = sorted(
        summary.sections, key=lambda section: section != summary.main
    )  # the main one first, the rest as they are
    return {
        "say": say,
        "report": report,
        "summary": summary,
        "css": Markup(_asset("page.css")),  # our own files: not to be escaped
        "js": Markup(_asset("page.js")),
        "plotted": drawable(),
        "tiles": _tiles(summary),
        "troubles": say.troubles(summary),
        "bests": _bests(summary),
        "parts": [_part(summary, section, look) for section in order],
        "curves": [_curve(label, plots.batches(found, look), table) for label, found, table in tables.curves(summary)],
        "facts": _facts(report),
        "methods": tables.methods(report),
        "workloads": tables.workloads(report),
    }


def _tiles(summary: Summary) -> list[tuple[str, str, str, bool]]:
    """The figures at the top: name, value, note, and whether it is bad news."""
    total = summary.total(summary.main)
    ours, plain = best(total), next((r for r in total if r.method.plain and r.method.own), None)
    tiles = []
    if ours is not None and ours.speedup is not None:
        name = say.method_name(ours.method)
        speeds = f"plain decoding: {say.number(plain.speed)}" if plain else "tokens/s"
        tiles += [
            (f"{name} over plain", say.times(ours.speedup.value), say.bracket(ours.speedup), False),
            (f"{name}, tokens/s", say.number(ours.speed), speeds, False),
            ("accepted length", say.length(ours.figures.accepted_length), "1 + accepted / passes", False),
        ]
    count = summary.exact
    if count is not None and summary.main is not None:
        note = f"of {say.count_of(count.sequences, 'sequence')}"
        note += f", {count.explained:,} explained" if count.explained else ""
        note += f", {count.failures:,} differ" if count.failures else ""
        tiles.append(("ids equal plain decoding", f"{count.identical:,}", note, not count.passed))
    if plain is not None and plain.figures.floor_share is not None:
        share = say.share(plain.figures.floor_share)
        tiles.append(("plain decoding, of its floor", share, "reads at measured bandwidth", False))
    return tiles


def _bests(summary: Summary) -> FigureTable | None:
    """The best method of this engine on each workload, where there are several."""
    shown = [row for row in summary.rows if row.section == summary.main]
    found = [best(row for row in shown if row.workload == name) for name in dict.fromkeys(r.workload for r in shown)]
    rows = [row for row in found if row is not None]
    return tables.by_workload(summary.report, rows, BEST, "Best method by workload") if len(rows) > 1 else None


def _part(summary: Summary, section: Section, look: dict[str, Series]) -> dict[str, Any]:
    """What the page shows of one section."""
    total, names = summary.total(section), summary.workloads(section)
    floors = [r.figures.floor_tokens_per_s for r in total if r.method.plain]
    plain_floor = next((floor for floor in floors if floor is not None), None)
    label = f"Over all {len(names)} workloads" if len(names) > 1 else "All figures"
    each = tables.by_workload(summary.report, summary.of(section), COLUMNS, "Every workload, every figure")
    accepted = tables.acceptance(total)
    return {
        "label": say.upper(section.label()),
        "total": tables.figures(total, COLUMNS, label),
        "speedups": plots.speedups(summary, section, look),
        "acceptance_table": accepted,
        "acceptance": plots.acceptance(total, look) if accepted else "",
        "shares": plots.time_shares(total) if any(row.figures.shares for row in total) else "",
        "floor": plots.floor(total, plain_floor) if any(r.figures.floor_share is not None for r in total) else "",
        "plain_floor": plain_floor,
        "each": each if len(names) > 1 else None,
    }


def _curve(label: str, plot: Markup, table: FigureTable) -> dict[str, Any]:
    head = ["method", *(f"batch {size}" for size in table.head[1:])]
    return {"label": label, "plot": plot, "table": replace(table, head=head)}


def _facts(report: Report) -> list[tuple[str, str]]:
    return [
        ("machine", say.machine_line(report)),
        ("model", say.model_line(report)),
        ("versions", say.versions_line(report)),
        ("commit", report.commit or "not known"),
        ("date", say.created(report)),
        *((str(key), say.setting(value)) for key, value in report.settings.items()),
    ]
