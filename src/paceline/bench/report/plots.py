"""The page's plots, drawn by `bench.figures`. Every one says in words what it shows, for those who cannot see it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from markupsafe import Markup

from .. import figures
from ..figures import COLOURS, Panel, Series
from ..records import Method
from ..summary import Curve, Row, Section, Summary
from . import wording as say

GREY = "#7d858c"  # plain decoding
PALETTE = COLOURS[:6]  # without black, which a dark page swallows
MARKERS, PEER_MARKERS = ("o", "^", "D", "v"), ("s", "P", "X", "*")
PARTS = {"draft": "#E69F00", "verify": "#0072B2", "host": "#CC79A7", "rest": "#B0B5BA"}
NAME_WIDTH = 26  # letters of a name in one line


def looks(methods: Sequence[Method]) -> dict[str, Series]:
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


def speedups(summary: Summary, section: Section, look: Mapping[str, Series]) -> Markup:
    """A dot with a whisker for each method in a row of each workload; a line at 1."""
    names, total = summary.workloads(section), summary.total(section)
    shown: list[str | None] = [None, *names] if len(names) > 1 else [*names]
    found = {(row.workload, row.method.name): row.speedup for row in (*total, *summary.of(section))}
    titles = [say.workload_title(summary.report, name) for name in shown]
    series, words = [], []
    for method in (row.method for row in total if row.speedup):
        ratios = [found.get((name, method.name)) for name in shown]
        value, low, high = zip(*((r.value, r.low, r.high) if r else (math.nan,) * 3 for r in ratios), strict=True)
        series.append(replace(look[method.name], x=_all_wrapped(titles), y=value, low=low, high=high))
        said = (f"{title} {say.interval(ratio)}" for title, ratio in zip(titles, ratios, strict=True))
        words.append(f"{say.method_name(method)}, times plain decoding: " + ", ".join(said))
    return _plot("dots", series, words, line_at=1.0)


def acceptance(rows: Sequence[Row], look: Mapping[str, Series]) -> Markup:
    """Share accepted at each depth; a line a method."""
    found = [(row, row.figures.acceptance) for row in rows if row.figures.acceptance]
    series = [
        replace(look[row.method.name], x=range(1, len(shares) + 1), y=[100 * share for share in shares])
        for row, shares in found
    ]
    words = [f"{say.method_name(row.method)}: " + ", ".join(map(say.share, shares)) for row, shares in found]
    return _plot("lines", series, words, x="position in the draft", y="accepted, %", y_from=0.0)


def time_shares(rows: Sequence[Row]) -> Markup:
    """Where the wall time of each method went."""
    found = [(row, row.figures.shares) for row in rows if row.figures.shares]
    names = [f"{say.method_name(row.method)}: {say.number(row.figures.ms_per_token)} ms" for row, _ in found]
    series = [
        Series(label=part, x=_all_wrapped(names), y=[100 * getattr(shares, part) for _, shares in found], colour=colour)
        for part, colour in PARTS.items()
    ]
    shown = [", ".join(f"{part} {say.share(getattr(shares, part))}" for part in PARTS) for _, shares in found]
    return _plot("stacked", series, [f"{n}, {s}" for n, s in zip(names, shown, strict=True)], x="% of the wall time")


def floor(rows: Sequence[Row], plain_floor: float | None) -> Markup:
    """Tokens/s as a bar, the floor of the same method as a tick, that of plain decoding as a line."""
    rows = [row for row in rows if row.speed is not None]
    shares = [row.figures.floor_share for row in rows]
    names = [
        say.method_name(row.method) + ("" if share is None else f": {say.share(share)}")
        for row, share in zip(rows, shares, strict=True)
    ]
    kinds = [2 if row.method.plain else int(not row.method.own) for row in rows]
    pairs = list(zip(rows, kinds, strict=True))
    bars = (("speculative, this engine", COLOURS[0]), ("speculative, other engines", COLOURS[1]), ("plain", GREY))
    floors = [row.figures.floor_tokens_per_s for row in rows]
    shown = _all_wrapped(names)
    series = [
        Series(label=label, x=shown, y=[r.speed or 0.0 if kind == k else 0.0 for r, kind in pairs], colour=colour)
        for k, (label, colour) in enumerate(bars)
        if k in kinds
    ]
    ticks = [math.nan if value is None else value for value in floors]
    series.append(Series(label="floor of the method", x=shown, y=ticks, colour="#808080", ticks=True))
    words = [
        f"{name}, {say.number(row.speed)} tokens/s" + (f", floor {say.number(value)} tokens/s" if value else "")
        for name, value, row in zip(names, floors, rows, strict=True)
    ]
    return _plot("stacked", series, words, x="tokens/s", line_at=plain_floor)


def batches(curves: Sequence[Curve], look: Mapping[str, Series]) -> Markup:
    """Speed-up against batch size with whiskers; a line at 1."""
    series, words = [], []
    for curve in curves:
        sizes, ratios = zip(*curve.points, strict=True)
        value, low, high = zip(*((ratio.value, ratio.low, ratio.high) for ratio in ratios), strict=True)
        series.append(replace(look[curve.method.name], x=sizes, y=value, low=low, high=high))
        shown = ", ".join(f"batch {size}: {say.interval(ratio)}" for size, ratio in curve.points)
        words.append(f"{say.method_name(curve.method)}, {shown}")
    return _plot("lines", series, words, x="batch size", y="times plain decoding", line_at=1.0, log_x=True)


def _plot(kind: str, series: Sequence[Series], words: Sequence[str], x: str = "", y: str = "", **more: Any) -> Markup:
    """The figure, in words too; nothing where there is no matplotlib."""
    if not figures.drawable() or not series:
        return Markup("")
    panel = Panel(title="", x_label=x, y_label=y, series=series, columns=2, **more)
    frame = Markup('<div class="plot" role="img" aria-label="{}">{}</div>')
    return frame.format("; ".join(words), Markup(figures.svg([panel], kind)))


def _wrapped(name: str) -> str:
    """In lines, and a very long one without its end."""
    return "\n".join(textwrap.wrap(name, NAME_WIDTH, max_lines=3, placeholder=" ..")) or name


def _all_wrapped(names: Sequence[str]) -> list[str]:
    return list(map(_wrapped, names))
