"""A stage in a process of its own, behind the line to its coordinator.

Its frames come over that line, are answered there and are pruned by the coordinator on their way (`Compute`); or they
go straight from stage to stage (`relay`), and the line says what became of the requests meanwhile (`Verdicts`).

Source: SpecPipe, section 3.3 and algorithm 1.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from ..core.errors import PassesLost
from ..core.inference import inference
from ..network.stages import Stage
from .handshake import Facts
from .messages import KINDS, AskStage, Clear, Compute, Computed, Dropped, StageState, Verdicts, frame_of
from .relay import Relay
from .serving import Service


class StageService(Service):
    """A stage behind a line.

    Args:
        stage: of a decoder without words.
        facts: about its weights.
    """

    kinds = KINDS

    def __init__(self, stage: Stage, facts: Facts) -> None:
        self.stage, self.facts = stage, facts
        self._relay: Relay | None = None

    def handle(self, message: Any) -> Iterable[Any]:
        """Do what a message says."""
        if isinstance(message, Compute):
            return self._computed(message)
        if isinstance(message, Verdicts):
            for request, version, alive in message.told:
                self.stage.tell(request, version, frozenset(alive))
            for request in message.closed:
                self.stage.close(request)
            self.stage.end(message.ended)
        elif isinstance(message, Clear):
            self.stage.forget(message.epoch)
            ranks = self.stage.decoder.ranks
            if ranks is not None and ranks.line is not None:
                ranks.line.back()
            if message.into:
                self._relay = Relay(self.stage, message.into, message.out, self._relay)
        elif isinstance(message, AskStage):
            return [self._looked(message.epoch)]
        return ()

    @inference
    def _computed(self, message: Compute) -> Iterable[Any]:
        began = time.monotonic()
        try:
            frame = self.stage.run(frame_of(message, self.stage.decoder.device))
        except PassesLost as error:
            return [Dropped(message.epoch, str(error))]
        return () if frame.hidden is None else (Computed(frame.epoch, frame.hidden, time.monotonic() - began),)

    def _looked(self, epoch: int) -> StageState:
        """What it is at; raises what its relay failed at."""
        relay = self._relay
        if relay is None:
            return StageState(epoch, 0, 0.0, "")
        if relay.error is not None:
            raise relay.error
        rows = relay.rows
        return StageState(epoch, rows, time.monotonic() - relay.since if rows else 0.0, relay.dropped)
