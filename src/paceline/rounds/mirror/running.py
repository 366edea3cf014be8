"""Where a rollout runs: between the target's layers, beside them in a thread, or elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import Protocol

from ...drafters.sessions import GoingSessions, Growing
from .rollout import Branch, Outcome, Rollout, go_on


class Runner(Protocol):
    """Runs rollouts, one at a time. Nobody else may use the drafter's sessions between `start` and `finish`.

    Either one raises what the drafter raises.
    """

    def run(self, rollout: Rollout) -> None:
        """Have it drafted now."""
        ...

    def start(self, rollout: Rollout) -> None:
        """Have it drafted, now or from now on."""
        ...

    def finish(
        self, rollout: Rollout, said: Mapping[Outcome, Sequence[int]], ended: Sequence[int]
    ) -> dict[Outcome, Branch]:
        """The verdict, see `go_on`: waits for what is reused, and for nothing else."""
        ...


def run_to_end(rollout: Rollout) -> None:
    """Draft all of its levels."""
    while rollout.advance():
        pass


def _rest(rollout: Rollout, reused: dict[Outcome, Branch]) -> dict[Outcome, Branch]:
    """Draft what is missing of the branches that are reused."""
    rollout.narrow(reused)
    rollout.lengthen(reused.values())
    if rollout.open:
        run_to_end(rollout)
    return reused


class Between:
    """At once, in the caller's thread."""

    def run(self, rollout: Rollout) -> None:
        """See `Runner`."""
        run_to_end(rollout)

    def start(self, rollout: Rollout) -> None:
        """See `Runner`."""
        run_to_end(rollout)

    def finish(
        self, rollout: Rollout, said: Mapping[Outcome, Sequence[int]], ended: Sequence[int]
    ) -> dict[Outcome, Branch]:
        """See `Runner`."""
        return _rest(rollout, go_on(rollout, said, ended))


class Beside:
    """In a thread of its own. Compiled passes hold no lock of Python's, so that both make way at the same time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="paceline-mirror")
        self._under_way: Future[None] | None = None

    def run(self, rollout: Rollout) -> None:
        """See `Runner`."""
        run_to_end(rollout)

    def start(self, rollout: Rollout) -> None:
        """See `Runner`."""
        self._under_way = self._thread.submit(run_to_end, rollout)

    def finish(
        self, rollout: Rollout, said: Mapping[Outcome, Sequence[int]], ended: Sequence[int]
    ) -> dict[Outcome, Branch]:
        """See `Runner`."""
        rollout.narrow(said)
        self._wait()
        return _rest(rollout, go_on(rollout, said, ended))

    def _wait(self) -> None:
        while self._under_way is not None:
            under_way = self._under_way
            try:
                under_way.result()
            finally:
                if under_way.done():  # else the wait was interrupted, and the thread goes on
                    self._under_way = None


class Remote:
    """In another process, or on another device, by sessions that go on by themselves (`GoingSessions`).

    The verdict calls off what is left of a growth there, once the nodes are known that it is about; what is then
    missing of the branches that are reused is asked for once more.

    Args:
        spin_s: how long the first level is looked for without sleep; after that whoever waits for the growth does.
    """

    def __init__(self, spin_s: float = 0.05) -> None:
        self._spin_s = spin_s
        self._growing: Growing | None = None
        self._taken = 0  # levels of it
        self._began = 0.0

    def run(self, rollout: Rollout) -> None:
        """See `Runner`."""
        self.start(rollout)
        self._end(rollout)

    def start(self, rollout: Rollout) -> None:
        """See `Runner`."""
        asks, levels = rollout.asks()
        self._growing, self._taken, self._began = None, 0, perf_counter()
        if asks:
            self._growing = _going(rollout).begin(asks, levels)

    def finish(
        self, rollout: Rollout, said: Mapping[Outcome, Sequence[int]], ended: Sequence[int]
    ) -> dict[Outcome, Branch]:
        """See `Runner`."""
        self._look(rollout, said)
        reused = go_on(rollout, said, ended)
        self._end(rollout)
        rollout.narrow(reused)
        rollout.lengthen(reused.values())
        self.run(rollout)
        return reused

    def _look(self, rollout: Rollout, said: Mapping[Outcome, Sequence[int]]) -> None:
        """Take what came, and at least the nodes of what was said."""
        until = perf_counter() + self._spin_s
        _going(rollout).look()
        self._take(rollout)
        while rollout.owes(said) and perf_counter() < until:
            _going(rollout).look()
            self._take(rollout)
        if rollout.owes(said):
            self._end(rollout)

    def _end(self, rollout: Rollout) -> None:
        """Wait until nothing more comes."""
        if self._growing is not None:
            _going(rollout).wait(self._growing)
            self._take(rollout)
            times = self._growing.times  # of what was drafted, also where nobody looked before the verdict
            rollout.ms += ((times[-1][1] if times else perf_counter()) - self._began) * 1e3
            self._growing = None

    def _take(self, rollout: Rollout) -> None:
        """The levels that came since the last look."""
        if self._growing is not None:
            for level in self._growing.levels[self._taken :]:
                rollout.take(level)
            self._taken = len(self._growing.levels)


def _going(rollout: Rollout) -> GoingSessions:
    assert isinstance(rollout.sessions, GoingSessions), "these sessions are served in the process"
    return rollout.sessions
