"""Virtual time: the same code runs as in real time, and the clock is computed.

Tokens, trees, messages and pruning are real. Activities are threads, of which one alone runs at any time, until it
sleeps or waits for a message. Then the one goes on whose time comes first, of equals the one that was due first. So a
schedule depends on the times that stages and links are given and on nothing else, and is the same in every run.

Everything measured by a virtual clock carries its `label`.
"""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any, Protocol

from paceline.core.errors import ConfigError, PacelineError
from paceline.runtime.wire import Late

VIRTUAL = "virtual clock"  # stands beside every figure that one gave


class Clock(Protocol):
    """Seconds, from an arbitrary zero."""

    def now(self) -> float:
        """The seconds."""
        ...

    def sleep_until(self, when: float) -> None:
        """Wait for a time; one that has gone by is not waited for."""
        ...


class RealClock:
    """The system's monotonic clock, which all processes of a host share."""

    def now(self) -> float:
        """The seconds."""
        return time.perf_counter()

    def sleep_until(self, when: float) -> None:
        """Wait for a time."""
        while (rest_s := when - time.perf_counter()) > 0:
            time.sleep(rest_s)


class Stuck(PacelineError):
    """In virtual time everybody waits for somebody else, or an activity failed."""


class Mailbox(Protocol):
    """Where one activity leaves things for another, in order."""

    def put(self, item: Any) -> None:
        """Leave something; never waits."""
        ...

    def get(self, timeout: float | None = None) -> Any:
        """The oldest item.

        Args:
            timeout: seconds to wait for one; 0: only what is there; None: for ever.

        Raises:
            Late: none came in time.
        """
        ...


class _Stopped(BaseException):
    """Ends an activity's thread when its clock is closed."""


class _Activity:
    """One thread of virtual time."""

    __slots__ = ("baton", "name", "thread", "wakes")

    def __init__(self, name: str) -> None:
        self.name = name
        self.baton = threading.Semaphore(0)
        self.wakes = 0  # how often it went on: a time that it was to be woken at counts for one wait alone
        self.thread: threading.Thread | None = None


class VirtualClock:
    """A clock that is computed, beginning with 0. The thread that makes it is the first activity.

    Use it in a ``with`` statement, or `close` it: its activities' threads end then.
    """

    label = VIRTUAL

    def __init__(self) -> None:
        self._now = 0.0
        self._due: list[tuple[float, int, _Activity, int]] = []  # a heap: when, place among equals, who, its wait
        self._place = count()
        self._main = self._running = _Activity("main")
        self._main.thread = threading.current_thread()
        self._begun: list[_Activity] = []
        self._fault: Stuck | None = None
        self._closed = False

    def __enter__(self) -> VirtualClock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def now(self) -> float:
        """Seconds since it was made."""
        return self._now

    def sleep_until(self, when: float) -> None:
        """Let time pass; the others run meanwhile.

        Raises:
            ConfigError: a time that is no number, or never comes.
        """
        if not math.isfinite(when):
            raise ConfigError(f"to sleep until {when}", "that is no time", "give a finite number of seconds")
        if when > self._now:
            self._wake(self._own(), when)
            self._switch()

    def start(self, name: str, run: Callable[[], None]) -> None:
        """Run something beside the caller, from now on, when the caller waits next."""
        self._own()
        made = _Activity(name)
        made.thread = threading.Thread(target=self._live, args=(made, run), name=name, daemon=True)
        self._begun.append(made)
        self._wake(made, self._now)
        made.thread.start()

    def mailbox(self) -> Mailbox:
        """Items are there at the very time at which they were put."""
        return _VirtualMailbox(self)

    def close(self) -> None:
        """End the activities where they wait."""
        self._closed = True
        for activity in self._begun:
            activity.baton.release()
        for activity in self._begun:
            if activity.thread is not None:
                activity.thread.join()
        self._begun.clear()

    def _own(self) -> _Activity:
        """The activity that asks.

        Raises:
            RuntimeError: a thread that is none of this clock's, or not the one whose turn it is.
        """
        running = self._running
        if running.thread is not threading.current_thread():
            raise RuntimeError(f"virtual time is {running.name}'s now: start other threads by `start`")
        return running

    def _wake(self, activity: _Activity, when: float) -> None:
        heapq.heappush(self._due, (when, next(self._place), activity, activity.wakes))

    def _live(self, activity: _Activity, run: Callable[[], None]) -> None:
        """An activity's thread."""
        activity.baton.acquire()
        try:
            if self._closed:
                return
            activity.wakes += 1
            run()
        except _Stopped:
            return
        except Exception as error:
            self._fault = Stuck(f"{activity.name} failed: {error}")
            self._fault.__cause__ = error
        activity.wakes += 1  # whatever it was still to be woken for
        if not self._closed:
            self._pass_on(self._next())

    def _next(self) -> _Activity:
        """Whose turn it is; time goes on to it."""
        while self._due and self._fault is None:
            when, _, activity, wait = heapq.heappop(self._due)
            if wait == activity.wakes:
                self._now = max(self._now, when)
                return activity
        self._fault = self._fault or Stuck("everybody waits, and nothing is under way")
        return self._main

    def _pass_on(self, activity: _Activity) -> None:
        self._running = activity
        activity.baton.release()

    def _switch(self) -> None:
        """Wait for the caller's turn."""
        own, chosen = self._running, self._next()
        if chosen is not own:
            self._pass_on(chosen)
            own.baton.acquire()
        own.wakes += 1
        if self._closed and own is not self._main:
            raise _Stopped
        if self._fault is not None and own is self._main:
            raise self._fault


class _VirtualMailbox:
    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._items: deque[Any] = deque()
        self._waits: _Activity | None = None

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waits is not None:
            self._clock._wake(self._waits, self._clock._now)

    def get(self, timeout: float | None = None) -> Any:
        clock = self._clock
        if not self._items and timeout != 0:
            self._waits = own = clock._own()
            if timeout is not None:
                clock._wake(own, clock._now + timeout)
            clock._switch()
            self._waits = None
        if not self._items:
            raise Late("nothing came in time")
        return self._items.popleft()
