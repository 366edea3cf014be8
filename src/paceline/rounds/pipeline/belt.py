"""The belt on which frames go from stage to stage, a tick at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...target.stages import Frame, Stage


class Belt(Protocol):
    """Stages that work in step: in a tick each computes the frame that it holds and hands it on."""

    count: int  # of stages: a frame is through after so many ticks
    layers: int  # of all stages

    def tick(self, entering: Frame | None) -> Frame | None:
        """One tick of all stages.

        Args:
            entering: what the first stage computes; None: it stands still.

        Returns:
            What the last stage computed.
        """
        ...

    def tell(self, request: int, version: int, alive: frozenset[int]) -> None:
        """A verdict, to all stages; see `Stage.tell`."""
        ...

    def close(self, request: int) -> None:
        """A request ended; see `Stage.close`."""
        ...

    def clear(self) -> int:
        """Drop all frames and begin a new epoch, which is returned."""
        ...


class StagesInTurn:
    """Stages of this process, one after the other."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages, self.count = stages, len(stages)
        self.layers = stages[-1].stop
        self._held: list[Frame | None] = [None] * self.count

    def tick(self, entering: Frame | None) -> Frame | None:
        """See `Belt`."""
        self._held[0] = entering
        done = self.compute(self._held)
        self._held = [None, *done[:-1]]
        return done[-1]

    def compute(self, held: Sequence[Frame | None]) -> list[Frame | None]:
        """What each stage makes of what it holds."""
        pairs = zip(self.stages, held, strict=True)
        return [None if frame is None else stage.run(frame) for stage, frame in pairs]

    def tell(self, request: int, version: int, alive: frozenset[int]) -> None:
        """See `Belt`."""
        for stage in self.stages:
            stage.tell(request, version, alive)

    def close(self, request: int) -> None:
        """See `Belt`."""
        for stage in self.stages:
            stage.close(request)

    def clear(self) -> int:
        """See `Belt`."""
        self._held = [None] * self.count
        epoch = self.stages[0].epoch + 1
        for stage in self.stages:
            stage.forget(epoch)
        return epoch
