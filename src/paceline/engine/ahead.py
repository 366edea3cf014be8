"""Parts of rounds whose drafters draft ahead of the target's decisions: options, refusals, and faults."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from ..core.errors import ConfigError, WorkerRestarted
from ..core.options import option
from ..draft.base import DrafterSpec
from ..draft.local_sessions import LocalSessions
from ..draft.sessions import AsyncSessions
from .base import RoundConfig, RoundParts, WorkerPlace

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AheadConfig(RoundConfig):
    """Options of a round that drafts by sessions, in the target's process or next to it in one of their own.

    A subclass names in ``chooser`` its option that may be "process".
    """

    automatic: ClassVar[bool] = False
    weighs: ClassVar[bool] = False
    chooser: ClassVar[str]

    cores: tuple[int, ...] = option(
        (), help="CPU cores of the drafter's process, such as <1>; the target keeps to the others"
    )
    threads: int | None = option(None, help="threads of the drafter's process; none: one a core", minimum=1)
    device: str = option(
        "",
        help="device of the drafter's process, such as cuda:1; none: the GPU after the target's where that has "
        "device=cuda, else the target's own",
    )

    def validate(self) -> None:
        """Options of a process need one."""
        for name in ("cores", "threads", "device"):
            self.require(name, self._apart or not getattr(self, name), f"is for {self.chooser}=process")

    @property
    def _apart(self) -> bool:
        return bool(getattr(self, self.chooser) == "process")

    @property
    def place(self) -> WorkerPlace | None:
        """Implement `RoundConfig`."""
        return WorkerPlace(self.cores, self.threads, device=self.device) if self._apart else None

    def misfit(self, spec: DrafterSpec, in_pass: str, remedy: str) -> tuple[str, str] | None:
        """Why a drafter cannot draft ahead, and what to do; None: it can.

        Args:
            in_pass: why drafts of the target's own pass are of no use.
        """
        who = spec.name
        if spec.in_pass:
            return f"{who} drafts in the target's own pass, {in_pass}", remedy
        if spec.taps and self._apart:
            wrong = f"{who} drafts from the target's states, which stay in the target's process"
            return wrong, f"leave out {self.chooser}=process"
        if spec.proposes == "sampled":
            return f"{who} draws its drafts for rejection, and this round is strict", "leave out proposes=sampled"
        if not spec.ahead:
            return f"{who} cannot draft below tokens that are not decided on (it has no draft sessions)", remedy
        return None

    def sessions(self, parts: RoundParts, rows: int, beside: bool = False) -> AsyncSessions:
        """Return sessions with room for so many drafted nodes of a sequence.

        Here (in a thread, if ``beside``) or in a process.
        """
        assert parts.drafter is not None
        if self.place is None or parts.serve is None:
            return LocalSessions(parts.drafter.sessions(rows), beside)
        return parts.serve(rows, self.place)


class SessionGuard:
    """Describe what becomes of sessions that fail: it costs no request. Those of another process may come back.

    Args:
        drafter: its name.
        sessions: of it.
        drop: called when all sessions are gone.
    """

    def __init__(self, drafter: str, sessions: AsyncSessions, drop: Callable[[], None]) -> None:
        self.failure: str | None = None  # why drafting has ended
        self._drafter, self._sessions, self._drop = drafter, sessions, drop
        self._comes_back = not isinstance(sessions, LocalSessions)
        self._away = self._comes_back

    def __enter__(self) -> None:
        """Catch what the drafter raises: decoding continues without it, until it comes back where it can."""

    def __exit__(self, kind: type | None, error: BaseException | None, *_: object) -> bool:
        if isinstance(error, WorkerRestarted):  # of the target's ranks: the engine computes all again
            return False
        if isinstance(error, Exception):
            why = f"drafter {self._drafter!r} failed: {type(error).__name__}: {error}"
            self._away = self._comes_back and not isinstance(error, ConfigError)
            if not self._away:
                self.failure = why
            log.error("%s; decoding continues without it", why, exc_info=error)
            self._drop()
        return isinstance(error, Exception)

    @property
    def there(self) -> bool:
        """Return whether sessions can be used."""
        return self.failure is None and not self._away

    def look(self) -> bool:
        """Return the same, after a look at those that were lost."""
        if self.failure is None and self._away:
            self._away = not self._sessions.ready()
        return self.there

    def forget(self) -> None:
        """Let the sessions forget sequences that ended; those that are gone have nothing left to forget."""
        if self.there:
            with self:
                self._sessions.forget()
