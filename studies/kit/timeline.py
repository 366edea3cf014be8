"""Who did what, and when: spans, as a picture, and as a file that Perfetto (ui.perfetto.dev) and chrome://tracing open.

The file's format is Chrome's trace events (complete events, "ph": "X"). In the picture everybody has a row, and each
kind of work a colour.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError

from . import figures
from .figures import Panel, Series


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that somebody did."""

    who: str  # a row of the timeline: a worker, a stage, a link
    what: str
    began: float  # seconds by the timeline's clock
    ended: float
    arguments: dict[str, Any] = field(default_factory=dict)  # shown beside it; ready for JSON


class Timeline:
    """Spans in the order in which they ended.

    Args:
        clock: whose time it is; processes of one host share the real one's.
    """

    def __init__(self, clock: Any) -> None:
        self.clock = clock
        self.spans: list[Span] = []

    @contextmanager
    def span(self, who: str, what: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        """Note what is done inside; more arguments may be put into the dict that it gives."""
        began = self.clock.now()
        try:
            yield arguments
        finally:
            self.spans.append(Span(who, what, began, self.clock.now(), arguments))

    def add(self, spans: Iterable[Span]) -> None:
        """Take over what others noted by the same clock."""
        self.spans.extend(spans)

    def write(self, path: Path) -> Path:
        """Write the trace file.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            path.write_text(json.dumps(trace_events(self.spans, self.clock.label)) + "\n", encoding="utf-8")
        except OSError as error:
            wrong = f"cannot be written ({error.strerror})"
            raise ConfigError(f"timeline {path}", wrong, "name a file in a folder you own") from error
        return path


def trace_events(spans: Iterable[Span], label: str = "") -> dict[str, Any]:
    """Spans as Chrome's trace: a row for everybody, in the order of first appearance; times from the first span on.

    Args:
        spans: in any order.
        label: of the clock, which the process's name and every span then carry.
    """
    found = sorted(spans, key=lambda span: span.began)
    zero = found[0].began if found else 0.0
    rows = {who: number for number, who in enumerate(dict.fromkeys(span.who for span in found))}
    named = [_named("process_name", 0, f"paceline ({label})" if label else "paceline")]
    named += [_named("thread_name", row, who) for who, row in rows.items()]
    marked = {"clock": label} if label else {}
    events = [
        {
            "ph": "X",
            "pid": 0,
            "tid": rows[span.who],
            "name": span.what,
            "cat": span.who,
            "ts": (span.began - zero) * 1e6,  # microseconds
            "dur": (span.ended - span.began) * 1e6,
            "args": span.arguments | marked,
        }
        for span in found
    ]
    return {"traceEvents": named + events, "displayTimeUnit": "ms", "otherData": marked}


def _named(kind: str, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 0, "tid": row, "name": kind, "args": {"name": name}}


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
