"""A stage in a process of its own.

Frames come from the stage before it and go to the next one, as soon as they are computed; what became of the requests
meanwhile comes from the coordinator.

Source: SpecPipe, section 3.3 and algorithm 1.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import zmq

from ..core.inference import inference
from ..model.stages import Frame, Stage
from .handshake import Facts
from .messages import Compute, Verdicts
from .serving import Service
from .wire import Late, Line, connected, listening


class StageService(Service):
    """A stage that a line serves.

    Args:
        stage: of a decoder without embedding and head.
        facts: about its weights.
    """

    def __init__(self, stage: Stage, facts: Facts) -> None:
        self.stage, self.facts = stage, facts
        self._out: Line | None = None
        self._address = ""  # of the next stage
        self._computed: tuple[Frame, float] | None = None  # a frame that is to be sent, and its longest stage

    def listen(self, host: str) -> str:
        """Open the inbox of frames, and return its address."""
        socket, address = listening(zmq.PULL, host)
        self.inbox = Line(socket)
        return address

    def handle(self, message: Any) -> Iterable[Any]:
        """Note verdicts, or begin an epoch."""
        if isinstance(message, Verdicts):
            for request, version, alive in message.survivors:
                self.stage.tell(request, version, frozenset(alive))
            for request in message.closed:
                self.stage.close(request)
            return ()
        self.stage.forget(message.epoch)
        self._computed = None
        if message.out != self._address:
            if self._out is not None:
                self._out.close()
            self._out, self._address = Line(connected(zmq.PUSH, message.out)), message.out
        return (message,)

    @inference
    def work(self) -> Iterable[Any] | None:
        """Compute a frame; or send the last one, pruned by the verdicts that arrived meanwhile."""
        if self._computed is not None:
            assert self._out is not None, "an epoch names the next stage"
            (frame, seconds), self._computed = self._computed, None
            self._out.send(Compute(self.stage.pruned(frame), seconds))
            return ()
        assert self.inbox is not None, "it is open once the service runs"
        try:
            message: Compute = self.inbox.receive(0)
        except Late:
            return None
        if message.frame.epoch != self.stage.epoch:
            return ()
        began = time.monotonic()
        frame = self.stage.run(message.frame)
        self._computed = frame, max(message.seconds, time.monotonic() - began)
        return ()
