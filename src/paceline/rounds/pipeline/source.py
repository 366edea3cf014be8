"""The source of tokens: draft sessions that owe a level a tick (SpecPipe, section 3.3.1)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from ...drafters.sessions import ROOT, Ask, DraftSessions, GoingSessions, Growing, Grown, Opening
from .flight import Flight, Offer


class Levels(Protocol):
    """Grows trees beside the stages."""

    def begin(self, asks: Sequence[Ask]) -> None:
        """Begin to draft one level; the one before was taken."""
        ...

    def take(self, wait: bool = False) -> Sequence[Grown | None] | None:
        """The level that was begun, one answer for each ask (None: it was called off); None: it is not there yet, and
        is not waited for."""
        ...


class AtOnce:
    """Levels of sessions in this process, drafted when they are begun."""

    def __init__(self, sessions: DraftSessions) -> None:
        self._sessions = sessions
        self._grown: Sequence[Grown] = ()

    def begin(self, asks: Sequence[Ask]) -> None:
        """See `Levels`."""
        self._grown = self._sessions.grow(asks)

    def take(self, wait: bool = False) -> Sequence[Grown | None] | None:
        """See `Levels`."""
        return self._grown


class Going:
    """Levels of sessions that are served elsewhere, and go on beside the stages."""

    def __init__(self, sessions: GoingSessions) -> None:
        self._sessions = sessions
        self._keys: list[int] = []
        self._growing: Growing | None = None

    def begin(self, asks: Sequence[Ask]) -> None:
        """See `Levels`."""
        self._keys = [ask.key for ask in asks]
        self._growing = self._sessions.begin(asks, [[1] * len(ask.expand) for ask in asks])

    def take(self, wait: bool = False) -> Sequence[Grown | None] | None:
        """See `Levels`."""
        growing = self._growing
        if growing is None:
            return None
        if wait:
            self._sessions.wait(growing)
        else:
            self._sessions.look()
        if not growing.done:
            return None
        self._growing = None
        level = growing.levels[0] if growing.levels else {}
        return [level.get(key) for key in self._keys]


def levels_of(sessions: DraftSessions) -> Levels:
    """How sessions grow: at once, or by themselves where they are served elsewhere."""
    return Going(sessions) if isinstance(sessions, GoingSessions) else AtOnce(sessions)


class Source:
    """Sessions and the trees in flight that they fill.

    Args:
        sessions: of the drafter.
        levels: how they grow.
        children: k, candidates below each node.
        tree: children by level of static trees, in their place.
        vocab_size: of the target: nothing else comes out of a drafter that is to be trusted.
    """

    def __init__(
        self, sessions: DraftSessions, levels: Levels, children: int, vocab_size: int, tree: Sequence[int] = ()
    ) -> None:
        self.sessions, self._levels = sessions, levels
        self._children, self._vocab, self._tree = children, vocab_size, tree
        self._asked: list[tuple[int, dict[int, int]]] = []  # by ask: a request, and its source's nodes by the tree's
        self._flights: Mapping[int, Flight] = {}  # that were asked for
        self.open: set[int] = set()  # requests
        self.away = False  # whether all sessions are lost, and may be opened again later

    def begin(self, request: int, opening: Opening) -> None:
        """A request's tree begins at the end of its text."""
        if self.away:
            return
        self.sessions.open(opening)
        self.open.add(request)

    def lost(self, flights: Iterable[Flight]) -> bool:
        """All sessions are gone. False: they never come back."""
        self.open.clear()
        self._asked.clear()
        for flight in flights:
            flight.orphan()
        self.away = isinstance(self.sessions, GoingSessions)
        return self.away

    def ready(self) -> bool:
        """Whether sessions that were lost may be opened again.

        Raises:
            ConfigError: they never come back.
        """
        self.away = isinstance(self.sessions, GoingSessions) and not self.sessions.ready()
        return not self.away

    @property
    def owes(self) -> bool:
        """Whether a level was asked for that is not there."""
        return bool(self._asked)

    def ask(self, flights: Mapping[int, Flight], farthest: Mapping[int, int]) -> None:
        """Ask for the next level of all trees, unless one is owed.

        Args:
            flights: by request.
            farthest: place of the last token that is of use, by request.
        """
        if self._asked:
            return
        asks, self._flights = [], flights
        for request in sorted(self.open):
            flight = flights[request]
            tips = flight.tips(farthest[request])
            if tips:
                flight.ask(tips)
                below = {ROOT if n == flight.root else flight.nodes[n].source: n for n in tips}
                self._asked.append((request, below))
                asks.append(Ask(request, expand=[*below], width=self._below(flight, tips[0])))
        if asks:
            self._levels.begin(asks)

    def _below(self, flight: Flight, tip: int) -> int:
        """Children of a node of the newest level."""
        if not self._tree:
            return self._children
        level = flight.nodes[tip].level
        return self._tree[level] if level < len(self._tree) else 1  # below the last one: the root of the next tree

    def take(self, wait: bool = False) -> dict[int, list[Offer]]:
        """The level that was asked for, by request; empty: nothing was, or it is late.

        Args:
            wait: until it is there.

        Raises:
            ValueError: the drafter answers nonsense.
        """
        grown = self._levels.take(wait) if self._asked else None
        if grown is None:
            return {}
        asked, self._asked = self._asked, []
        if len(grown) != len(asked):
            raise ValueError(f"{len(grown)} answers to {len(asked)} questions")
        found: dict[int, list[Offer]] = {}
        for (request, below), answer in zip(asked, grown, strict=True):
            if answer is None:
                self._flights[request].ask_again(below.values())
            else:
                found[request] = self._offers(below, answer)
        return found

    def _offers(self, below: Mapping[int, int], answer: Grown) -> list[Offer]:
        if any(not 0 <= token < self._vocab for token in answer.tokens):
            raise ValueError("a drafted token lies outside the vocabulary")
        columns = zip(answer.parents, answer.tokens, answer.log_q, answer.nodes, strict=True)
        return [Offer(below[parent], token, log_q, node) for parent, token, log_q, node in columns]

    def go_on(self, request: int, token: int, node: int) -> None:
        """The text goes on with ``token``.

        Args:
            node: the source's number of it; below 0: it has none.
        """
        if node < 0:
            self.sessions.commit(request, [token])
        else:
            self.sessions.reroot(request, node)

    def forget(self) -> None:
        """Drop what the sessions keep of requests that ended; those that are gone have nothing left to forget."""
        if not self.away:
            self.sessions.forget()

    def close(self, request: int) -> None:
        """The request ended."""
        if request in self.open:
            self.open.discard(request)
            self.sessions.close(request)
