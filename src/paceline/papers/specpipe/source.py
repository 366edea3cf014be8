"""The source of tokens: draft sessions that owe a level a tick (SpecPipe, section 3.3.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...draft.sessions import ROOT, Ask, GoingSessions, Growing, Grown, Opening
from .flight import Flight, Offer


class Source:
    """Sessions and the trees in flight that they fill.

    Args:
        sessions: of the drafter.
        children: k, candidates below each node.
        vocab_size: of the target: nothing else comes out of a drafter that is to be trusted.
        tree: children by level of static trees, in place of levels.
    """

    def __init__(self, sessions: GoingSessions, children: int, vocab_size: int, tree: Sequence[int] = ()) -> None:
        self.sessions, self._children, self._vocab, self._tree = sessions, children, vocab_size, tree
        self._asked: dict[int, dict[int, int]] = {}  # by request: of what is owed its source's nodes by the tree's
        self._growing: Growing | None = None
        self._flights: Mapping[int, Flight] = {}  # that were asked for
        self.open: set[int] = set()  # requests

    def begin(self, request: int, opening: Opening) -> None:
        """A request's tree begins at the end of its text."""
        self.sessions.open(opening)
        self.open.add(request)

    def lost(self) -> None:
        """All sessions are gone."""
        self.open.clear()
        self._asked.clear()

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
                self._asked[request] = {ROOT if n == flight.root else flight.nodes[n].source: n for n in tips}
                asks.append(Ask(request, expand=[*self._asked[request]], width=self._below(flight, tips[0])))
        if asks:
            self._growing = self.sessions.begin(asks, [[1] * len(ask.expand) for ask in asks])

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
        growing = self._growing
        if not self._asked or growing is None:
            return {}
        if wait:
            self.sessions.wait(growing)
        else:
            self.sessions.look()
        if not growing.done:
            return {}
        asked, self._asked, self._growing = self._asked, {}, None
        level = growing.levels[0] if growing.levels else {}
        for request in asked.keys() - level.keys():  # called off
            self._flights[request].ask_again(asked[request].values())
        return {request: self._offers(asked[request], answer) for request, answer in level.items()}

    def _offers(self, below: Mapping[int, int], answer: Grown) -> list[Offer]:
        if any(not 0 <= token < self._vocab for token in answer.tokens):
            raise ValueError("a drafted token lies outside the vocabulary")
        columns = zip(answer.parents, answer.tokens, answer.log_q, answer.nodes, answer.sources, strict=True)
        return [Offer(below[parent], token, log_q, node, mark) for parent, token, log_q, node, mark in columns]

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
