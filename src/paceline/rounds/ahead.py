"""What rounds share whose drafters draft ahead of the target's decisions: options, and which drafters can do that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..core.options import option
from ..drafters.base import Drafter, DrafterSpec
from ..drafters.sessions import DraftSessions
from .base import Place, RoundConfig, Serve


@dataclass(frozen=True, kw_only=True)
class AheadConfig(RoundConfig):
    """Options of a round that drafts by sessions, in the target's process or beside it in one of their own.

    A subclass names in ``chooser`` its option that may be "process".
    """

    automatic: ClassVar[bool] = False
    weighs: ClassVar[bool] = False
    chooser: ClassVar[str]
    apart_only: ClassVar[tuple[str, ...]] = ("cores", "threads", "device")  # options of a drafter's process

    cores: tuple[int, ...] = option(
        (), help="CPU cores of the drafter's process, such as <1>; the target keeps to the others"
    )
    threads: int | None = option(None, help="threads of the drafter's process; none: one a core", minimum=1)
    device: str = option(
        "",
        help="device of the drafter's process, such as cuda:1; none: the GPU behind the target's where that has "
        "device=cuda, else the target's own",
    )

    def validate(self) -> None:
        """Options of a process need one."""
        for name in self.apart_only:
            self.require(name, self._apart or not getattr(self, name), f"is for {self.chooser}=process")

    @property
    def _apart(self) -> bool:
        return bool(getattr(self, self.chooser) == "process")

    @property
    def place(self) -> Place | None:
        """See `RoundConfig`."""
        return Place(self.cores, self.threads, device=self.device) if self._apart else None

    def misfit(self, spec: DrafterSpec, streams: str, taps: str, remedy: str) -> tuple[str, str] | None:
        """Why a drafter cannot draft ahead, and what to do; None: it can.

        Args:
            streams, taps: why drafts of the target's own pass, and of its states, are of no use.
        """
        who = spec.name
        if spec.streams is not None:
            return f"{who} drafts with streams in the target's own pass, {streams}", remedy
        if spec.taps:
            return f"{who} drafts from the target's states, {taps}", remedy
        if spec.proposes == "sampled":
            return f"{who} draws its drafts for rejection, and this round is strict", "leave out proposes=sampled"
        if not spec.ahead:
            return f"{who} cannot draft below tokens that are not decided on (it has no draft sessions)", remedy
        return None

    @staticmethod
    def sessions(drafter: Drafter, rows: int, place: Place | None, serve: Serve | None) -> DraftSessions:
        """Sessions with room for so many drafted nodes of a sequence, here or in a process."""
        return drafter.sessions(rows) if place is None or serve is None else serve(rows=rows, place=place)
