"""Pictures of reports and studies, all in one look.

matplotlib draws them; it comes with ``pip install 'paceline[bench]'`` and nothing else needs it.
"""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from typing import TYPE_CHECKING

from ..core.errors import CapabilityError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which most eyes can distinguish; yellow, too pale for a line, is left out.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
PANEL_WIDTH = 4.6  # inches
_STYLE, _ON_A_PAGE = "figures.mplstyle", "figures-page.mplstyle"  # of a file, and what a page's has besides


def require_matplotlib() -> None:
    """Raise CapabilityError where matplotlib is missing: better before a long run than after it."""
    if not drawable():
        raise CapabilityError("figures", "matplotlib is not installed", "run pip install 'paceline[bench]'")


def drawable() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


@contextmanager
def canvas(width: float, height: float, panels: int = 1, page: bool = False) -> Iterator[tuple[Figure, list[Axes]]]:
    """Yield a picture of so many inches, and its axes side by side; it is drawn and written within the context.

    Args:
        page: it becomes a part of a page (see `svg`), not a file.

    Raises:
        CapabilityError: there is no matplotlib.
    """
    require_matplotlib()
    from matplotlib import style
    from matplotlib.figure import Figure

    sheets = [str(resources.files(__package__) / name) for name in (_STYLE, *([_ON_A_PAGE] if page else []))]
    with style.context(sheets):
        made = Figure(figsize=(width, height), layout="constrained")
        yield made, list(made.subplots(1, panels, squeeze=False)[0])


def svg(figure: Figure) -> str:
    """Return a picture as an SVG element for a page, as wide as it was drawn where there is room.

    Its letters are text in the page's own colour, and marks can be read on light and on dark.
    """
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    found = re.sub(r"<(metadata|style)\b.*?</\1>", "", text.getvalue(), flags=re.DOTALL)
    size, style = r' width="([0-9.]+)pt" height="[0-9.]+pt"', r' style="width:\1pt"'
    return re.sub(size, style, found[found.index("<svg") :], count=1)


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
