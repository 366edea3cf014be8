"""The source of tokens: draft sessions that owe a level a tick (SpecPipe, section 3.3.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ...drafters.sessions import ROOT, Ask, DraftSessions, Grown, Opening
from .flight import Flight, Offer


class Levels(Protocol):
    """Grows trees beside the stages."""

    def begin(self, asks: Sequence[Ask]) -> None:
        """Begin to draft one level; the one before was taken."""
        ...

    def take(self, wait: bool = False) -> Sequence[Grown] | None:
        """The level that was begun, one answer for each ask; None: it is not there yet, and is not waited for."""
        ...


class AtOnce:
    """Levels of sessions in this process, drafted when they are begun."""

    def __init__(self, sessions: DraftSessions) -> None:
        self._sessions = sessions
        self._grown: Sequence[Grown] = ()

    def begin(self, asks: Sequence[Ask]) -> None:
        """See `Levels`."""
        self._grown = self._sessions.grow(asks)

    def take(self, wait: bool = False) -> Sequence[Grown] | None:
        """See `Levels`."""
        return self._grown


class Source:
    """Sessions and the trees in flight that they fill.

    Args:
        sessions: of the drafter.
        levels: how they grow.
        children: k, candidates below each node.
        tree: children by level in their place, below each root; deeper levels have one.
        vocab_size: of the target: nothing else comes out of a drafter that is to be trusted.
    """

    def __init__(
        self, sessions: DraftSessions, levels: Levels, children: int, vocab_size: int, tree: Sequence[int] = ()
    ) -> None:
        self.sessions, self._levels = sessions, levels
        self._children, self._vocab, self._tree = children, vocab_size, tree
        self._asked: list[tuple[int, dict[int, int]]] = []  # by ask: a request, and its source's nodes by the tree's
        self.open: set[int] = set()  # requests

    def begin(self, request: int, opening: Opening) -> None:
        """A request's tree begins at the end of its text."""
        self.sessions.open(opening)
        self.open.add(request)

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
        asks = []
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
        depth = flight.nodes[tip].place - flight.nodes[flight.root].place
        return self._tree[depth] if depth < len(self._tree) else 1

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
        return {request: self._offers(below, answer) for (request, below), answer in zip(asked, grown, strict=True)}

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

    def close(self, request: int) -> None:
        """The request ended."""
        if request in self.open:
            self.open.discard(request)
            self.sessions.close(request)
