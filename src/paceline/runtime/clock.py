"""Time, real or virtual."""

from __future__ import annotations

import time
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
        """Wait for a time; one that has gone by is not waited for."""
        ...


class RealClock:
    """The system's monotonic clock, which all processes of a host share."""

    def now(self) -> float:
        """Return the seconds."""
        return time.perf_counter()

    def sleep_until(self, when: float) -> None:
        """Wait for a time."""
        while (rest_s := when - time.perf_counter()) > 0:
            time.sleep(rest_s)
