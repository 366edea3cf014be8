"""Plots as inline SVG that keeps its letters readable at any width.

Lengths across a plot are percentages, heights and letters are pixels: a plot becomes narrower on a phone
while its text stays as large as the page's, and colours come from the page's style sheet, light or dark. Labels of rows
are HTML beside their lane, so that long names wrap and never cover a mark.

Every mark has a `<title>`, every lane an `aria-label` with the figures it shows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from ..records import Method
from ..summary import Curve, Interval, Row, is_plain
from . import wording as say

COLOURS = 8  # of the style sheet: s0 .. s7
PARTS = (("draft", "drafting"), ("verify", "verifying"), ("host", "host"), ("rest", "rest"))
LABEL_SHARE = 0.15  # a part of a bar carries its figure from this share on
HEIGHT, TOP, BOTTOM = 240, 10, 24  # px of a line chart: all of it, above its area, below its area


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear axis; positions are percentages of its length."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        """Where a value lies."""
        return round(100 * (value - self.low) / (self.high - self.low), 2)


@dataclass(frozen=True, slots=True)
class Mark:
    """How a method looks in every plot."""

    classes: str  # colour and line style
    shape: str  # "dot" of this engine, "box" of a peer

    def draw(self, x: str, y: str, title: str) -> Markup:
        """The mark at a place, with a title for the pointer."""
        body = (
            Markup('<circle class="mark {}" cx="{}" cy="{}" r="4.5">{}</circle>')
            if self.shape == "dot"
            else Markup(
                '<rect class="mark {}" x="{}" y="{}" width="8" height="8" transform="translate(-4 -4)">{}</rect>'
            )
        )
        return body.format(self.classes, x, y, _title(title))


def marks(methods: Sequence[Method]) -> dict[str, Mark]:
    """A colour for each method, the same in all plots; plain decoding is grey, a synthetic method hollow."""
    found, used = {}, 0
    for method in methods:
        colour = "sp" if is_plain(method) else f"s{used % COLOURS}"
        dashed = " dashed" if used >= COLOURS and not is_plain(method) else ""
        used += not is_plain(method)
        hollow = " hollow dashed" if method.synthetic else ""
        found[method.name] = Mark(colour + dashed + hollow, "dot" if method.engine == "paceline" else "box")
    return found


def scale(low: float, high: float, wanted: int = 5) -> Scale:
    """An axis over [low, high] with round ticks, its ends on ticks."""
    span = (high - low) or abs(high) or 1.0
    raw = span / wanted
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(s * unit for s in (1, 2, 2.5, 5, 10) if s * unit >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    last = max(last, first + 1)
    ticks = tuple(round(place * step, 10) for place in range(first, last + 1))
    return Scale(ticks[0], ticks[-1], ticks)


# -- rows: a label, a lane, a figure


def speedup_panel(rows: Sequence[Row], axis: Scale, look: Mapping[str, Mark]) -> Markup:
    """One dot with a whisker a method; a line at 1."""
    lines = []
    for row in rows:
        if row.speedup is None:
            continue
        words = f"{say.method_name(row.method)}: {say.interval(row.speedup)} times plain decoding"
        lane = _grid(axis, one=True) + _whisker(row.speedup, axis, look[row.method.name], words)
        lines.append(_row(say.method_name(row.method), lane, f"{row.speedup.value:.2f}", words))
    return _rows([*lines, _axis(axis, "×")])


def speedup_scale(rows: Sequence[Row]) -> Scale:
    """One axis for all panels, 1 included."""
    found = [row.speedup for row in rows if row.speedup is not None]
    return scale(min(1.0, *(s.low for s in found)), max(1.0, *(s.high for s in found)))


def share_bars(rows: Sequence[Row]) -> Markup:
    """Where the wall time of each method went."""
    axis = Scale(0.0, 1.0, (0.0, 0.25, 0.5, 0.75, 1.0))
    lines = []
    for row in rows:
        shares = row.figures.shares
        if shares is None:
            continue
        parts = [(name, getattr(shares, name)) for name, _ in PARTS]
        words = f"{say.method_name(row.method)}: " + ", ".join(f"{name} {say.share(part)}" for name, part in parts)
        per_token = f"{say.number(row.figures.ms_per_token)} ms"
        lines.append(_row(say.method_name(row.method), _stack(parts), per_token, words))
    return _rows([*lines, _axis(axis, "%", 100)])


def share_legend() -> Markup:
    """What the parts of the bars are."""
    return _legend([(f"swatch part-{name}", words) for name, words in PARTS])


def floor_bars(rows: Sequence[Row], plain_floor: float | None) -> Markup:
    """Tokens/s as a bar, the floor of the same method as a tick, that of plain decoding as a line."""
    shown = [row for row in rows if row.speed is not None]
    ends = [row.speed or 0.0 for row in shown] + [row.figures.floor_tokens_per_s or 0.0 for row in shown]
    axis = scale(0.0, max([*ends, plain_floor or 0.0]), 4)
    lines = [_floor_row(row, axis, plain_floor) for row in shown]
    return _rows([*lines, _axis(axis, "")])


def _floor_row(row: Row, axis: Scale, plain_floor: float | None) -> Markup:
    speed, floor = row.speed or 0.0, row.figures.floor_tokens_per_s
    words = f"{say.method_name(row.method)}: {say.number(speed)} tokens/s"
    if floor is not None:
        words += f", {say.share(row.figures.floor_share)} of the floor of {say.number(floor)} tokens/s"
    lane = _grid(axis) + Markup('<rect class="bar {}" x="0" y="25%" width="{}%" height="50%">{}</rect>').format(
        "sp" if is_plain(row.method) else "own" if row.method.engine == "paceline" else "peer",
        axis.at(speed),
        _title(words),
    )
    if plain_floor is not None:
        lane += _vertical(axis.at(plain_floor), "one")
    if floor is not None:
        lane += _vertical(axis.at(floor), "floor", "15%", "85%")
    return _row(say.method_name(row.method), lane, say.share(row.figures.floor_share), words)


def _stack(parts: Sequence[tuple[str, float]]) -> Markup:
    lane, start = Markup(""), 0.0
    for name, part in parts:
        left, width = round(100 * start, 2), round(100 * part, 2)
        lane += Markup('<rect class="part-{}" x="{}%" y="12%" width="{}%" height="76%">{}</rect>').format(
            name, left, width, _title(f"{name} {say.share(part)}")
        )
        if part >= LABEL_SHARE:
            lane += Markup('<text class="inside on-{}" x="{}%" y="50%" dy="4">{}</text>').format(
                name, round(left + width / 2, 2), say.share(part)
            )
        start += part
    return lane


def _whisker(ratio: Interval, axis: Scale, mark: Mark, words: str) -> Markup:
    line = Markup('<line class="whisker {}" x1="{}%" x2="{}%" y1="50%" y2="50%"/>')
    whisker = line.format(mark.classes, axis.at(ratio.low), axis.at(ratio.high)) if ratio.pairs > 1 else Markup("")
    return whisker + mark.draw(f"{axis.at(ratio.value)}%", "50%", words)


def _grid(axis: Scale, one: bool = False) -> Markup:
    lines = Markup("").join(_vertical(axis.at(tick), "grid") for tick in axis.ticks)
    return lines + (_vertical(axis.at(1.0), "one") if one else Markup(""))


def _vertical(x: float, kind: str, top: str = "0", bottom: str = "100%") -> Markup:
    line = Markup('<line class="{}" x1="{}%" x2="{}%" y1="{}" y2="{}"/>')
    return line.format(kind, x, x, top, bottom)


def _rows(rows: Sequence[Markup]) -> Markup:
    return Markup('<div class="rows">{}</div>').format(Markup("").join(rows))


def _row(label: str, lane: Markup, figure: str, words: str) -> Markup:
    body = Markup('<span class="label">{}</span><div class="lane"><svg role="img" aria-label="{}">{}</svg></div>')
    return body.format(_breakable(label), words, lane) + Markup('<span class="figure">{}</span>').format(figure)


def _breakable(name: str) -> Markup:
    """A long name may go on in the next line behind a slash, an underscore or a comma."""
    parts = re.split(r"(?<=[/_,;=])", name)
    return Markup("<wbr>").join(escape(part) for part in parts)


def _axis(axis: Scale, unit: str, factor: float = 1.0) -> Markup:
    last = len(axis.ticks) - 1
    texts = Markup("").join(
        Markup('<text class="tick {}" x="{}%" y="12">{}</text>').format(
            "first" if place == 0 else "last" if place == last else "" if 2 * place == last else "minor",
            axis.at(tick),
            f"{factor * tick:,g}{unit if place in (0, last) else ''}",
        )
        for place, tick in enumerate(axis.ticks)
    )
    return Markup('<span></span><svg class="axis" aria-hidden="true">{}</svg><span></span>').format(texts)


# -- lines over a few steps


def acceptance_lines(rows: Sequence[Row], look: Mapping[str, Mark]) -> Markup:
    """Share accepted at each depth; a line a method."""
    series = [
        (
            look[row.method.name],
            [
                (
                    place,
                    share,
                    None,
                    f"{say.method_name(row.method)}, position {place + 1}: {say.share(share)} of {passes:,} passes",
                )
                for place, (share, passes) in enumerate(zip(row.figures.acceptance, row.figures.offered, strict=True))
            ],
        )
        for row in rows
        if row.figures.acceptance
    ]
    depth = max((len(points) for _, points in series), default=0)
    axis = Scale(0.0, 1.0, (0.0, 0.25, 0.5, 0.75, 1.0))
    return _lines(series, [str(d + 1) for d in range(depth)], axis, "position in the draft", percent=True)


def batch_lines(curves: Sequence[Curve], look: Mapping[str, Mark]) -> Markup:
    """Speed-up against batch size with whiskers; a line at 1."""
    batches = sorted({batch for curve in curves for batch, _ in curve.points})
    series = [
        (
            look[curve.method.name],
            [
                (
                    batches.index(batch),
                    ratio.value,
                    (ratio.low, ratio.high),
                    f"{say.method_name(curve.method)}, batch {batch}: {say.interval(ratio)}",
                )
                for batch, ratio in curve.points
            ],
        )
        for curve in curves
    ]
    found = [ratio for curve in curves for _, ratio in curve.points]
    axis = scale(min(1.0, *(r.low for r in found)), max(1.0, *(r.high for r in found)))
    return _lines(series, [str(batch) for batch in batches], axis, "batch size", one=True)


def legend(methods: Sequence[Method], look: Mapping[str, Mark]) -> Markup:
    """The methods' colours."""
    return _legend([(f"swatch {look[m.name].classes} {look[m.name].shape}", say.method_name(m)) for m in methods])


