"""The page's plots; the figures of each stand in the tables beside it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from .. import figures
from ..figures import COLOURS, PANEL_HEIGHT, PANEL_WIDTH
from ..records import Cell, Method
from ..summary import Interval, Summary
from . import wording as say
from .markdown import batch_curves

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY = "#7d858c"  # plain decoding
PALETTE = COLOURS[:6]  # without black, which a dark page swallows
MARKERS, PEER_MARKERS = ("o", "^", "D", "v"), ("s", "P", "X", "*")
DOT_HEIGHT = 0.15  # inches
NAME_WIDTH = 26  # letters of a name in one line


def plot(kind: str, summary: Summary, section: Cell) -> str:
    """One plot of a section: ``speed-up``, ``acceptance`` or ``batches``; empty where there is nothing to draw."""
    draw = {"speed-up": speedups, "acceptance": acceptance, "batches": batches}[kind]
    return draw(summary, section) if figures.drawable() else ""


def looks(methods: Iterable[Method]) -> dict[str, dict[str, Any]]:
    """How matplotlib draws each method, the same in all plots.

    Plain decoding is grey, other engines have squares and other corners, a synthetic method is hollow.
    """
    found: dict[str, dict[str, Any]] = {}
    place = 0
    for method in methods:
        markers = MARKERS if method.own else PEER_MARKERS
        look = {
            "label": _wrapped(say.method_name(method)),
            "color": GREY if method.plain else PALETTE[place % len(PALETTE)],
            "marker": markers[0 if method.plain else place // len(PALETTE) % len(markers)],
        }
        found[method.name] = look | ({"markerfacecolor": "none"} if method.synthetic else {})
        place += not method.plain
    return found


def speedups(summary: Summary, section: Cell) -> str:
    """A dot with a whisker for each method in a row of each workload; a line at 1."""
    total, names = summary.total(section), summary.workloads(section)
    found = {(row.workload, row.method.name): row.speedup for row in (*total, *summary.of(section))}
    rows, look = [*([None] if len(names) > 1 else []), *names], looks(summary.report.methods)
    methods = [row.method.name for row in total if row.speedup]
    if not methods:
        return ""
    thick = 0.8 / len(methods)
    with figures.canvas(1.5 * PANEL_WIDTH, 1.1 + DOT_HEIGHT * len(rows) * len(methods), page=True) as (picture, [axis]):
        for number, method in enumerate(methods):
            shift = thick * (number - (len(methods) - 1) / 2)
            ratios = {place + shift: found.get((row, method)) for place, row in enumerate(rows)}
            _marks(axis, ratios, look[method] | {"linestyle": "none", "capsize": 2}, across=True)
        figures.name_rows(axis, [_wrapped(say.workload_title(summary.report, row)) for row in rows])
        axis.axvline(1.0, color="#808080", linestyle="--", linewidth=1)
        caption = "Times plain decoding of the same engine, with 95% intervals. Squares, crosses: other engines."
        return _framed(picture, axis, caption)


def batches(summary: Summary, section: Cell) -> str:
    """Speed-up against batch size with whiskers; a line at 1."""
    curves, look = batch_curves(summary)[section], looks(summary.report.methods)
    with figures.canvas(PANEL_WIDTH, PANEL_HEIGHT, page=True) as (picture, [axis]):
        for name, points in curves.items():
            _marks(axis, points, look[name] | {"capsize": 2.5})
        figures.tick_values(axis, [size for points in curves.values() for size in points], log=True)
        axis.axhline(1.0, color="#666666", linestyle="--", linewidth=1)
        axis.set(xlabel="batch size", ylabel="times plain decoding")
        caption = "Over all workloads, with 95% intervals; the broken line is plain decoding at the same batch size."
        return _framed(picture, axis, caption)


def acceptance(summary: Summary, section: Cell) -> str:
    """Share accepted at each depth; a line a method."""
    look = looks(summary.report.methods)
    found = {row.method.name: row.acceptance for row in summary.total(section) if row.acceptance}
    if not found:
        return ""
    with figures.canvas(PANEL_WIDTH, PANEL_HEIGHT, page=True) as (picture, [axis]):
        for name, shares in found.items():
            axis.plot(range(1, len(shares) + 1), [100 * share for share in shares], **look[name])
        figures.tick_values(axis, range(1, max(map(len, found.values())) + 1), log=False)
        axis.set(xlabel="position in the draft", ylabel="accepted, %")
        axis.set_ylim(bottom=0.0)
        caption = "Of the passes that accepted all before a position and had a draft there, the share that accepted it."
        return _framed(picture, axis, caption)


def _marks(axis: Axes, ratios: Mapping[Any, Interval | None], look: Mapping[str, Any], *, across: bool = False) -> None:
    """Ratios with whiskers, by their places; ``across``: the ratios go to the right, not up."""
    known = {place: ratio for place, ratio in ratios.items() if ratio}
    values = [ratio.value for ratio in known.values()]
    ends = [(max(0.0, r.value - r.low), max(0.0, r.high - r.value)) for r in known.values()]
    spread = [*zip(*ends, strict=True)]
    if across:
        axis.errorbar(values, [*known], xerr=spread, **look)
    else:
        axis.errorbar([*known], values, yerr=spread, **look)


def _framed(picture: Figure, axis: Axes, caption: str) -> str:
    """The picture under its caption."""
    figures.legend(picture, axis, columns=2)
    label = escape(f"{caption} The tables of this section have the figures.")
    framed = f'<div class="plot" role="img" aria-label="{label}">{figures.svg(picture)}</div>'
    return f"<figure><figcaption>{caption}</figcaption>{framed}</figure>"


def _wrapped(name: str) -> str:
    """In lines, and a very long one without its end."""
    return "\n".join(textwrap.wrap(name, NAME_WIDTH, max_lines=3, placeholder=" ..")) or name
