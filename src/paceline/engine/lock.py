"""A fair lock: waiting threads get it in their order of arrival."""

from __future__ import annotations

import threading
from collections import deque


class ReentryError(RuntimeError):
    """A thread requested a lock that it holds."""


class FairLock:
    """A lock for threads that take it again and again: no waiting thread is passed over.

    `threading.Lock` lets a thread that releases it take it again before another wakes up, so that a loop of steps would
    keep all others from it. Here a release hands the lock to the thread that has waited longest.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._owner: int | None = None  # thread
        self._waiting: deque[tuple[threading.Lock, int]] = deque()  # released when its turn has come; the thread

    def __enter__(self) -> None:
        """Wait for the lock.

        Raises:
            RuntimeError: this thread holds it: it would wait for itself.
        """
        me = threading.get_ident()
        if self._owner == me:  # nobody else makes it so while this thread does not wait
            raise ReentryError("called from within a step of the same engine: call it once the step has returned")
        turn = threading.Lock()
        turn.acquire()
        try:  # an interrupt may come after any call
            with self._guard:
                if self._owner is None:
                    self._owner = me
                    return
                self._waiting.append((turn, me))
            turn.acquire()
            with self._guard:
                self._waiting.remove((turn, me))
        except BaseException:
            self._leave(turn, me)
            raise

    def __exit__(self, *_: object) -> None:
        try:
            with self._guard:
                self._pass_on()
        except BaseException:  # an interrupt
            self.free_mine()
            raise

    @property
    def contended(self) -> bool:
        """Return whether a thread waits for it."""
        return bool(self._waiting)

    def take_if_free(self) -> bool:
        """Take the lock if that needs no waiting, not even for this object's internal state."""
        if not self._guard.acquire(blocking=False):
            return False
        try:
            free = self._owner is None
            if free:
                self._owner = threading.get_ident()
            return free
        finally:
            self._guard.release()

    def free_mine(self) -> None:
        """Release the lock if this thread holds it: for a thread that was interrupted while taking it."""
        with self._guard:
            if self._owner == threading.get_ident():
                self._pass_on()

    def _leave(self, turn: threading.Lock, me: int) -> None:
        """Stop waiting; pass the lock on where it has come meanwhile."""
        with self._guard:
            if (turn, me) in self._waiting:
                self._waiting.remove((turn, me))
            if self._owner == me:
                self._pass_on()

    def _pass_on(self) -> None:
        """Name the next owner, which takes itself out of the queue: an interrupt in here loses no waiting thread."""
        if not self._waiting:
            self._owner = None
            return
        turn, self._owner = self._waiting[0]
        turn.release()
