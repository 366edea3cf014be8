"""Figures of studies: panels of lines, dots in rows, points, bars, stacked bars and spans; matplotlib draws them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import CapabilityError, ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which most eyes can distinguish; yellow, too pale for a line, is left out.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
PANEL_WIDTH = 4.6  # inches
PANEL_HEIGHT = 3.5  # inches
TICK_LETTERS = 48  # under a panel, with two for the space after each number

BAR_HEIGHT, ROW_HEIGHT = 0.25, 0.32  # inches a bar, a row of stacked bars


def require_matplotlib() -> None:
    """Raise CapabilityError where matplotlib is missing: better before a long run than after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise CapabilityError("figures", "matplotlib is not installed", "run pip install matplotlib")


@contextmanager
def canvas(width: float, height: float, panels: int = 1) -> Iterator[tuple[Figure, list[Axes]]]:
    """Yield a picture of so many inches, and its axes side by side; it is drawn and written within the context.

    Raises:
        CapabilityError: there is no matplotlib.
    """
    require_matplotlib()
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context(Path(__file__).with_suffix(".mplstyle")):
        made = Figure(figsize=(width, height), layout="constrained")
        yield made, list(made.subplots(1, panels, squeeze=False)[0])


def legend(figure: Figure, axis: Axes, columns: int) -> None:
    """Draw the names of one axis's marks for all axes, below them, so that they hide nothing; one mark needs none."""
    handles, labels = axis.get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def name_rows(axis: Axes, names: list[str]) -> None:
    """Write words at the left, the first on top, even where rows are missing."""
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.grid(axis="y", visible=False)


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line, or one set of points or bars. NaN leaves a gap."""

    label: str
    x: Sequence[float] | Sequence[str]  # words make evenly spaced places
    y: Sequence[float]
    low: Sequence[float] | None = None  # ends of intervals, like ``y``
    high: Sequence[float] | None = None
    dashed: bool = False
    colour: int | str | None = None  # a colour, or an index into `COLOURS`; default: the place among the series
    marker: str | None = None  # default: by the colour's place


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    line_at: float | None = None  # a broken horizontal (of bars: vertical) line, such as plain decoding's 1
    y_from: float | None = None  # where the value axis begins; default: by the data
    columns: int = 0  # of the legend; 0: all in one line
    names: bool = False  # of points: each is named by its series, and there is no legend


def lines(panels: Sequence[Panel], path: Path, width: float = 1.0, kind: str = "lines") -> Path:
    """Panels side by side with a line for each series, written to ``path`` (SVG or PNG, by its suffix).

    Args:
        width: of a panel, in usual ones.
        kind: one of `KINDS`.

    Raises:
        CapabilityError: there is no matplotlib.
        ConfigError: the file cannot be written.
    """
    draw, across, down = KINDS[kind]
    with canvas(width * across * len(panels), down(panels), max(1, len(panels))) as (picture, axes):
        for place, (panel, axis) in enumerate(zip(panels, axes, strict=True)):
            axis.set_title(panel.title, loc="left")
            axis.set_xlabel(panel.x_label)
            axis.set_ylabel(panel.y_label)
            draw(axis, panel, place)
        if not panels[0].names:
            legend(picture, axes[0], panels[0].columns or len(panels[0].series))
        return save(picture, path)


def save(figure: Figure, path: Path) -> Path:
    """Write a picture to a file, SVG or PNG by its suffix.

    Raises:
        ConfigError: it cannot be written.
    """
    metadata = {"Date": None} if path.suffix == ".svg" else None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata=metadata, dpi=110)
    except (OSError, ValueError) as error:
        remedy = "name a .svg in a folder you own"
        raise ConfigError(f"figure {path}", f"cannot be written ({error})", remedy) from error
    return path


def tick_values(axis: Axes, numbers: Iterable[float], log: bool) -> None:
    """A tick at every value of a short axis; of a logarithmic one, at as many as there is room for.

    A linear axis whose values do not fit side by side is measured, and keeps even ticks.
    """
    if log:
        axis.set_xscale("log")
    values = sorted(set(numbers))
    while log and sum(len(f"{x:g}") + 2 for x in values) > TICK_LETTERS:
        values = values[::2]
    if values and len(values) <= 10 and sum(len(f"{x:g}") + 2 for x in values) <= TICK_LETTERS:
        axis.set_xticks(values, [f"{x:g}" for x in values])
        axis.minorticks_off()


def _colour(series: Series, place: int) -> str:
    """Its own, or by its place."""
    number = place if series.colour is None else series.colour
    return number if isinstance(number, str) else COLOURS[number % len(COLOURS)]


def _look(series: Series, place: int) -> dict[str, Any]:
    """Colour, marker and line."""
    number = series.colour if isinstance(series.colour, int) else place
    marker = series.marker or MARKERS[number % len(MARKERS)]
    look: dict[str, Any] = {"color": _colour(series, place), "marker": marker}
    return look | ({"linestyle": "--", "marker": series.marker} if series.dashed else {})


def _spread(series: Series) -> list[list[float]] | None:
    """Lengths of the whiskers below and above."""
    if series.low is None or series.high is None:
        return None
    below = [max(0.0, y - low) for y, low in zip(series.y, series.low, strict=True)]
    above = [max(0.0, high - y) for y, high in zip(series.y, series.high, strict=True)]
    return [below, above]


def _lines(axis: Axes, panel: Panel, place: int) -> None:
    for number, series in enumerate(panel.series):
        x: Any = list(series.x)
        axis.errorbar(x, series.y, yerr=_spread(series), label=series.label, capsize=2.5, **_look(series, number))
    _finish(axis, panel)
    tick_values(axis, [x for series in panel.series for x in series.x if not isinstance(x, str)], panel.log_x)


def _rows(axis: Axes, panel: Panel, names: list[str], place: int) -> None:
    """Rows of bars, named at the left of the first panel alone."""
    name_rows(axis, names if place == 0 else [""] * len(names))
    if panel.line_at is not None:
        axis.axvline(panel.line_at, color="#808080", linestyle="--", linewidth=1)


def _finish(axis: Axes, panel: Panel) -> None:
    """Scale, broken line and beginning of the value axis."""
    if panel.log_x:
        axis.set_xscale("log")
    if panel.line_at is not None:
        axis.axhline(panel.line_at, color="#666666", linestyle="--", linewidth=1)
    if panel.y_from is not None:
        axis.set_ylim(bottom=panel.y_from)


def _points(axis: Axes, panel: Panel, place: int) -> None:
    for number, series in enumerate(panel.series):
        places: Any = list(series.x)
        axis.plot(places, series.y, label=series.label, **{**_look(series, number), "linestyle": "none"})
        for x, y in zip(series.x, series.y, strict=True) if panel.names else ():
            axis.annotate(series.label, (x, y), (4, 4), textcoords="offset points", fontsize=8, rotation=35)
    axis.margins(0.12, 0.18)  # room for the names
    _finish(axis, panel)


def _bars(axis: Axes, panel: Panel, place: int) -> None:
    thick = 0.8 / max(1, len(panel.series))
    for number, series in enumerate(panel.series):
        places = [i + thick * (number - (len(panel.series) - 1) / 2) for i in range(len(series.x))]
        whiskers = {"elinewidth": 1.0, "capsize": 2, "ecolor": "#444444"}
        look: dict[str, Any] = {"xerr": _spread(series), "label": series.label, "error_kw": whiskers}
        axis.barh(places, series.y, thick, color=_colour(series, number), **look)
    _rows(axis, panel, [str(x) for x in panel.series[0].x] if panel.series else [], place)


def _stacked(axis: Axes, panel: Panel, place: int) -> None:
    names = [str(x) for x in panel.series[0].x]
    left = [0.0] * len(names)
    for number, series in enumerate(panel.series):
        look: dict[str, Any] = {"label": series.label, "color": _colour(series, number)}
        axis.barh(range(len(names)), series.y, 0.6, left=left, **look)
        left = [a + b for a, b in zip(left, series.y, strict=True)]
    _rows(axis, panel, names, place)


def _spans(axis: Axes, panel: Panel, place: int) -> None:
    """Bars from ``low`` to ``high`` in the rows that ``x`` names."""
    names = list(dict.fromkeys(str(x) for series in panel.series for x in series.x))
    for number, series in enumerate(panel.series):
        low, high = series.low or (), series.high or ()
        rows, widths = [names.index(str(x)) for x in series.x], [b - a for a, b in zip(low, high, strict=True)]
        edge: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.3}
        axis.barh(rows, widths, 0.6, left=low, label=series.label, color=_colour(series, number), **edge)
    _rows(axis, panel, names, place)


def _bars_high(panels: Sequence[Panel]) -> float:
    return 1.1 + BAR_HEIGHT * max((len(s.x) * len(p.series) for p in panels for s in p.series), default=1)


def _rows_high(panels: Sequence[Panel]) -> float:
    return 1.0 + ROW_HEIGHT * len({x for series in panels[0].series for x in series.x})


# How panels of a kind are drawn on an axis, their width in inches, and their height by what is in them.
KINDS: dict[str, tuple[Callable[[Axes, Panel, int], None], float, Callable[[Sequence[Panel]], float]]] = {
    "lines": (_lines, PANEL_WIDTH, lambda panels: PANEL_HEIGHT),
    "points": (_points, 1.5 * PANEL_WIDTH, lambda panels: 1.4 * PANEL_HEIGHT),
    "bars": (_bars, PANEL_WIDTH, _bars_high),
    "stacked": (_stacked, 1.5 * PANEL_WIDTH, _rows_high),
    "spans": (_spans, 2 * PANEL_WIDTH, _rows_high),
}
spans = partial(lines, kind="spans")  # bars from ``low`` to ``high`` in the rows that ``x`` names
points = partial(lines, kind="points")  # that no line joins
bars = partial(lines, kind="bars")  # horizontal: words ``x`` at the left, the first on top, a bar for each series
