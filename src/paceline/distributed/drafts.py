"""Draft sessions in another process: the messages, who serves them, and who asks.

    open, commit, reroot, close, forget    as of `drafters.sessions.DraftSessions`; they have no answer
    grow                                   is answered by a `Grew` a level

A growth of several levels goes on by itself, a level a pass. Messages come first: what one of them says of a sequence
calls off the levels that are left of it, so that a rollout ends with the verdict (Mirror Speculative Decoding, section
3.1). Every growth ends with a `Grew` that says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Annotated, Any, Protocol

from pydantic import Field

from ..core.errors import PacelineError
from ..core.sampling import SamplingParams
from ..drafters.local_sessions import LocalGrowing
from ..drafters.sessions import Ask, DraftSessions, Grown, Opening
from ..drafters.sessions import Growing as AnyGrowing
from .channels import ChannelClosed, Line
from .clock import Clock, Late, Pace, RealClock
from .frames import FrameError
from .handshake import Facts, Fault
from .serving import Service

LOOK_S = 0.25  # between two looks at a worker that is waited for

Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class Open:
    """A sequence, as an `Opening` says it."""

    key: int
    tokens: list[int]
    prompt_len: int
    params: dict[str, Any]  # of `SamplingParams`
    seed: int
    sample_index: int
    max_len: int | None

    @staticmethod
    def of(opening: Opening) -> Open:
        """The message."""
        o = opening
        return Open(o.key, [*o.tokens], o.prompt_len, asdict(o.params), o.seed, o.sample_index, o.max_len)

    def opening(self) -> Opening:
        """What it says.

        Raises:
            ConfigError: parameters that no request has.
        """
        rules = SamplingParams.from_json(self.params)
        return Opening(self.key, self.tokens, self.prompt_len, rules, self.seed, self.sample_index, self.max_len)


@dataclass(frozen=True, slots=True)
class Wanted:
    """One sequence's part of a growth: an `Ask`, and how far it goes on."""

    key: int
    given: list[tuple[int, int]]
    expand: list[int]
    width: Annotated[int, Field(ge=1)]
    levels: list[
        Count
    ]  # of each given node, then of each of ``expand``: tokens below it; behind the first one in a row


@dataclass(frozen=True, slots=True)
class Grow:
    """Grow the trees of several sequences."""

    ticket: int  # of the asker's
    wanted: list[Wanted]


@dataclass(frozen=True, slots=True)
class Part:
    """What one sequence's tree has grown by, see `Grown`."""

    key: int
    given: list[Count]
    parents: list[Count]
    nodes: list[Count]
    tokens: list[Count]
    log_q: list[float]


@dataclass(frozen=True, slots=True)
class Grew:
    """One level; sequences of which nothing is left are not in it."""

    ticket: int
    parts: list[Part]
    last: bool
    began: float  # seconds by the server's clock, which processes of one host share
    ended: float


@dataclass(frozen=True, slots=True)
class Reroot:
    """The text goes on to a node."""

    key: int
    node: Count


@dataclass(frozen=True, slots=True)
class Commit:
    """The text goes on with other tokens."""

    key: int
    tokens: list[Count]


