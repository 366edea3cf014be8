"""What trees of other widths would have cost, replayed from the drafts of the one that runs (section 3.3.3).

A token's rank in a wide level says little of a narrow tree: there it would have had fewer rivals, since some are pruned
by now and others hang below nodes that a narrow tree never had. So each width gets a tree of its own, which enters
levels, waits and is cut by the tokens that are said, tick for tick as the pipeline does it. Only the drafts are taken
from the tree that runs: of a node that this one did not ask about no children are known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .flight import NONE, Flight, Offer

Drafts = Mapping[int, Sequence[Offer]]  # below nodes of the tree that runs, by their numbers there


class _Tree:
    """The tree of one width, with its root in the first stage."""

    def __init__(self, running: Flight, width: int, stages: int) -> None:
        root = running.nodes[running.root]
        self.flight = Flight(root.token, root.place)
        self._width, self._stages = width, stages
        self._tick = 0
        self._tips = self.flight.enter(1)

    def said(self, token: int, running: Flight, drafts: Drafts, farthest: int) -> int:
        """Ticks since the verdict before this one."""
        began, root = self._tick, self.flight.nodes[self.flight.root]
        while root.row == NONE or self._tick < root.tick + self._stages - 1:
            self._next_tick(running, drafts, farthest)
        self.flight.say(token)
        return self._tick - began

    def _next_tick(self, running: Flight, drafts: Drafts, farthest: int) -> None:
        """The level that was asked for is appended, what waits enters, and the next level is asked for."""
        waiting = sum(number != self.flight.root for number in self.flight.waiting)
        room = max(0, self._width - waiting)
        offers, all_known = self._offers(running, drafts)
        self.flight.append(offers, room if all_known else min(room, len(offers)))
        self._tick += 1
        text = self.flight.nodes[self.flight.root].row == NONE
        self.flight.enter(1 if text else self._width, tick=self._tick)
        self._tips = self.flight.tips(farthest)

    def _offers(self, running: Flight, drafts: Drafts) -> tuple[list[Offer], bool]:
        """Children of the newest level, and whether those of all its nodes are known: late siblings must not take the
        room of the others."""
        found, all_known = [], True
        for number in self._tips:
            node = self.flight.nodes.get(number)
            if node is not None:
                node.source = self._twin(number, running)
                if node.source in drafts:
                    self.flight.ask([number])
                    found += [Offer(number, offer.token, offer.log_q) for offer in drafts[node.source]]
                else:
                    all_known = False
        return found, all_known

    def _twin(self, number: int, running: Flight) -> int:
        """The same node's number in the tree that runs; `NONE`: it is not there."""
        node = self.flight.nodes[number]
        if node.parent == NONE:
            return running.root
        return running.number(self.flight.nodes[node.parent].source, node.token)


class Replay:
    """One request's trees of several widths.

    Args:
        running: the tree that runs, at least as wide as all of these.
        widths: w of each tree.
        stages: m.
        farthest: place of the last token that is of use.
        blind: tokens of which nothing is told, since their drafts are older than this object.
    """

    def __init__(self, running: Flight, widths: Iterable[int], stages: int, farthest: int, blind: int = 0) -> None:
        self._running, self._farthest, self._left = running, farthest, blind
        self._drafts: dict[int, list[Offer]] = {}
        self._trees = {width: _Tree(running, width, stages) for width in widths}

    def drafted(self, offers: Iterable[Offer]) -> None:
        """Children of nodes of the tree that runs, whether or not it has room for them."""
        for offer in offers:
            self._drafts.setdefault(offer.parent, []).append(offer)

    def said(self, token: int) -> dict[int, int]:
        """A token, before the tree that runs hears of it: the ticks that each width took for it; empty: not known.

        As many ticks as there are stages: the token was not in flight.
        """
        self._drafts = {parent: found for parent, found in self._drafts.items() if parent in self._running.nodes}
        trees = self._trees.items()
        ticks = {width: tree.said(token, self._running, self._drafts, self._farthest) for width, tree in trees}
        self._left -= 1
        return ticks if self._left < 0 else {}
