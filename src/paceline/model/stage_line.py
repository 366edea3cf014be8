"""The line of stages that frames go through, a tick at a time."""

from __future__ import annotations

from typing import Protocol

from .stages import Frame


class StageLine(Protocol):
    """Stages that work in step: in a tick each computes the frame that it holds and hands it on."""

    count: int  # of stages: a frame is through after so many ticks
    layers: int  # of all stages

    def tick(self, entering: Frame | None) -> Frame | None:
        """Return one tick of all stages.

        Args:
            entering: what the first stage computes; None: it stands still.

        Returns:
            What the last stage computed.
        """

    def rest(self) -> bool:
        """Wait for a moment after a tick, so that a late level may enter with the next one.

        Returns:
            False: it has been waited for long enough.
        """

    def tell(self, request: int, version: int, alive: frozenset[int]) -> None:
        """Send a verdict to all stages; see `Stage.tell`."""

    def close(self, request: int) -> None:
        """End a request; see `Stage.close`."""

    def clear(self) -> int:
        """Drop all frames and begin a new epoch, which is returned."""
