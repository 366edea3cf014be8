"""Figures of documents as SVG: panels of lines, bars and points, all in one look.

matplotlib draws them; it comes with ``pip install 'paceline[bench]'`` and nothing else needs it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
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
BAR_HEIGHT = 0.25  # inches a bar
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
    colour: int | None = None  # index into `COLOURS`; default: the place among the series


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
    if importlib.util.find_spec("matplotlib") is None:
        raise CapabilityError("figures", "matplotlib is not installed", "pip install 'paceline[bench]'")


def lines(panels: Sequence[Panel], path: Path, width: float = 1.0) -> Path:
    """Panels side by side with a line for each series, written to ``path`` (SVG or PNG, by its suffix).

    Args:
        width: of a panel, in usual ones.

    Raises:
        CapabilityError: there is no matplotlib.
        ConfigError: the file cannot be written.
    """
    return _draw(panels, path, (width * PANEL_WIDTH * len(panels), PANEL_HEIGHT), _lines)


def points(panels: Sequence[Panel], path: Path) -> Path:
    """The same with points that no line joins."""
    return _draw(panels, path, (1.5 * PANEL_WIDTH * len(panels), 1.4 * PANEL_HEIGHT), _points)


def bars(panels: Sequence[Panel], path: Path) -> Path:
    """Panels side by side with horizontal bars: words ``x`` at the left, the first on top, a bar for each series."""
    count = max((len(s.x) * len(p.series) for p in panels for s in p.series), default=1)
    return _draw(panels, path, (PANEL_WIDTH * len(panels), 1.1 + BAR_HEIGHT * count), _bars)


def _draw(panels: Sequence[Panel], path: Path, size: tuple[float, float], draw: Any) -> Path:
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for place, (panel, axis) in enumerate(zip(panels, axes, strict=True)):
            axis.set_title(panel.title, loc="left")
            axis.set_xlabel(panel.x_label)
            axis.set_ylabel(panel.y_label)
            draw(axis, panel, place)
        _legend(figure, axes[0], panels[0])
        _save(figure, path)
    return path


def _save(figure: Figure, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, metadata=metadata, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"figure {path}", f"cannot be written ({error})", "name a .svg in a folder you own"
        ) from error


def _look(series: Series, place: int) -> dict[str, Any]:
    number = place if series.colour is None else series.colour
    look: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
    return look | ({"linestyle": "--", "marker": None} if series.dashed else {})


def _places(series: Series) -> Any:
    return list(series.x)


def _spread(series: Series) -> list[list[float]] | None:
    """Lengths of the whiskers below and above."""
    if series.low is None or series.high is None:
        return None
    below = [max(0.0, y - low) for y, low in zip(series.y, series.low, strict=True)]
    above = [max(0.0, high - y) for y, high in zip(series.y, series.high, strict=True)]
    return [below, above]


def _lines(axis: Axes, panel: Panel, place: int) -> None:
    if panel.log_x:
        axis.set_xscale("log")
    for number, series in enumerate(panel.series):
        look = _look(series, number)
        axis.errorbar(_places(series), series.y, yerr=_spread(series), label=series.label, capsize=2.5, **look)
    _whole_ticks(axis, panel)
    _finish(axis, panel)


def _points(axis: Axes, panel: Panel, place: int) -> None:
    if panel.log_x:
        axis.set_xscale("log")
    for number, series in enumerate(panel.series):
        look = _look(series, number)
        axis.plot(_places(series), series.y, linestyle="none", label=series.label, **look)
        if panel.names:
            for x, y in zip(series.x, series.y, strict=True):
                axis.annotate(series.label, (x, y), (4, 4), textcoords="offset points", fontsize=8, rotation=35)
    axis.margins(0.12, 0.18)  # room for the names
    _finish(axis, panel)


def _bars(axis: Axes, panel: Panel, place: int) -> None:
    thick = 0.8 / max(1, len(panel.series))
    for number, series in enumerate(panel.series):
        places = [i + thick * (number - (len(panel.series) - 1) / 2) for i in range(len(series.x))]
        colour = COLOURS[(number if series.colour is None else series.colour) % len(COLOURS)]
        whiskers = {"elinewidth": 1.0, "capsize": 2, "ecolor": "#444444"}
        axis.barh(places, series.y, thick, xerr=_spread(series), label=series.label, color=colour, error_kw=whiskers)
    names = list(panel.series[0].x) if panel.series else []
    axis.set_yticks(range(len(names)), [str(name) for name in names] if place == 0 else [""] * len(names))
    axis.set_ylim(len(names) - 0.5, -0.5)  # first on top, whatever bars are missing
    axis.grid(axis="y", visible=False)
    if panel.line_at is not None:
        axis.axvline(panel.line_at, color="#666666", linestyle="--", linewidth=1)


def _whole_ticks(axis: Axes, panel: Panel) -> None:
    """A tick at every value of a short axis of numbers."""
    values = sorted({x for s in panel.series for x in s.x if not isinstance(x, str)})
    if values and len(values) <= 10:
        axis.set_xticks(values, [f"{x:g}" for x in values])
        axis.minorticks_off()


def _finish(axis: Axes, panel: Panel) -> None:
    if panel.line_at is not None:
        axis.axhline(panel.line_at, color="#666666", linestyle="--", linewidth=1)
    if panel.y_from is not None:
        axis.set_ylim(bottom=panel.y_from)


def _legend(figure: Figure, axis: Axes, panel: Panel) -> None:
    """One for all panels, below them: it hides nothing."""
    if len(panel.series) > 1 and not panel.names:
        handles, labels = axis.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=panel.columns or len(labels))
