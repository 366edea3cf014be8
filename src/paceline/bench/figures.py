"""Figures of reports and of plans: panels of lines, or of dots in rows, all in one look.

matplotlib draws them; it comes with ``pip install 'paceline[bench]'`` and nothing else needs it.
"""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import CapabilityError, ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which most eyes can tell apart; yellow, too pale for a line, is left out.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
PANEL_WIDTH, PANEL_HEIGHT = 4.6, 3.5  # inches
DOT_HEIGHT = 0.15  # inches
TICK_LETTERS = 48  # under a panel, with two for the space behind each number
_STYLE, _ON_A_PAGE = "figures.mplstyle", "figures-page.mplstyle"  # of a file, and what a page's has besides


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
    hollow: bool = False  # of markers


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


def require_matplotlib() -> None:
    """Raises CapabilityError where there is none: better before a long run than after it."""
    if not drawable():
        raise CapabilityError("figures", "matplotlib is not installed", "pip install 'paceline[bench]'")


def drawable() -> bool:
    """Whether there is matplotlib."""
    return importlib.util.find_spec("matplotlib") is not None


def lines(panels: Sequence[Panel], path: Path, width: float = 1.0, kind: str = "lines") -> Path:
    """Panels side by side with a line for each series, written to ``path`` (SVG or PNG, by its suffix).

    Args:
        width: of a panel, in usual ones.
        kind: one of `KINDS`.

    Raises:
        CapabilityError: there is no matplotlib.
        ConfigError: the file cannot be written.
    """
    require_matplotlib()
    metadata = {"Date": None} if path.suffix == ".svg" else None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _style(_STYLE):
            figure(panels, kind, width).savefig(path, metadata=metadata, dpi=110)
    except (OSError, ValueError) as error:
        remedy = "name a .svg in a folder you own"
        raise ConfigError(f"figure {path}", f"cannot be written ({error})", remedy) from error
    return path


def svg(panels: Sequence[Panel], kind: str) -> str:
    """Panels as an SVG element for a page, as wide as there is room and no wider than drawn.

    Its letters are text in the page's own colour, and what is not a mark reads on light and on dark.

    Raises:
        CapabilityError: there is no matplotlib.
    """
    require_matplotlib()
    text = io.StringIO()
    with _style(_STYLE, _ON_A_PAGE):
        figure(panels, kind).savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    found = re.sub(r"<(metadata|style)\b.*?</\1>", "", text.getvalue(), flags=re.DOTALL)
    size, style = r' width="([0-9.]+)pt" height="[0-9.]+pt"', r' style="max-width:\1pt"'
    return re.sub(size, style, found[found.index("<svg") :], count=1)


def _style(*names: str) -> Any:
    from matplotlib import style

    return style.context([str(resources.files(__package__) / name) for name in names])


def figure(panels: Sequence[Panel], kind: str, width: float = 1.0) -> Figure:
    """The drawn panels, in whatever style is in force."""
    from matplotlib.figure import Figure

    draw, across, down = KINDS[kind]
    size = (width * across * len(panels), down(panels))
    made = Figure(figsize=size, layout="constrained")
    axes = made.subplots(1, len(panels), squeeze=False)[0]
    for place, (panel, axis) in enumerate(zip(panels, axes, strict=True)):
        axis.set_title(panel.title, loc="left")
        axis.set_xlabel(panel.x_label)
        axis.set_ylabel(panel.y_label)
        draw(axis, panel, place)
    _legend(made, axes[0], panels[0])
    return made


def series_colour(series: Series, place: int) -> str:
    """Its own, or by its place."""
    number = place if series.colour is None else series.colour
    return number if isinstance(number, str) else COLOURS[number % len(COLOURS)]


def series_look(series: Series, place: int) -> dict[str, Any]:
    """Colour, marker and line."""
    number = series.colour if isinstance(series.colour, int) else place
    marker = series.marker or MARKERS[number % len(MARKERS)]
    look: dict[str, Any] = {"color": series_colour(series, place), "marker": marker}
    look |= {"markerfacecolor": "none"} if series.hollow else {}
    return look | ({"linestyle": "--", "marker": series.marker} if series.dashed else {})