Point = tuple[int, float, tuple[float, float] | None, str]  # step, value, interval, words


def _lines(
    series: Sequence[tuple[Mark, Sequence[Point]]],
    steps: Sequence[str],
    axis: Scale,
    name: str,
    one: bool = False,
    percent: bool = False,
) -> Markup:
    every = math.ceil(len(steps) / 12)  # labels that fit a phone
    body = Markup("").join(_horizontal(_height(axis, tick), "grid") for tick in axis.ticks)
    body += _horizontal(_height(axis, 1.0), "one") if one else Markup("")
    for place, (mark, points) in enumerate(series):
        shift = 5 * (place - (len(series) - 1) / 2) if one else 0.0  # whiskers side by side
        body += Markup('<g transform="translate({} 0)">{}</g>').format(shift, _line(mark, points, len(steps), axis))
    for place, step in enumerate(steps):
        if place % every == 0:
            body += Markup('<text class="tick" x="{}%" y="{}">{}</text>').format(
                _centre(place, len(steps)), HEIGHT - 8, step
            )
    labels = Markup("").join(
        Markup('<text class="tick last" x="100%" y="{}" dy="4">{}</text>').format(
            _height(axis, tick), f"{100 * tick:g}%" if percent else f"{tick:g}×"
        )
        for tick in axis.ticks
    )
    words = "; ".join(point[3] for _, points in series for point in points)
    return Markup(
        '<div class="chart"><svg class="scale" height="{h}" aria-hidden="true">{labels}</svg>'
        '<svg class="area" height="{h}" role="img" aria-label="{words}">{body}</svg>'
        '<span></span><span class="axis-name">{name}</span></div>'
    ).format(h=HEIGHT, labels=labels, words=words, body=body, name=name)


