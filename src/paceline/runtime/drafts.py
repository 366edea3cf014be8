"""Draft sessions in another process: the messages, their server and their client.

    Opening, Update  of `draft.sessions.DraftSessions`; they have no answer
    Grow             is answered by a `Grew` a level

A growth of several levels continues by itself, a level a pass. Messages come first: its content for a sequence
calls off the levels that are left of it, so that a rollout ends with the verdict (Mirror Speculative Decoding, section
3.1). Every growth ends with a `Grew` that states this.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Literal, NoReturn

from ..core.errors import PacelineError
from ..core.grammar import Grammar, Matcher
from ..draft.local_sessions import LocalGrowing
from ..draft.sessions import DraftSessions, Expand, NewNodes, Opening, Pending
from .handshake import Facts
from .remote import Remote, receive, send
from .serving import Service

LOOK_S = 0.25  # between two looks at a worker that is waited for

MakeMatcher = Callable[[Grammar], Matcher]


@dataclass(frozen=True, slots=True)
class Grow:
    """Grow the trees of several sequences."""

    ticket: int  # of the asker's
    asks: list[Expand]  # the first level


@dataclass(frozen=True, slots=True)
class Grew:
    """One level."""

    ticket: int
    level: dict[int, NewNodes]  # by sequence; those of which nothing is left are not in it
    last: bool
    began: float  # seconds by the server's clock, which processes of one host share
    ended: float


@dataclass(frozen=True, slots=True)
class Update:
    """A call of a method of `DraftSessions` that has no answer."""

    method: Literal["reroot", "commit", "close", "forget"]
    args: tuple[Any, ...]  # the sequence comes first


# -- the server


class DraftService(Service):
    """Draft sessions that a line serves.

    Args:
        sessions: of a drafter that is bound.
        facts: about it.
        clock: the time in seconds, by which levels are timed.
        matcher: compiles a request's grammar; None: drafts follow none.
    """

    def __init__(
        self,
        sessions: DraftSessions,
        facts: Facts,
        clock: Callable[[], float] = time.perf_counter,
        matcher: MakeMatcher | None = None,
    ) -> None:
        self.sessions, self.facts, self._clock = sessions, facts, clock
        self._matcher = matcher
        self._growths: deque[LocalGrowing] = deque()

    def handle(self, message: Any) -> Iterable[Any]:
        """Do what a message states; growths are left for `work`."""
        if isinstance(message, Grow):
            self._growths.append(LocalGrowing.of(message.asks, message.ticket))
        elif isinstance(message, Opening):
            self._call_off(message.key)
            grammar = message.params.grammar
            matcher = None if grammar is None or self._matcher is None else self._matcher(grammar)
            self.sessions.open(replace(message, matcher=matcher))
        else:
            self._call_off(*message.args[:1])
            getattr(self.sessions, message.method)(*message.args)
        return ()

    def _call_off(self, *keys: int) -> None:
        """Draft nothing more for these sequences."""
        for growth in self._growths:
            for key in keys:
                growth.call_off(key)

    def work(self) -> Iterable[Grew] | None:
        """Grow one level of the oldest growth."""
        if not self._growths:
            return None
        growth = self._growths[0]
        growth.advance(self._level, self._clock)
        if growth.done:
            self._growths.popleft()
        return [Grew(growth.ticket, growth.levels[-1], growth.done, *growth.times[-1])]

    def _level(self, asks: Sequence[Expand]) -> list[NewNodes]:
        return self.sessions.grow(asks) if asks else []


# -- the client


class DraftsLost(PacelineError):
    """The drafter's worker is gone, late, or states what it should not: all sessions are lost.

    They may be opened again when `RemoteSessions.ready` returns true.
    """


class RemoteSessions:
    """`DraftSessions` that a worker serves, and that continue by themselves (`AsyncSessions`).

    Nothing waits but `grow` and `wait`: all else is a message that is sent, or what came meanwhile.

    Args:
        worker: it serves a `DraftService`.
        patience_s: how long a level is waited for.
    """

    def __init__(self, worker: Remote, patience_s: float = 5.0) -> None:
        self._worker, self._patience_s = worker, patience_s
        self._tickets = count(1)
        self._growing: dict[int, LocalGrowing] = {}  # the levels that arrived, by ticket

    def ready(self) -> bool:
        """Return whether sessions may be opened and used; look after the worker in passing.

        Raises:
            ConfigError: as of `Worker.poll`.
        """
        return self._worker.poll()

    def open(self, opening: Opening) -> None:
        """Implement `DraftSessions`; this and all that follows raises `DraftsLost`."""
        self._send(replace(opening, matcher=None))  # which the worker makes of the grammar

    def reroot(self, key: int, node: int) -> None:
        """Implement `DraftSessions`; calls off the rest of growths of the sequence."""
        self._send(Update("reroot", (key, node)))

    def commit(self, key: int, tokens: Sequence[int]) -> None:
        """Implement `DraftSessions`; calls off the rest of growths of the sequence."""
        self._send(Update("commit", (key, [*tokens])))

    def close(self, key: int) -> None:
        """Implement `DraftSessions`."""
        self._send(Update("close", (key,)))

    def forget(self) -> None:
        """Implement `DraftSessions`."""
        self._send(Update("forget", ()))

    def grow(self, asks: Sequence[Expand]) -> list[NewNodes]:
        """Implement `DraftSessions`; waits for one level."""
        growing = self.begin(asks)
        self.wait(growing)
        (level,) = growing.levels
        if len(level) < len(asks):
            self._give_up("leaves a sequence out")
        return [level[ask.key] for ask in asks]

    def begin(self, asks: Sequence[Expand]) -> LocalGrowing:
        """Implement `AsyncSessions`."""
        growing = LocalGrowing.of(asks, next(self._tickets))
        self._send(Grow(growing.ticket, [*asks]))
        self._growing[growing.ticket] = growing
        return growing

    def look(self) -> None:
        """Take what came, and look after the worker in passing."""
        if self._growing:
            self._look_after()
        while self._growing and self._take(0):
            pass

    def wait(self, growing: Pending, first: bool = False) -> None:
        """Wait for a growth, or for its first level alone; look after the worker meanwhile, which may hang."""
        waited = 0.0
        while not (growing.done or (first and growing.levels)):
            if self._take(min(LOOK_S, self._patience_s)):
                waited = 0.0
                continue
            waited += LOOK_S
            if waited >= self._patience_s:
                self._give_up(f"answered nothing for {self._patience_s:g} s")
            self._look_after()

    def _look_after(self) -> None:
        if not self._worker.poll():
            self._gone()

    def _send(self, message: Any) -> None:
        send(self._worker, message, self._patience_s)
        if self._worker.line is None:
            self._gone()

    def _take(self, timeout: float) -> bool:
        """Take one message, if it comes in time."""
        message = receive(self._worker, timeout)
        if self._worker.line is None:
            self._gone()
        if message is None:
            return False
        if not isinstance(message, Grew):
            self._give_up(f"sent {type(message).__name__}, which is not an answer")
        if (growing := self._growing.get(message.ticket)) is not None:
            growing.times.append((message.began, message.ended))
            growing.levels.append(message.level)
            if message.last:
                growing.done = True
                del self._growing[growing.ticket]
        return True

    def _give_up(self, why: str) -> NoReturn:
        self._worker.failed(why)
        self._gone()

    def _gone(self) -> NoReturn:
        """All sessions are lost, and what is under way with them."""
        self._growing.clear()
        why = f": {self._worker.faults[-1]}" if self._worker.faults else ""
        raise DraftsLost(f"the drafter's worker is not there{why}")
