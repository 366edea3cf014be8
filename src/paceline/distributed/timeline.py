"""Who did what, and when: spans, written as a file that Perfetto (ui.perfetto.dev) and chrome://tracing open.

The format is Chrome's trace events (complete events, "ph": "X"). `bench.timeline` draws the same spans as a picture.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError
from .clock import Clock


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

    def __init__(self, clock: Clock) -> None:
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