def _line(mark: Mark, points: Sequence[Point], steps: int, axis: Scale) -> Markup:
    body = Markup("")
    for (x1, y1, *_), (x2, y2, *_) in zip(points, points[1:], strict=False):
        body += Markup('<line class="path {}" x1="{}%" x2="{}%" y1="{}" y2="{}"/>').format(
            mark.classes, _centre(x1, steps), _centre(x2, steps), _height(axis, y1), _height(axis, y2)
        )
    for x, _, ends, _ in points:
        if ends is not None:
            centre = _centre(x, steps)
            body += Markup('<line class="whisker {}" x1="{}%" x2="{}%" y1="{}" y2="{}"/>').format(
                mark.classes, centre, centre, _height(axis, ends[0]), _height(axis, ends[1])
            )
    return body + Markup("").join(
        mark.draw(f"{_centre(x, steps)}%", str(_height(axis, y)), words) for x, y, _, words in points
    )


def _centre(place: int, steps: int) -> float:
    return round(100 * (place + 0.5) / steps, 2)


def _height(axis: Scale, value: float) -> float:
    return round(TOP + (HEIGHT - TOP - BOTTOM) * (1 - axis.at(value) / 100), 1)


def _horizontal(y: float, kind: str) -> Markup:
    return Markup('<line class="{}" x1="0" x2="100%" y1="{}" y2="{}"/>').format(kind, y, y)


def _legend(entries: Sequence[tuple[str, str]]) -> Markup:
    items = Markup("").join(Markup('<li><i class="{}"></i>{}</li>').format(kind, words) for kind, words in entries)
    return Markup('<ul class="legend">{}</ul>').format(items)


def _title(words: str) -> Markup:
    return Markup("<title>{}</title>").format(words)
