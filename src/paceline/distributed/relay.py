"""A stage that hands its frames straight on to the next one: a thread between two ways."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from threading import Thread

from ..core.errors import PassesLost
from ..core.inference import inference
from ..network.stages import Stage
from .channels import Channel, ChannelClosed, Line
from .frames import Codec
from .messages import Compute, frame_of, message_of
from .ways import OPEN_S, giving, taking


class Relay:
    """Frames from the stage before, through a stage, to the next one, until one of the two ways is closed.

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
            opened += [end(OPEN_S) for end in self._ends]
            self._run(*(Line(channel, Codec(Compute)) for channel in opened))
        except ChannelClosed:
            pass
        except PassesLost as error:
            self.dropped = str(error)
        except Exception as error:
            self.error = error
        finally:
            self.rows = 0
            for channel in opened:
                with suppress(ChannelClosed):
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
