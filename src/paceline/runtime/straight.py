"""Frames that go straight from stage to stage, as their coordinator sees them.

    coordinator: tokens embedded -> stage 0 -> stage 1 -> .. -> coordinator: last stage, head, verdicts
         |______________ verdicts ____^___________^

A frame goes on as soon as a stage has computed it. In which tick the last stage has it is settled when it enters: as
many ticks later as there are stages before the last one, as if all worked in step. So trees, verdicts and tokens are
those of stages in step, and only the time differs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from threading import Thread

import torch

from ..model.stages import Frame
from .channels import ChannelClosed, Line
from .frames import Codec
from .messages import Compute, frame_of, message_of
from .ways import OPEN_S, giving, taking

RECENT = 16  # frames whose time from stage to stage is looked at
FIRST_S = 0.05  # in its place, where none has come yet
LOOKS = 8  # for a late level, in a tick


@dataclass(frozen=True, slots=True)
class Sent:
    """A frame that is under way."""

    frame: Frame
    at: float  # when it was sent
    rows: int  # the most of a frame that was under way then: it may have to wait for that one


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
        self._took: deque[float] = deque(maxlen=RECENT)  # from stage to stage
        self._began = 0.0  # the tick

    def tick(self, entering: Frame | None) -> Sent | None:
        """A tick begins: what enters now, or nothing; returns what the last stage has in it."""
        self._began = self._now()
        self._sent.append(None if entering is None else Sent(entering, self._began, max(entering.rows, self.rows)))
        return self._sent.popleft()

    @property
    def rows(self) -> int:
        """The most of a frame that is under way."""
        return max((sent.rows for sent in self._sent if sent is not None), default=1)

    def came(self, sent: Sent) -> None:
        """The last stage has it."""
        self._took.append((self._now() - sent.at) / self._hops)

    def rest_s(self) -> float:
        """Seconds until a late level is to be looked for again, if a tick lasts as long as frames take from stage to
        stage; 0: it is over, or none is under way."""
        if not any(self._sent):
            return 0.0
        hop = median(self._took) if self._took else FIRST_S
        return max(0.0, min(hop / LOOKS, self._began + hop - self._now()))


class FrameWays:
    """The coordinator's ends of the ways that frames go, which a thread opens; the one where they come in is there from
    the start.

    Args:
        out, into: addresses of the way to the first stage, and of the one from the stage before the last.
        count: of stages.
    """

    def __init__(self, out: str, into: str, count: int) -> None:
        self.in_flight = InFlight(count)
        self._ends = giving(out), taking(into)
        self._lines: list[Line] = []  # out and into
        self._failed: ChannelClosed | None = None
        self._left = False

    def open(self, look: Callable[[], None], seconds: float) -> None:
        """Open both, now that the stages know their ways.

        Args:
            look: called every so many seconds; what it raises ends the wait.
            seconds: between two.

        Raises:
            ChannelClosed: one of them does not come.
        """
        thread = Thread(target=self._open, daemon=True, name="paceline-opening")
        thread.start()
        while thread.is_alive():
            thread.join(seconds)
            look()
        if self._failed is not None:
            raise self._failed

    def _open(self) -> None:
        try:
            for end in self._ends:
                self._lines.append(Line(end(OPEN_S), Codec(Compute)))
        except ChannelClosed as error:
            self._failed = error
        if self._left:
            self.close()

    def send(self, frame: Frame, seconds: float) -> None:
        """Send a frame whose tokens are embedded; errors as of `Channel.send`."""
        self._lines[0].send(message_of(frame), seconds)

    def receive(self, sent: Sent, seconds: float, device: torch.device) -> tuple[Frame, float]:
        """What is left of a frame, and the most that it took a stage; errors as of `Channel.receive`."""
        message: Compute = self._lines[1].receive(seconds)
        return replace(frame_of(message, device), ended=sent.frame.ended), message.seconds

    def close(self) -> None:
        """The stages hear of it one after the other."""
        self._left = True
        for line in self._lines:
            line.close()
