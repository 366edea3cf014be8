"""Several workers all of which are needed for a pass, such as a target's stages or ranks, as who uses them sees them.

One that is lost is named and started again. Its K/V is gone, and so `PassesLost` asks the engine to compute that of all
requests anew, from their tokens. Where the same one is lost again before anything has come through, they end
(`WorkerFailed`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..core.errors import PassesLost
from .channels import ChannelClosed, Line
from .frames import Buffer, Codec
from .worker import Patience, Worker, WorkerFailed, received

LOOK_S = 0.05  # between two looks at workers that are waited for
SEND_S = 3.0  # for which one may take nothing of what it is sent
PATIENCE = Patience(start_s=600.0, stuck_s=3600.0)  # their work is timed by who uses them, by its rows


class Workers:
    """Workers of a kind.

    Args:
        workers: started or about to be. They end with this object's `stop`.
        kinds: their messages.
    """

    def __init__(self, workers: Sequence[Worker], kinds: Sequence[type[Any]]) -> None:
        self.workers, self.codec = workers, Codec(*kinds)
        self.faults: list[str] = []  # each names a worker and its process
        self._known = [len(worker.faults) for worker in workers]
        self._before: set[int] = set()  # those that were lost since something has come through
        self._sending: int | None = None  # to which; also where that was interrupted

    def start(self) -> None:
        """Start all at once, and wait until they are ready; the first that cannot be had ends them all."""
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

    def back(self) -> None:
        """Wait until those that were lost are there again; raises as `look` where one is lost meanwhile."""
        while any(worker.line is None for worker in self.workers):
            time.sleep(LOOK_S / 10)
            self.look()

    def look(self) -> None:
        """Look after all of them.

        Raises:
            PassesLost: one was lost since the last look.
            WorkerFailed: a second time in a row.
            ConfigError: as of `Worker.poll`.
        """
        if self._sending is not None:
            self.workers[self._sending].failed("was sent half a frame")
            self._sending = None
        fallen = self.fallen()
        if not fallen:
            return
        for index in fallen:
            self._known[index] = len(self.workers[index].faults)
        self.fell(fallen)
        self.faults += [self.workers[index].faults[-1] for index in fallen]
        again = self._before.intersection(fallen)
        if not again:
            self._before.update(fallen)
            raise PassesLost("; ".join(self.faults[-len(fallen) :]))
        self._before.clear()
        first, second = self.workers[min(again)].faults[-2:]
        raise WorkerFailed(f"{second}; before that: {first}; two failures in a row end the requests")

    def fallen(self) -> list[int]:
        """Those that were lost since the last look."""
        for worker in self.workers:
            worker.poll()
        return [i for i, worker in enumerate(self.workers) if len(worker.faults) > self._known[i]]

    def fell(self, fallen: Sequence[int]) -> None:
        """Called with those that were lost since the last look."""
        raise NotImplementedError

    def line(self, index: int) -> Line:
        """To one of them; raises as `look` where it is not there."""
        worker = self.workers[index]
        if worker.line is None:
            self.look()
            raise PassesLost(f"worker {worker.spec.name} is not there")
        return worker.line

    def send_to(self, indices: Iterable[int], message: Any) -> None:
        """Send some of them a message; raises as `look` where one is not there."""
        parts = self.codec.encode(message)
        for index in indices:
            self.line(index)
            self.give(index, parts)
            self.line(index)

    def give(self, index: int, parts: Sequence[Buffer]) -> None:
        """Send one of them a message, if it is there; where it is gone, the next look says so.

        Args:
            index: which.
            parts: the message as its codec writes it.
        """
        if self._sending is not None:  # one was interrupted: nothing counts until the next look ends its worker
            return
        worker, self._sending = self.workers[index], index
        try:
            if worker.line is not None:
                worker.line.channel.send(parts, SEND_S)
        except ChannelClosed:
            worker.lost()
        self._sending = None

    def receive(self, index: int) -> Any:
        """What one of them says; None: nothing yet, or nothing of use: the next look says so."""
        self.line(index)
        return received(self.workers[index], LOOK_S)

    def answer(self, index: int, fits: Callable[[Any], bool], seconds: float, late: str) -> Any:
        """The first message of one of them that fits; raises as `look`.

        Args:
            index: which.
            fits: whether a message is the answer.
            seconds: for which it is waited for.
            late: what is wrong with one that says nothing for so long.
        """
        began = time.monotonic()
        while True:
            said = self.receive(index)
            if said is not None and fits(said):
                return said
            if time.monotonic() - began > seconds and self.workers[index].line is not None:
                self.workers[index].failed(late)
            self.look()


def end_all(workers: Sequence[Worker]) -> None:
    """End them."""
    for worker in workers:
        worker.stop()