@dataclass(frozen=True, slots=True)
class Close:
    """The sequence has ended."""

    key: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Nothing that was kept of sequences that are closed is to be found any more."""


KINDS = Open, Grow, Grew, Reroot, Commit, Close, Forget


# -- who serves


class DraftService(Service):
    """Draft sessions behind a line.

    Args:
        sessions: of a drafter that is bound.
        facts: about it.
        clock: by which levels are timed.
        level_s: the time that a level is given, by the nodes that it expands; None: as long as it takes.
    """

    kinds = KINDS

    def __init__(
        self,
        sessions: DraftSessions,
        facts: Facts,
        clock: Clock | None = None,
        level_s: Callable[[int], float] | None = None,
    ) -> None:
        self.sessions, self.facts, self._clock = sessions, facts, clock or RealClock()
        self._pace = Pace(self._clock, level_s)
        self._growths: deque[LocalGrowing] = deque()

    def handle(self, message: Any) -> Iterable[Any]:
        """Do what a message says; growths are left for `work`."""
        if isinstance(message, Grow):
            asks = [Ask(w.key, w.given, w.expand, w.width) for w in message.wanted]
            self._growths.append(LocalGrowing.of(asks, [w.levels for w in message.wanted], message.ticket))
            return ()
        if isinstance(message, Forget):
            self.sessions.forget()
            return ()
        for growth in self._growths:
            growth.call_off(message.key)
        if isinstance(message, Open):
            self.sessions.open(message.opening())
        elif isinstance(message, Reroot):
            self.sessions.reroot(message.key, message.node)
        elif isinstance(message, Commit):
            self.sessions.commit(message.key, message.tokens)
        else:
            self.sessions.close(message.key)
        return ()

    def work(self) -> Iterable[Grew] | None:
        """One level of the oldest growth."""
        if not self._growths:
            return None
        growth = self._growths[0]
        growth.advance(self._level, self._clock.now)
        if growth.done:
            self._growths.popleft()
        grown = growth.levels[-1].items()
        parts = [Part(key, one.given, one.parents, one.nodes, one.tokens, one.log_q) for key, one in grown]
        return [Grew(growth.ticket, parts, growth.done, *growth.times[-1])]

    def _level(self, asks: Sequence[Ask]) -> list[Grown]:
        if not asks:
            return []
        with self._pace.work(sum(len(ask.given) + len(ask.expand) for ask in asks)):
            return self.sessions.grow(asks)


# -- who asks


class DraftsLost(PacelineError):
    """The drafter's worker is gone, late, or says what it should not: all sessions are lost.

    They may be opened anew when `RemoteSessions.ready` says so.
    """


class Served(Protocol):
    """A worker, or what stands for one."""

    line: Line | None
    faults: list[str]

    def poll(self) -> bool:
        """See `Worker.poll`."""
        ...

    def failed(self, why: str) -> None:
        """See `Worker.failed`."""
        ...

    def lost(self) -> None:
        """See `Worker.lost`."""
        ...


@dataclass(slots=True)
class Growing:
    """A growth, as far as it is known."""

    ticket: int
    given: dict[int, int]  # by sequence: nodes that were given
    most: int = 1  # levels
    levels: list[dict[int, Grown]] = field(default_factory=list)  # by level: what came, by sequence
    times: list[tuple[float, float]] = field(
        default_factory=list
    )  # by level: when it was drafted, by the server's clock
    done: bool = False


class RemoteSessions:
    """`DraftSessions` that a worker serves, and that go on by themselves (`GoingSessions`).

    Nothing waits but `grow` and `wait`: all else is a message that is sent, or what came meanwhile.

    Args:
        worker: that serves a `DraftService`.
        patience_s: how long a level is waited for.
    """

    def __init__(self, worker: Served, patience_s: float = 5.0) -> None:
        self._worker, self._patience_s = worker, patience_s
        self._tickets = count(1)
        self._growing: dict[int, Growing] = {}

    def ready(self) -> bool:
        """Whether sessions may be opened and used; looks after the worker in passing.

        Raises:
            ConfigError: as of `Worker.poll`.
        """
        return self._worker.poll()

    def open(self, opening: Opening) -> None:
        """See `DraftSessions`; this and all that follows raises `DraftsLost`."""
        self._send(Open.of(opening))

    def reroot(self, key: int, node: int) -> None:
        """See `DraftSessions`; calls off what is left of growths of the sequence."""
        self._send(Reroot(key, node))

    def commit(self, key: int, tokens: Sequence[int]) -> None:
        """See `DraftSessions`; calls off what is left of growths of the sequence."""
        self._send(Commit(key, [*tokens]))

    def close(self, key: int) -> None:
        """See `DraftSessions`."""
        self._send(Close(key))

    def forget(self) -> None:
        """See `DraftSessions`."""
        self._send(Forget())

    def grow(self, asks: Sequence[Ask]) -> list[Grown]:
        """See `DraftSessions`; waits for one level."""
        growing = self.begin(asks)
        self.wait(growing)
        (level,) = growing.levels
        if len(level) < len(asks):
            self._give_up("leaves a sequence out")
        return [level[ask.key] for ask in asks]

    def begin(self, asks: Sequence[Ask], levels: Sequence[Sequence[int]] | None = None) -> Growing:
        """Begin to grow, and wait for nothing.

        Args:
            asks: the first level, each of another sequence and with a node or more.
            levels: of each ask, for every given and every expanded node, tokens wanted below it; None: one each.
        """
        each = levels or [[1] * (len(ask.given) + len(ask.expand)) for ask in asks]
        wanted = [
            Wanted(ask.key, [*ask.given], [*ask.expand], ask.width, [*own]) for ask, own in zip(asks, each, strict=True)
        ]
        growing = Growing(next(self._tickets), {ask.key: len(ask.given) for ask in asks}, max(map(max, each)))
        self._send(Grow(growing.ticket, wanted))
        self._growing[growing.ticket] = growing
        return growing

    def look(self) -> None:
        """Take what came, and look after the worker in passing."""
        if self._growing:
            self._look_after()
        while self._growing and self._take(0):
            pass

    def wait(self, growing: AnyGrowing) -> None:
        """Until a growth is done, a level at a time; looks after the worker meanwhile, which may be known to hang."""
        waited = 0.0
        while not growing.done:
            if self._take(min(LOOK_S, self._patience_s)):
                waited = 0.0
                continue
            waited += LOOK_S
            if waited >= self._patience_s:
                self._give_up(f"answered nothing for {self._patience_s:g} s")
            self._look_after()

    def _look_after(self) -> None:
        if not self._worker.poll():
            self._growing.clear()
            self._line()  # says why

    def drop(self, growing: Growing) -> None:
        """What is still to come of a growth is of no interest."""
        self._growing.pop(growing.ticket, None)

    def _send(self, message: Any) -> None:
        line = self._line()
        try:
            line.send(message, self._patience_s)
        except ChannelClosed:
            self._lost()

    def _take(self, timeout: float) -> bool:
        """One message, if it comes in time."""
        line = self._line()
        try:
            message = line.receive(timeout)
        except Late:
            return False
        except ChannelClosed:
            self._lost()
        except FrameError as error:
            self._give_up(f"says what is no message: {error}")
        if isinstance(message, Fault):
            self._give_up(f"failed: {message.why}")
        if not isinstance(message, Grew):
            self._give_up(f"says {type(message).__name__}, which is no answer")
        growing = self._growing.get(message.ticket)
        if growing is not None:
            self._note(growing, message)
        return True

    def _note(self, growing: Growing, message: Grew) -> None:
        parts, first = message.parts, not growing.levels
        once = len({part.key for part in parts}) == len(parts) and (parts or message.last)
        if (
            len(growing.levels) >= growing.most
            or not once
            or not all(_fits(part, growing.given, first) for part in parts)
        ):
            self._give_up("gives an answer of another form than its question")
        growing.times.append((message.began, message.ended))
        growing.levels.append({p.key: Grown(p.given, p.parents, p.nodes, p.tokens, p.log_q) for p in parts})
        if message.last:
            growing.done = True
            self.drop(growing)

    def _line(self) -> Line:
        if self._worker.line is None:
            raise DraftsLost(f"the drafter's worker is not there{self._why}")
        return self._worker.line

    @property
    def _why(self) -> str:
        return f": {self._worker.faults[-1]}" if self._worker.faults else ""

    def _lost(self) -> Any:
        self._growing.clear()
        self._worker.lost()
        raise DraftsLost(f"the drafter's worker is gone{self._why}")

    def _give_up(self, why: str) -> Any:
        self._growing.clear()
        self._worker.failed(why)
        raise DraftsLost(f"the drafter's worker {why}")


def _fits(part: Part, given: Mapping[int, int], first: bool) -> bool:
    """Whether it is an answer for one of the sequences that were asked for, on the first level or a later one."""
    lists = part.parents, part.nodes, part.tokens, part.log_q
    even = len({len(one) for one in lists}) == 1
    return even and part.key in given and len(part.given) == (given[part.key] if first else 0)
