"""The source of tokens: draft sessions that owe a level a tick (SpecPipe, section 3.3.1)."""

from __future__ import annotations

from collections.abc import Mapping

from ...draft.sessions import ROOT, AsyncSessions, Expand, Opening, Pending
from .flight import InFlightTree, Offer


class Source:
    """Sessions and the trees in flight that they fill.

    Args:
        sessions: of the drafter.
        children: k, candidates below each node.
        vocab_size: of the target: nothing else comes out of a drafter that is to be trusted.
    """

    def __init__(self, sessions: AsyncSessions, children: int, vocab_size: int) -> None:
        self.sessions, self._children, self._vocab = sessions, children, vocab_size
        self._asked: dict[int, dict[int, int]] = {}  # by sequence: of what is owed its source's nodes by the tree's
        self._growing: Pending | None = None
        self._flights: Mapping[int, tuple[InFlightTree, int]] = {}  # that were requested
        self.open: set[int] = set()  # keys of sequences

    def begin(self, opening: Opening) -> None:
        """Begin a request's tree at the end of its text."""
        self.sessions.open(opening)
        self.open.add(opening.key)

    def lost(self) -> None:
        """All sessions are gone."""
        self.open.clear()
        self._asked.clear()

    @property
    def owes(self) -> bool:
        """Return whether a requested level is missing."""
        return bool(self._asked)

    def ask(self, flights: Mapping[int, tuple[InFlightTree, int]]) -> None:
        """Request the next level of all trees, unless one is owed.

        Args:
            flights: by key of their sequence, with the place of the last token that is of use.
        """
        if self._asked:
            return
        asks, self._flights = [], flights
        for key in sorted(self.open):
            flight, farthest = flights[key]
            tips = flight.tips(farthest)
            if tips:
                flight.ask(tips)
                self._asked[key] = {ROOT if n == flight.root else flight.nodes[n].source: n for n in tips}
                asks.append(Expand(key, expand=[*self._asked[key]], width=self._children))
        if asks:
            self._growing = self.sessions.begin(asks)

    def take(self) -> dict[int, list[Offer]]:
        """Return the level that was requested, by sequence; empty: nothing was, or it is late.

        Raises:
            ValueError: the drafter answers nonsense.
        """
        growing = self._growing
        if not self._asked or growing is None:
            return {}
        self.sessions.look()
        if not growing.done:
            return {}
        requested, self._asked, self._growing = self._asked, {}, None
        level, offers = growing.levels[0] if growing.levels else {}, dict[int, list[Offer]]()
        for key, below in requested.items():
            if (new := level.get(key)) is None:  # called off
                self._flights[key][0].ask_again(below.values())
                continue
            if any(not 0 <= token < self._vocab for token in new.tokens):
                raise ValueError("a drafted token lies outside the vocabulary")
            columns = zip(new.parents, new.tokens, new.log_q, new.nodes, new.sources, strict=True)
            offers[key] = [
                Offer(below[parent], token, log_q, node, mark) for parent, token, log_q, node, mark in columns
            ]
        return offers

    def go_on(self, key: int, token: int, node: int) -> None:
        """Append ``token`` to the text.

        Args:
            node: the source's number of it; below 0: it has none.
        """
        if node < 0:
            self.sessions.commit(key, [token])
        else:
            self.sessions.reroot(key, node)

    def close(self, key: int) -> None:
        """Close the session of a request that ended."""
        self._asked.pop(key, None)
        if key in self.open:
            self.open.discard(key)
            self.sessions.close(key)
