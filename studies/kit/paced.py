"""Work that takes a given time, as on another device or on a slower one: of stages, and of drafters in processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from paceline.draft.sessions import DraftSessions, Expand, NewNodes
from paceline.runtime import draft_worker
from paceline.runtime.drafts import DraftService
from paceline.runtime.handshake import Facts
from paceline.runtime.remote import WorkerSpec

from .clock import Clock, RealClock


class Pace:
    """The time that a stage's work takes, where it is given one: another device's, or a slower one's.

    Args:
        clock: that is waited by.
        seconds: of work on so many rows; None: as long as it takes (in virtual time: none).
    """

    def __init__(self, clock: Clock, seconds: Callable[[int], float] | None = None) -> None:
        self._clock, self._seconds = clock, seconds

    @contextmanager
    def work(self, rows: int = 1) -> Iterator[None]:
        """Let what is inside end when its time has passed, and not before."""
        began = self._clock.now()
        yield
        if self._seconds is not None:
            self._clock.sleep_until(began + self._seconds(rows))


class PacedDrafts(DraftService):
    """Draft sessions whose levels take a given time.

    Args:
        sessions, facts, more: as of `DraftService`.
        clock: real or virtual.
        seconds: of a level, by the nodes that it expands.
    """

    def __init__(
        self,
        sessions: DraftSessions,
        facts: Facts,
        clock: Clock | None = None,
        *,
        seconds: Callable[[int], float],
        **more: Any,
    ) -> None:
        clock = clock or RealClock()
        super().__init__(sessions, facts, clock.now, **more)
        self._pace = Pace(clock, seconds)

    def _level(self, asks: Sequence[Expand]) -> list[NewNodes]:
        if not asks:
            return []
        with self._pace.work(sum(len(ask.added) + len(ask.expand) for ask in asks)):
            return super()._level(asks)


def service(device: str, level_ms: float, **options: Any) -> DraftService:
    """What a drafter's worker makes where its levels take ``level_ms``."""
    made = draft_worker.service(device, **options)
    return PacedDrafts(made.sessions, made.facts, matcher=made._matcher, seconds=lambda nodes: level_ms / 1e3)


@contextmanager
def paced_drafters(level_ms: float | None) -> Iterator[None]:
    """Let levels of drafters whose processes are started inside take ``level_ms``; None: as long as they do."""

    def spec(*given: Any) -> WorkerSpec:
        made = describe(*given)
        options: Mapping[str, Any] = {**made.options, "level_ms": level_ms}
        return replace(made, service=f"{__name__}:service", options=options)

    describe = draft_worker.draft_worker
    if level_ms is None:
        yield
        return
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # the workers import this module
    with patch.object(draft_worker, "draft_worker", spec):
        yield
