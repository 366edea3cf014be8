"""Kinds of figures that only studies draw: points, bars, stacked bars and spans, in the look of `bench.figures`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.bench.figures import (
    KINDS,
    PANEL_HEIGHT,
    PANEL_WIDTH,
    Panel,
    finish_axis,
    lines,
    named_rows,
    series_colour,
    series_look,
    series_spread,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["bars", "lines", "points", "spans"]

BAR_HEIGHT, ROW_HEIGHT = 0.25, 0.32  # inches a bar, a row of stacked bars


def _points(axis: Axes, panel: Panel, place: int) -> None:
    for number, series in enumerate(panel.series):
        places: Any = list(series.x)
        axis.plot(places, series.y, label=series.label, **{**series_look(series, number), "linestyle": "none"})
        for x, y in zip(series.x, series.y, strict=True) if panel.names else ():
            axis.annotate(series.label, (x, y), (4, 4), textcoords="offset points", fontsize=8, rotation=35)
    axis.margins(0.12, 0.18)  # room for the names
    finish_axis(axis, panel)


def _bars(axis: Axes, panel: Panel, place: int) -> None:
    thick = 0.8 / max(1, len(panel.series))
    for number, series in enumerate(panel.series):
        places = [i + thick * (number - (len(panel.series) - 1) / 2) for i in range(len(series.x))]
        whiskers = {"elinewidth": 1.0, "capsize": 2, "ecolor": "#444444"}
        look: dict[str, Any] = {"xerr": series_spread(series), "label": series.label, "error_kw": whiskers}
        axis.barh(places, series.y, thick, color=series_colour(series, number), **look)
    named_rows(axis, panel, [str(x) for x in panel.series[0].x] if panel.series else [], place)


def _stacked(axis: Axes, panel: Panel, place: int) -> None:
    names = [str(x) for x in panel.series[0].x]
    left = [0.0] * len(names)
    for number, series in enumerate(panel.series):
        look: dict[str, Any] = {"label": series.label, "color": series_colour(series, number)}
        axis.barh(range(len(names)), series.y, 0.6, left=left, **look)
        left = [a + b for a, b in zip(left, series.y, strict=True)]
    named_rows(axis, panel, names, place)


def _spans(axis: Axes, panel: Panel, place: int) -> None:
    """Bars from ``low`` to ``high`` in the rows that ``x`` names."""
    names = list(dict.fromkeys(str(x) for series in panel.series for x in series.x))
    for number, series in enumerate(panel.series):
        low, high = series.low or (), series.high or ()
        rows, widths = [names.index(str(x)) for x in series.x], [b - a for a, b in zip(low, high, strict=True)]
        edge: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.3}
        axis.barh(rows, widths, 0.6, left=low, label=series.label, color=series_colour(series, number), **edge)
    named_rows(axis, panel, names, place)


def _bars_high(panels: Sequence[Panel]) -> float:
    return 1.1 + BAR_HEIGHT * max((len(s.x) * len(p.series) for p in panels for s in p.series), default=1)


def _rows_high(panels: Sequence[Panel]) -> float:
    return 1.0 + ROW_HEIGHT * len({x for series in panels[0].series for x in series.x})


KINDS["points"] = (_points, 1.5 * PANEL_WIDTH, lambda panels: 1.4 * PANEL_HEIGHT)
KINDS["bars"] = (_bars, PANEL_WIDTH, _bars_high)
KINDS["stacked"] = (_stacked, 1.5 * PANEL_WIDTH, _rows_high)
KINDS["spans"] = (_spans, 2 * PANEL_WIDTH, _rows_high)
spans = partial(lines, kind="spans")  # bars from ``low`` to ``high`` in the rows that ``x`` names
points = partial(lines, kind="points")  # that no line joins
bars = partial(lines, kind="bars")  # horizontal: words ``x`` at the left, the first on top, a bar for each series
