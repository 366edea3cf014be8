"""Time: what waits by it, and work that is given one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from ..core.errors import PacelineError


class Late(PacelineError, TimeoutError):
    """Nothing came in time."""


class Clock(Protocol):
    """Seconds, from an arbitrary zero."""

    def now(self) -> float:
        """Return the seconds."""
        ...

    def sleep_until(self, when: float) -> None:
        """Wait for a time; one that has gone by is no wait."""
        ...


class RealClock:
    """The system's monotonic clock, which all processes of a host share."""

    def now(self) -> float:
        """Return the seconds."""
        return time.perf_counter()

    def sleep_until(self, when: float) -> None:
        """Wait for a time."""
        while (left := when - time.perf_counter()) > 0:
            time.sleep(left)


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
