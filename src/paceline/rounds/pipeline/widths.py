"""w while requests run: from what trees of each width would have cost, and from what ticks took (section 3.3.3).

A token's rank in a wide level says little of a narrow tree: there it would have had fewer rivals, since some are pruned
by now and others hang below nodes that a narrow tree never had. So each width gets a tree of its own, which enters
levels, waits and is cut by the tokens that are said, tick for tick as the pipeline does it. Only the drafts are taken
from the tree that runs: of a node that this one did not ask about no children are known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from .flight import NONE, Flight, Offer

SURVEY = 64  # tokens that are replayed ..
REST = 256  # .. before so many with the width that was chosen
KNOWN = 2 * SURVEY  # tokens that a choice is made from
FORGET = 0.98  # of what is known of ticks, with each that comes: some fifty of them count
LEAST_TICKS = 8.0

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


class TickTime:
    """t(w) as a straight line through what ticks took, the newest ones most: one that leaps is followed late."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # of 1, rows, seconds, rows squared, rows times seconds

    def saw(self, rows: int, seconds: float) -> None:
        """A tick whose largest frame had so many rows."""
        values = 1.0, rows, seconds, rows * rows, rows * seconds
        self._sums = [FORGET * total + value for total, value in zip(self._sums, values, strict=True)]

    @property
    def known(self) -> bool:
        """Whether ticks were seen, some of them with other rows than the others."""
        return self._sums[0] > LEAST_TICKS and self._spread > 1e-3 * self._sums[3]

    @property
    def _spread(self) -> float:
        count, rows, _, squares, _ = self._sums
        return squares - rows**2 / max(count, 1.0)

    def __call__(self, rows: float) -> float:
        """Seconds; more rows never take less."""
        count, known, seconds, _, products = self._sums
        slope, mean = (products - known * seconds / count) / self._spread, seconds / count
        return mean + slope * (rows - known / count) if slope > 0 else mean


class Widths:
    """Chooses the width with the least expected time between tokens, among 1, 2, 4, .. and the largest.

    In a survey the largest width runs, so that the drafts of all others are known, and `Replay` counts the ticks that
    each would have taken. Then the best one runs for a while. Where all ticks had as many rows nobody knows what rows
    take: another width runs, so that the next survey does.

    Args:
        most: the largest, with which it begins.
        stages: m.
    """

    def __init__(self, most: int, stages: int) -> None:
        self.width, self.time, self.surveying = most, TickTime(), True
        self._stages = stages
        self._widths = [*(2**n for n in range(most.bit_length()) if 2**n < most), most]
        self._ticks: deque[Mapping[int, int]] = deque(maxlen=KNOWN)
        self._left = SURVEY

    def replay(self, flight: Flight, farthest: int, fresh: bool = False) -> Replay:
        """Of a request whose tree may be older than the survey, or is ``fresh``.

        What was drafted before, by a narrower tree, has left the stages after m tokens, and what was chosen from it
        after m more.
        """
        return Replay(flight, self._widths, self._stages, farthest, 0 if fresh else 2 * self._stages)

    def said(self, ticks: Mapping[int, int]) -> None:
        """A token, with the ticks that trees of each width would have taken; empty: not known."""
        if self.surveying and not ticks:
            return
        if self.surveying:
            self._ticks.append(ticks)
        self._left -= 1
        if not self._left:
            self.surveying = not self.surveying
            self._left = SURVEY if self.surveying else REST
            self.width = self._widths[-1] if self.surveying else self._next()

    def _next(self) -> int:
        """The width between two surveys."""
        if not self.time.known:
            return self._widths[max(0, len(self._widths) - 2)]
        return min(self._widths, key=lambda width: (self.time(width) * (1 + self.bubbles(width)), width))

    def bubbles(self, width: int) -> float:
        """Ticks without a token for each one with a token, as the surveys found them."""
        return sum(ticks[width] for ticks in self._ticks) / len(self._ticks) - 1
