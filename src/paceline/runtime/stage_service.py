"""A stage in a process of its own, behind the line to its coordinator.

Its frames come over that line, are answered there and are pruned by the coordinator on their way (`Compute`); or they
go straight from stage to stage (`Relay`), and the line says what became of the requests meanwhile (`Verdicts`).

Source: SpecPipe, section 3.3 and algorithm 1.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from threading import Thread
from typing import Any

from ..core.errors import PassesLost
from ..core.inference import inference
from ..model.stages import Stage
from .channels import Channel, ChannelClosed, Line
from .frames import Codec
from .handshake import Facts
from .messages import KINDS, AskStage, Clear, Compute, Computed, StageState, Verdicts, frame_of, message_of
from .serving import Service
from .ways import OPEN_S, giving, taking


class Relay:
    """A thread: frames from the stage before, through a stage, to the next one, until one of the two ways is closed.

    Args:
        stage: what computes.
        into, out: addresses of the ways (`ways`).
        before: the relay of an earlier epoch, whose last frame may still be computed.
    """

    def __init__(self, stage: Stage, into: str, out: str, before: Relay | None) -> None:
        self.stage = stage
        self.rows, self.since = 0, 0.0  # of the frame that is computed, and since when; 0: none is
        self.error: BaseException | None = None  # what ended it, unless a way was closed
        self.dropped = ""  # why the stage lost its K/V, and comes back by itself
        self._ends = taking(into), giving(out)
        self._thread = Thread(target=self._live, args=(before,), daemon=True, name="paceline-relay")
        self._thread.start()

    def _live(self, before: Relay | None) -> None:
        if before is not None:
            before._thread.join()
        opened: list[Channel] = []
        try:
            # Whoever gives is here first: of a chain of groups each is joined once the one before it is.
            for end in self._ends:
                opened.append(end(OPEN_S))  # the first one is closed where the second one does not come
            self._run(*(Line(channel, Codec(Compute)) for channel in opened))
        except ChannelClosed:  # a neighbour has left its way; the coordinator asks each stage for its reason
            pass
        except PassesLost as error:
            self.dropped = str(error)
        except Exception as error:
            self.error = error
        finally:
            self.rows = 0
            for channel in opened:
                channel.close()

    @inference
    def _run(self, into: Line, out: Line) -> None:
        device = self.stage.decoder.device
        while True:
            message: Compute = into.receive()
            began = time.monotonic()
            self.since, self.rows = began, max(1, sum(len(part.nodes) for part in message.parts))
            frame = self.stage.pruned(self.stage.run(frame_of(message, device)))  # by what was said meanwhile
            took = max(message.seconds, time.monotonic() - began)
            out.send(replace(message_of(frame), seconds=took))
            self.rows = 0


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
            return [StageState(message.epoch, 0, 0.0, str(error))]
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
