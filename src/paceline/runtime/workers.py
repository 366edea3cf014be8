"""Several workers all of which are needed for a pass, such as a target's stages or ranks.

One that is lost is named and started again. Its K/V is gone, so `WorkerRestarted` makes the engine compute that of all
requests again from their tokens. Where the same one is lost again before a pass has come through, they end
(`WorkerFailed`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from ..core.errors import WorkerRestarted
from .messages import Clear
from .remote import LOOK_S, Remote, Timeouts, WorkerFailed, receive, send

SEND_S = 3.0  # for which one may take no message
HANG_S, HANG_ROW_S = 10.0, 1.0  # of a pass, after which a worker is taken to hang, and more for each of its rows
FIRST_PASS_S = 60.0  # at least, while none has come through: weights may be read from the disk
TIMEOUTS = Timeouts(start_s=600.0, stuck_s=3600.0)  # their work is timed by its rows


class Workers:
    """Workers of a kind.

    Args:
        workers: started or about to be. They end with this object's `stop`.
    """

    def __init__(self, workers: Sequence[Remote]) -> None:
        self.workers = workers
        self.faults: list[str] = []  # each names a worker and its process
        self._known = [len(worker.faults) for worker in workers]
        self.in_turn = 1  # workers through which a pass goes one after another
        self._first_pass = True  # since a start, or since one was lost
        self._before: set[int] = set()  # those that were lost since a pass has come through
        self._sending: int | None = None  # to which; also where that was interrupted

    def start(self) -> None:
        """Start all at once, and wait until they are ready; the first that fails ends them all."""
        try:
            for worker in self.workers:
                worker.poll()
            for worker in self.workers:
                worker.start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the workers."""
        end_all(self.workers)

    def wait_ready(self) -> None:
        """Wait until those that were lost are ready again; raises as `look` where one is lost meanwhile."""
        while any(worker.line is None for worker in self.workers):
            time.sleep(LOOK_S / 10)
            self.look()

    def look(self) -> None:
        """Look after all of them.

        Raises:
            WorkerRestarted: one was lost since the last look.
            WorkerFailed: a second time in a row.
            ConfigError: as of `Remote.poll`.
        """
        if self._sending is not None:
            self.workers[self._sending].failed("was sent half a message")
            self._sending = None
        lost = self.newly_lost()
        if not lost:
            return
        for index in lost:
            self._known[index] = len(self.workers[index].faults)
        self._first_pass = True
        self.on_lost()
        self.faults += [self.workers[index].faults[-1] for index in lost]
        again = self._before.intersection(lost)
        if not again:
            self._before.update(lost)
            raise WorkerRestarted("; ".join(self.faults[-len(lost) :]))
        self._before.clear()
        first, second = self.workers[min(again)].faults[-2:]
        raise WorkerFailed(f"{second}; before that: {first}; two failures in a row end the requests")

    def newly_lost(self) -> list[int]:
        """Return those that were lost since the last look."""
        for worker in self.workers:
            worker.poll()
        return [i for i, worker in enumerate(self.workers) if len(worker.faults) > self._known[i]]

    def limit_s(self, rows: int) -> float:
        """Return the seconds for which a pass of so many rows is waited for, through all that it passes."""
        return max(HANG_S * self.in_turn, FIRST_PASS_S * self._first_pass) + HANG_ROW_S * rows

    def came_through(self) -> None:
        """Note that a pass has."""
        self._before.clear()
        self._first_pass = False

    def on_lost(self) -> None:
        """Note that one was lost."""

    def send_to(self, indices: Iterable[int], message: Any) -> None:
        """Send some of them a message; raises as `look` where one is not there."""
        for index in indices:
            self.check_ready(index)
            self.try_send(index, message)
            self.check_ready(index)

    def check_ready(self, index: int) -> None:
        """Raise as `look` where one of them is not there."""
        worker = self.workers[index]
        if worker.line is None:
            self.look()
            raise WorkerRestarted(f"worker {worker.spec.name} is not there")

    def try_send(self, index: int, message: Any) -> None:
        """Send one of them a message, if it is there; where it is gone, the next look finds it."""
        if self._sending is None:  # else one was interrupted: nothing counts until the next look ends its worker
            self._sending = index
            send(self.workers[index], message, SEND_S)
            self._sending = None

    def begin(self, orders: Sequence[Clear], seconds: float) -> None:
        """Have each begin an epoch, and wait until all have; raises as `look`.

        Args:
            orders: one for each.
            seconds: after which one that does not answer is ended.
        """
        for index, order in enumerate(orders):
            self.send_to([index], order)
        began = time.monotonic()
        for index, order in enumerate(orders):
            while receive(self.workers[index], LOOK_S) != order:
                if time.monotonic() - began > seconds:
                    self.workers[index].failed("does not answer any more")
                self.look()
                self.check_ready(index)


def end_all(workers: Sequence[Remote]) -> None:
    """End them."""
    for worker in workers:
        worker.stop()
