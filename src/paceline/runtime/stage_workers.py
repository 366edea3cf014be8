"""Stages in processes, for their coordinator: a stage line whose last stage is its own.

    coordinator: tokens embedded -> stage 0 -> stage 1 -> .. -> coordinator: last stage, head, verdicts
         |______________ verdicts ____^___________^

A frame goes to the next stage as soon as it is computed, and verdicts to all stages at once. In which tick the last
stage has a frame is settled when it enters: as many ticks later as there are stages before the last one, as if all
worked in step. So trees, verdicts and tokens are those of stages in step, and only the time differs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import zmq

from ..model.stages import Frame, Stage
from .messages import Clear, Compute, Verdicts
from .remote import LOOK_S, Remote, receive
from .wire import Late, Line, connected, listening
from .workers import TIMEOUTS, Workers

RECENT = 16  # frames whose time in a stage counts
FIRST_S = 0.05  # in its place, before the first one
LOOKS = 8  # for a late level, in a tick


@dataclass(frozen=True, slots=True)
class Sent:
    """A frame in flight."""

    frame: Frame
    rows: int  # the most of a frame that was in flight then: it may have to wait for that one


class InFlight:
    """Frames between the first stage and the last one, and which of them the last one has next.

    Args:
        count: of stages.
        now: the time in seconds.
    """

    def __init__(self, count: int, now: Callable[[], float] = time.monotonic) -> None:
        self._hops = count - 1
        self._now = now
        self._sent: deque[Sent | None] = deque([None] * self._hops)
        self._took: deque[float] = deque(maxlen=RECENT)  # a frame in its slowest stage
        self._began = 0.0  # the tick

    def tick(self, entering: Frame | None) -> Sent | None:
        """Begin a tick with what enters now, or nothing; return what the last stage has in it."""
        self._began = self._now()
        rows = max((sent.rows for sent in self._sent if sent is not None), default=1)
        self._sent.append(None if entering is None else Sent(entering, max(entering.rows, rows)))
        return self._sent.popleft()

    def came(self, seconds: float) -> None:
        """Note that the last stage has a frame, and how long the slowest of the others worked on it."""
        self._took.append(seconds)

    def rest_s(self) -> float:
        """Return the seconds until a late level is looked for again; 0: it has been waited for long enough.

        Of two stages a token takes two ticks without drafts and one with them, so a level is worth one more tick.
        """
        tick = median(self._took) if self._took else FIRST_S
        return max(0.0, min(tick / LOOKS, self._began + 2 * tick - self._now()))


class StageWorkers(Workers):
    """A `model.stage_line.StageLine` of workers, each with a stage, and of a last stage in this process.

    Args:
        workers: of the stages but the last one, in order.
        last: the last stage; its decoder embeds tokens, too.
        layers: of all stages.
        host: as of `wire.listening`.
    """

    def __init__(self, workers: Sequence[Remote], last: Stage, layers: int, host: str = "") -> None:
        super().__init__(workers)
        self.in_turn = len(workers)
        self.last, self.layers, self.count = last, layers, len(workers) + 1
        socket, self._address = listening(zmq.PULL, host)
        self._inbox = Line(socket)
        self._first = ""  # address of the first stage's frames ..
        self._out: Line | None = None  # .. and the line to it
        self._in_flight = InFlight(self.count)
        self._clear = True  # whether the stages are to be sent the epoch

    def tick(self, entering: Frame | None) -> Frame | None:
        """Implement `StageLine`.

        Raises:
            WorkerRestarted: a stage was lost; frames in flight and the stages' K/V are void.
            WorkerFailed: a second one in a row.
            ConfigError: one that came back is not what it was.
        """
        self._ready()
        if entering is not None and not (entering.rows or entering.moves or entering.ended):
            entering = None
        due = self._in_flight.tick(entering)
        if entering is not None and self._out is not None:
            self._out.send(Compute(self._embedded(entering)))
        if due is None:
            return None
        out = self.last.run(self._arrived(due) if self.workers else due.frame)
        if out.rows:
            self.came_through()
        return out

    def rest(self) -> bool:
        """Implement `StageLine`."""
        rest_s = self._in_flight.rest_s()
        time.sleep(rest_s)
        return rest_s > 0

    def _embedded(self, frame: Frame) -> Frame:
        if not frame.rows:
            return frame
        decoder = self.last.decoder
        tokens = torch.tensor([token for part in frame.parts for token in part.tokens], device=decoder.device)
        return replace(frame, hidden=decoder.embed_tokens(tokens))

    def _arrived(self, due: Sent) -> Frame:
        """Wait for the rest of a frame after the stages before the last one."""
        began = time.monotonic()
        while True:
            try:
                message: Compute = self._inbox.receive(LOOK_S)
                if message.frame.epoch == self.last.epoch:
                    break
            except Late:  # the stages are looked at, and the frame is waited for again
                self.look()
            waited = time.monotonic() - began
            if waited > self.limit_s(due.rows):
                # The one that has been at its work, or silent, for longest.
                worker = max(self.workers, key=lambda one: max(one.busy_s, one.silent_s))
                worker.failed(f"hangs: at {due.rows} rows for {waited:.1f} s")
                self.look()
        self._in_flight.came(message.seconds)
        return message.frame

    def look(self) -> None:
        """Implement `Workers`; between epochs a stage sends nothing but why it failed."""
        for worker in self.workers if not self._clear else ():
            receive(worker, 0)
        super().look()

    def tell(self, request: int, version: int, alive: frozenset[int]) -> None:
        """Implement `StageLine`."""
        self.last.tell(request, version, alive)
        self._send_all(Verdicts(survivors=[(request, version, sorted(alive))]))

    def close(self, request: int) -> None:
        """Implement `StageLine`."""
        self.last.close(request)
        self._send_all(Verdicts(closed=[request]))

    def _send_all(self, message: Any) -> None:
        if not self._clear:
            for index in range(len(self.workers)):
                self.try_send(index, message)

    def clear(self) -> int:
        """Implement `StageLine`; the stages learn of it before the next tick."""
        self.last.forget(self.last.epoch + 1)
        self._in_flight = InFlight(self.count)
        self._clear = True
        return self.last.epoch

    def stop(self) -> None:
        """End the workers."""
        super().stop()
        self._inbox.close()
        if self._out is not None:
            self._out.close()

    def _ready(self) -> None:
        """Wait until all stages are there, and have them begin the epoch where another one began."""
        self.look()
        if not self._clear:
            return
        self.wait_ready()
        inboxes = [worker.hello.inbox for worker in self.workers if worker.hello is not None] + [self._address]
        if self.workers and inboxes[0] != self._first:
            if self._out is not None:
                self._out.close()
            self._out, self._first = Line(connected(zmq.PUSH, inboxes[0])), inboxes[0]
        self.begin([Clear(self.last.epoch, out) for out in inboxes[1:]], TIMEOUTS.stuck_s)
        self._clear = False
