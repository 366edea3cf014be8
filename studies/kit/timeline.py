"""A timeline as a picture: a row for everybody, a colour for each kind of work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.distributed.timeline import Span

from . import figures
from .figures import Panel, Series


def draw(spans: Sequence[Span], path: Path, label: str = "", title: str = "") -> Path:
    """Draw spans; times are milliseconds from the first one on.

    Args:
        spans: what `Timeline` noted.
        path: .svg or .png.
        label: of the clock, which the axis then names.
        title: above the picture.

    Raises:
        CapabilityError: there is no matplotlib.
        ConfigError: nothing to draw, or a file that cannot be written.
    """
    if not spans:
        raise ConfigError(f"timeline {path}", "there is no span to draw", "note some first")
    zero = min(span.began for span in spans)
    unit = f"ms ({label})" if label else "ms"
    panel = Panel(title=title, x_label=unit, y_label="", series=[*_series(spans, zero)], columns=4)
    return figures.spans([panel], path)


def _series(spans: Sequence[Span], zero: float) -> list[Series]:
    """One a kind of work. Rows stand in the order of first appearance, like those of the trace file."""
    ordered = sorted(spans, key=lambda span: span.began)
    kinds = dict.fromkeys(span.what for span in ordered)
    # All rows once in the first series, with no length: whoever works first stands on top, whatever his work is.
    everybody = [*dict.fromkeys(span.who for span in ordered)]
    made: list[Series] = []
    for kind in kinds:
        own = [span for span in ordered if span.what == kind]
        first = everybody if not made else []
        low = [0.0] * len(first) + [1e3 * (span.began - zero) for span in own]
        high = [0.0] * len(first) + [1e3 * (span.ended - zero) for span in own]
        made.append(Series(label=kind, x=[*first, *(s.who for s in own)], y=high, low=low, high=high))
    return made