def series_spread(series: Series) -> list[list[float]] | None:
    """Lengths of the whiskers below and above."""
    if series.low is None or series.high is None:
        return None
    below = [max(0.0, y - low) for y, low in zip(series.y, series.low, strict=True)]
    above = [max(0.0, high - y) for y, high in zip(series.y, series.high, strict=True)]
    return [below, above]


def _lines(axis: Axes, panel: Panel, place: int) -> None:
    for number, series in enumerate(panel.series):
        look = series_look(series, number)
        x: Any = list(series.x)
        axis.errorbar(x, series.y, yerr=series_spread(series), label=series.label, capsize=2.5, **look)
    finish_axis(axis, panel)
    _whole_ticks(axis, panel)


def _dots(axis: Axes, panel: Panel, place: int) -> None:
    """Dots with whiskers: words ``x`` at the left, the first on top, a dot for each series."""
    thick = 0.8 / max(1, len(panel.series))
    for number, series in enumerate(panel.series):
        places = [i + thick * (number - (len(panel.series) - 1) / 2) for i in range(len(series.x))]
        look: dict[str, Any] = {**series_look(series, number), "linestyle": "none"}
        axis.errorbar(series.y, places, xerr=series_spread(series), label=series.label, capsize=2, **look)
    named_rows(axis, panel, [str(x) for x in panel.series[0].x] if panel.series else [], place)


def named_rows(axis: Axes, panel: Panel, names: Sequence[str], place: int) -> None:
    """Names of rows at the left, the first on top, whatever rows are missing."""
    axis.set_yticks(range(len(names)), names if place == 0 else [""] * len(names))
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.grid(axis="y", visible=False)
    if panel.line_at is not None:
        axis.axvline(panel.line_at, color="#808080", linestyle="--", linewidth=1)


def _whole_ticks(axis: Axes, panel: Panel) -> None:
    """A tick at every value of a short axis of numbers; of a logarithmic one, at as many as there is room for.

    A linear axis whose values do not fit side by side is measured, and keeps even ticks.
    """
    values = sorted({x for s in panel.series for x in s.x if not isinstance(x, str)})
    while panel.log_x and sum(len(f"{x:g}") + 2 for x in values) > TICK_LETTERS:
        values = values[::2]
    fits = sum(len(f"{x:g}") + 2 for x in values) <= TICK_LETTERS
    if values and len(values) <= 10 and fits:
        axis.set_xticks(values, [f"{x:g}" for x in values])
        axis.minorticks_off()


def finish_axis(axis: Axes, panel: Panel) -> None:
    """Scale, broken line and beginning of the value axis."""
    if panel.log_x:
        axis.set_xscale("log")
    if panel.line_at is not None:
        axis.axhline(panel.line_at, color="#666666", linestyle="--", linewidth=1)
    if panel.y_from is not None:
        axis.set_ylim(bottom=panel.y_from)


def _legend(figure: Figure, axis: Axes, panel: Panel) -> None:
    """One for all panels, below them: it hides nothing."""
    if len(panel.series) > 1 and not panel.names:
        handles, labels = axis.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=panel.columns or len(labels))


def _rows_high(panels: Sequence[Panel], inches: float) -> float:
    """Inches for a mark of every series in every row."""
    marks = max((len(s.x) * len(p.series) for p in panels for s in p.series), default=1)
    return 1.1 + inches * marks


# How panels of a kind are drawn on an axis, their width in inches, and their height by what is in them.
PlotKind = tuple[Callable[["Axes", Panel, int], None], float, Callable[[Sequence[Panel]], float]]
KINDS: dict[str, PlotKind] = {
    "lines": (_lines, PANEL_WIDTH, lambda panels: PANEL_HEIGHT),
    "dots": (_dots, 1.5 * PANEL_WIDTH, lambda panels: _rows_high(panels, DOT_HEIGHT)),
}
