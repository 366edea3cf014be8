"""Figures of documents and of reports: panels of lines, points and bars, all in one look.

matplotlib draws them; it comes with ``pip install 'paceline[bench]'`` and nothing else needs it.
"""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
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
BAR_HEIGHT, DOT_HEIGHT, ROW_HEIGHT = 0.25, 0.15, 0.32  # inches a bar, a dot, a row of stacked bars
TICK_LETTERS = 48  # under a panel, with two for the space behind each number
_STYLE: Any = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "svg.fonttype": "path",  # the same letters everywhere
    "svg.hashsalt": "paceline",  # the same file from the same figures
    "figure.facecolor": "white",
    "text.parse_math": False,  # a dollar in a name is a dollar
}
_ON_A_PAGE: Any = {  # letters are text in the page's own colour, what is not a mark reads on light and on dark
    "svg.fonttype": "none",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.edgecolor": "#808080",
    "xtick.color": "#808080",
    "ytick.color": "#808080",
    "xtick.labelcolor": "black",
    "ytick.labelcolor": "black",
    "grid.color": "#80808040",
}


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
    ticks: bool = False  # of stacked bars: a tick at each value in place of a bar


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
        kind: as of `svg`.

    Raises:
        CapabilityError: there is no matplotlib.
        ConfigError: the file cannot be written.
    """
    require_matplotlib()
    metadata = {"Date": None} if path.suffix == ".svg" else None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _draw(panels, kind, width, {}, path, metadata=metadata, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"figure {path}", f"cannot be written ({error})", "name a .svg in a folder you own"
        ) from error
    return path


spans = partial(lines, kind="spans")  # bars from ``low`` to ``high`` in the rows that ``x`` names
points = partial(lines, kind="points")  # that no line joins
bars = partial(lines, kind="bars")  # horizontal: words ``x`` at the left, the first on top, a bar for each series


def svg(panels: Sequence[Panel], kind: str) -> str:
    """Panels as an ``<svg>`` for a page: as wide as its place there, and never wider than drawn.

    Args:
        kind: lines, points or bars; dots in place of bars; stacked (the bars of a row one behind the other); or spans.

    Raises:
        CapabilityError: there is no matplotlib.
    """
    require_matplotlib()
    text = io.StringIO()
    _draw(panels, kind, 1.0, _ON_A_PAGE, text, format="svg", metadata={"Date": None, "Creator": None})
    found = re.sub(r"<(metadata|style)\b.*?</\1>", "", text.getvalue(), flags=re.DOTALL)
    return re.sub(
        r' width="([0-9.]+)pt" height="[0-9.]+pt"', r' style="max-width:\1pt"', found[found.index("<svg") :], count=1
    )


def _draw(panels: Sequence[Panel], kind: str, width: float, style: Any, target: Any, **save: Any) -> None:
    from matplotlib import rc_context

    with rc_context({**_STYLE, **style}):
        figure(panels, kind, width).savefig(target, **save)


def figure(panels: Sequence[Panel], kind: str, width: float = 1.0) -> Figure:
    """The drawn panels, in whatever style is in force."""
    from matplotlib.figure import Figure

    draw, across, down = _KINDS[kind]
    size = (width * across * len(panels), down or _rows_high(panels, kind))
    made = Figure(figsize=size, layout="constrained")
    axes = made.subplots(1, len(panels), squeeze=False)[0]
    for place, (panel, axis) in enumerate(zip(panels, axes, strict=True)):
        axis.set_title(panel.title, loc="left")
        axis.set_xlabel(panel.x_label)
        axis.set_ylabel(panel.y_label)
        draw(axis, panel, place)
    _legend(made, axes[0], panels[0])
    return made


def _colour(series: Series, place: int) -> str:
    number = place if series.colour is None else series.colour
    return number if isinstance(number, str) else COLOURS[number % len(COLOURS)]


def _look(series: Series, place: int) -> dict[str, Any]:
    number = series.colour if isinstance(series.colour, int) else place
    marker = series.marker or MARKERS[number % len(MARKERS)]
    look: dict[str, Any] = {"color": _colour(series, place), "marker": marker}
    look |= {"markerfacecolor": "none"} if series.hollow else {}
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
        look = _look(series, number)
        x: Any = list(series.x)
        axis.errorbar(x, series.y, yerr=_spread(series), label=series.label, capsize=2.5, **look)
    _finish(axis, panel)
    _whole_ticks(axis, panel)


def _points(axis: Axes, panel: Panel, place: int) -> None:
    for number, series in enumerate(panel.series):
        places: Any = list(series.x)
        axis.plot(places, series.y, label=series.label, **{**_look(series, number), "linestyle": "none"})
        for x, y in zip(series.x, series.y, strict=True) if panel.names else ():
            axis.annotate(series.label, (x, y), (4, 4), textcoords="offset points", fontsize=8, rotation=35)
    axis.margins(0.12, 0.18)  # room for the names
    _finish(axis, panel)


def _bars(axis: Axes, panel: Panel, place: int, dots: bool = False) -> None:
    thick = 0.8 / max(1, len(panel.series))
    for number, series in enumerate(panel.series):
        places = [i + thick * (number - (len(panel.series) - 1) / 2) for i in range(len(series.x))]
        look: dict[str, Any] = {"xerr": _spread(series), "label": series.label}
        if dots:
            axis.errorbar(series.y, places, capsize=2, **look, **{**_look(series, number), "linestyle": "none"})
        else:
            whiskers = {"elinewidth": 1.0, "capsize": 2, "ecolor": "#444444"}
            axis.barh(places, series.y, thick, color=_colour(series, number), error_kw=whiskers, **look)
    _rows(axis, panel, [str(x) for x in panel.series[0].x] if panel.series else [], place)


def _stacked(axis: Axes, panel: Panel, place: int) -> None:
    names = [str(x) for x in panel.series[0].x]
    left = [0.0] * len(names)
    for number, series in enumerate(panel.series):
        look: dict[str, Any] = {"label": series.label, "color": _colour(series, number)}
        if series.ticks:
            axis.plot(series.y, range(len(names)), "|", markersize=13, **look)
        else:
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


def _rows(axis: Axes, panel: Panel, names: Sequence[str], place: int) -> None:
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


def _finish(axis: Axes, panel: Panel) -> None:
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


def _rows_high(panels: Sequence[Panel], kind: str) -> float:
    """Inches for the rows of a kind that has rows."""
    if kind in ("stacked", "spans"):
        return 1.0 + ROW_HEIGHT * len({x for series in panels[0].series for x in series.x})
    marks = max((len(s.x) * len(p.series) for p in panels for s in p.series), default=1)
    return 1.1 + (DOT_HEIGHT if kind == "dots" else BAR_HEIGHT) * marks


# How a kind is drawn, and the inches of a panel across and down (None: by its rows).
_KINDS: dict[str, tuple[Callable[..., None], float, float | None]] = {
    "lines": (_lines, PANEL_WIDTH, PANEL_HEIGHT),
    "points": (_points, 1.5 * PANEL_WIDTH, 1.4 * PANEL_HEIGHT),
    "bars": (_bars, PANEL_WIDTH, None),
    "dots": (partial(_bars, dots=True), 1.5 * PANEL_WIDTH, None),
    "stacked": (_stacked, 1.5 * PANEL_WIDTH, None),
    "spans": (_spans, 2 * PANEL_WIDTH, None),
}
