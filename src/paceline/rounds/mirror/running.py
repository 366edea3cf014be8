"""Where a rollout runs: between the target's layers, or beside them in a thread of its own."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from .rollout import Rollout


class Runner(Protocol):
    """Runs one rollout at a time. Nobody else may use the drafter's sessions between `start` and `finish`."""

    def start(self, rollout: Rollout) -> None:
        """Have it drafted, now or from now on. Raises what the drafter raises, or `finish` does."""
        ...

    def finish(self) -> None:
        """Wait until it has ended."""
        ...


def run_to_end(rollout: Rollout) -> None:
    """Draft all of its levels."""
    while rollout.advance():
        pass


class Between:
    """At once, in the caller's thread."""

    def start(self, rollout: Rollout) -> None:
        """See `Runner`."""
        run_to_end(rollout)

    def finish(self) -> None:
        """See `Runner`."""


class Beside:
    """In a thread of its own. Compiled passes hold no lock of Python's, so that both make way at the same time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="paceline-mirror")
        self._under_way: Future[None] | None = None

    def start(self, rollout: Rollout) -> None:
        """See `Runner`."""
        self._under_way = self._thread.submit(run_to_end, rollout)

    def finish(self) -> None:
        """See `Runner`."""
        while self._under_way is not None:
            under_way = self._under_way
            try:
                under_way.result()
            finally:
                if under_way.done():  # else the wait was interrupted, and the thread goes on
                    self._under_way = None
