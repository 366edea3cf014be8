"""The page's plots, drawn by `bench.figures`; the figures of each stand in the tables beside it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any

from .. import figures
from ..figures import COLOURS, Panel, Series
from ..records import Cell, Method
from ..summary import Interval, Summary
from . import wording as say
from .markdown import batch_curves

GREY = "#7d858c"  # plain decoding
PALETTE = COLOURS[:6]  # without black, which a dark page swallows
MARKERS, PEER_MARKERS = ("o", "^", "D", "v"), ("s", "P", "X", "*")
NAME_WIDTH = 26  # letters of a name in one line
Ratios = Mapping[str, Mapping[Any, Interval | None]]  # of methods, by what they are at


def plot(kind: str, summary: Summary, section: Cell) -> str:
    """One plot of a section: ``speed-up``, ``acceptance`` or ``batches``; empty where there is nothing to draw."""
    draw = {"speed-up": speedups, "acceptance": acceptance, "batches": batches}[kind]
    return draw(summary, section) if figures.drawable() else ""


def looks(methods: Iterable[Method]) -> dict[str, Series]:
    """An empty series for each method, which looks the same in all plots.

    Plain decoding is grey, other engines have squares and other corners, a synthetic method is hollow.
    """
    found: dict[str, Series] = {}
    place = 0
    for method in methods:
        markers = MARKERS if method.own else PEER_MARKERS
        found[method.name] = Series(
            label=_wrapped(say.method_name(method)),
            x=[],
            y=[],
            colour=GREY if method.plain else PALETTE[place % len(PALETTE)],
            marker=markers[place // len(PALETTE) % len(markers)] if not method.plain else markers[0],
            hollow=method.synthetic,
        )
        place += not method.plain
    return found


def speedups(summary: Summary, section: Cell) -> str:
    """A dot with a whisker for each method in a row of each workload; a line at 1."""
    total, names = summary.total(section), summary.workloads(section)
    found = {(row.workload, row.method.name): row.speedup for row in (*total, *summary.of(section))}
    titles = {name: _wrapped(say.workload_title(summary.report, name)) for name in ([None] * (len(names) > 1) + names)}
    methods = [row.method.name for row in total if row.speedup]
    ratios = {method: {title: found.get((name, method)) for name, title in titles.items()} for method in methods}
    caption = "Times plain decoding of the same engine, by task, with 95% intervals. Squares, crosses: other engines."
    return _intervals("dots", summary, ratios, caption)


def batches(summary: Summary, section: Cell) -> str:
    """Speed-up against batch size with whiskers; a line at 1."""
    labels: dict[str, Any] = {"x_label": "batch size", "y_label": "times plain decoding", "log_x": True}
    caption = "Over all workloads, with 95% intervals; the broken line is plain decoding at the same batch size."
    return _intervals("lines", summary, batch_curves(summary)[section], caption, **labels)


def acceptance(summary: Summary, section: Cell) -> str:
    """Share accepted at each depth; a line a method."""
    look = looks(summary.report.methods)
    found = {row.method.name: row.acceptance for row in summary.total(section) if row.acceptance}
    series = [
        replace(look[name], x=range(1, len(shares) + 1), y=[100 * share for share in shares])
        for name, shares in found.items()
    ]
    labels: dict[str, Any] = {"x_label": "position in the draft", "y_label": "accepted, %", "y_from": 0.0}
    caption = "Of the passes that accepted all before a position and had a draft there, the share that accepted it."
    return _framed("lines", series, caption, **labels)


def _intervals(kind: str, summary: Summary, ratios: Ratios, caption: str, **more: Any) -> str:
    look, series = looks(summary.report.methods), []
    for name, points in ratios.items():
        ends = ((r.value, r.low, r.high) if r else (math.nan,) * 3 for r in points.values())
        value, low, high = zip(*ends, strict=True)
        series.append(replace(look[name], x=list(points), y=value, low=low, high=high))
    return _framed(kind, series, caption, line_at=1.0, **more)


def _framed(kind: str, series: Sequence[Series], caption: str, **more: Any) -> str:
    """The figure under its caption."""
    if not series:
        return ""
    panel = Panel(**{"title": "", "x_label": "", "y_label": "", "series": series, "columns": 2, **more})
    label = escape(f"{caption} The tables of this section have the figures.")
    framed = f'<div class="plot" role="img" aria-label="{label}">{figures.svg([panel], kind)}</div>'
    return f"<figure><figcaption>{caption}</figcaption>{framed}</figure>"


def _wrapped(name: str) -> str:
    """In lines, and a very long one without its end."""
    return "\n".join(textwrap.wrap(name, NAME_WIDTH, max_lines=3, placeholder=" ..")) or name
