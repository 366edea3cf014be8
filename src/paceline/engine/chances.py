"""Honest chances: what a drafter says of its nodes, corrected by how often such nodes were right.

A node's score is its drafter's own estimate of the chance that the path to it is accepted. Nodes are told apart by who
proposed them, by their depth and by their estimate given their parent; of each such class is counted how often a node
whose parent was right was right itself. One set of counts belongs to a kind of request (an application); a sequence
shifts from it by a factor on the odds that follows its own text.

Nothing has to be checked by the target in order to be counted: a proposal is compared with the text that followed.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass
from math import exp

# Odds at which classes part; those of look-ups are half of the matched tokens (see `ngram.trust`).
EDGES = (1 / 16, 1 / 8, 1 / 4, 0.45, 0.75, 1.25, 1.75, 2.4, 3.4, 5, 7, 10, 20, 50, 150, 500)
CLASSES = len(EDGES) + 1
DEPTHS = 5  # 1, 2, 3-4, 5-8, deeper
UNKNOWN = 1.0  # odds of a node of which its drafter says nothing

PRIOR = 4.0  # observations that the drafter's own estimate is worth
MEMORY = 0.995  # weight of the past at every observation of a class: about two hundred of them count
SHIFT = 0.25  # how far one observation moves a sequence's log odds
FADE = 0.98  # of a sequence's shift, at every observation: a text changes its nature
MOST_SHIFT = 3.0


class Chances:
    """How often nodes of each class were right, for one source of drafts and one kind of request."""

    __slots__ = ("_hits", "_tries", "odds")

    def __init__(self) -> None:
        middles = [EDGES[0] / 2, *((a * b) ** 0.5 for a, b in zip(EDGES, EDGES[1:], strict=False)), EDGES[-1] * 2]
        self.odds = array("d", middles * DEPTHS)  # by class: the chance over the chance of the contrary
        self._hits = array("d", [PRIOR * odds / (1 + odds) for odds in self.odds])
        self._tries = array("d", [PRIOR] * len(self.odds))

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Of hits, tries and odds by class, for compiled code."""
        return self._hits.buffer_info()[0], self._tries.buffer_info()[0], self.odds.buffer_info()[0]

    def learn(self, cell: int, right: bool) -> None:
        """Count a node whose parent was right."""
        hits = self._hits[cell] = MEMORY * self._hits[cell] + right
        tries = self._tries[cell] = MEMORY * self._tries[cell] + 1
        self.odds[cell] = (hits + 0.01) / (tries - hits + 0.01)

    def chance(self, odds: float, depth: int) -> float:
        """The chance of a node, from its drafter's estimate given its parent, as odds."""
        known = self.odds[cell_of(odds, depth)]
        return known / (1 + known)

    def by_depth(self) -> list[float]:
        """For depths 1, 2, 3-4, 5-8 and beyond, how often a node was right whose parent was, of those met lately."""
        rows = [slice(d * CLASSES, (d + 1) * CLASSES) for d in range(DEPTHS)]
        return [sum(self._hits[row]) / sum(self._tries[row]) for row in rows]


def cell_of(odds: float, depth: int) -> int:
    """The class of a node, from its drafter's estimate given its parent, as odds."""
    return min((depth - 1).bit_length(), DEPTHS - 1) * CLASSES + bisect_right(EDGES, odds)


def odds_of(log_chance: float) -> float:
    """Odds of the log of a chance; one that says nothing (NaN) is `UNKNOWN`."""
    if log_chance != log_chance:
        return UNKNOWN
    chance = exp(min(0.0, log_chance))
    return chance / max(1 - chance, 1e-4)


@dataclass(slots=True)
class Offer:
    """A proposal for one sequence, until the text tells what it was worth. Lists begin with the root."""

    base: int  # tokens of the text when it was made: a node at depth d proposes token base + d - 1
    tokens: Sequence[int]
    parents: Sequence[int]
    sources: Sequence[int]
    cells: list[int]
    given: list[float]  # chance of each node, given its parent
    path: list[float]  # chance of each node, root 1.0; never above its parent's
    levels: int = 0  # depth of the deepest node

    def judge(self, text: Sequence[int], chances: Sequence[Chances], shift: MutableSequence[float]) -> None:
        """Count every node whose parent turned out right and whose place in the text is known.

        Args:
            text: the sequence's tokens by now.
            chances: by source.
            shift: by source, log odds of the sequence against its kind's; changed in place.
        """
        known = len(text)
        places = {0: self.base}  # by node that was right: the place of its children
        for node in range(1, len(self.tokens)):
            place = places.get(self.parents[node], known)
            if place >= known:
                continue
            right = text[place] == self.tokens[node]
            source = self.sources[node]
            chances[source].learn(self.cells[node], right)
            moved = FADE * (shift[source] + SHIFT * (right - self.given[node]))
            shift[source] = max(-MOST_SHIFT, min(MOST_SHIFT, moved))
            if right:
                places[node] = place + 1


def weigh(
    base: int,
    tokens: Sequence[int],
    parents: Sequence[int],
    sources: Sequence[int],
    scores: Sequence[float] | None,
    chances: Sequence[Chances],
    shift: Sequence[float],
) -> Offer:
    """The honest chance of every node of one tree.

    Args:
        base: tokens of the text, the root included.
        tokens, parents, sources: of the nodes, the root first.
        scores: log of the drafter's own estimate for each path; None: it gives none, or none that may be used.
        chances, shift: by source.
    """
    cells, given, path, depths = [0], [1.0], [1.0], [0]
    factors = [exp(x) if x else 1.0 for x in shift]
    for node in range(1, len(tokens)):
        parent, source = parents[node], sources[node]
        depth = depths[parent] + 1
        depths.append(depth)
        own = UNKNOWN if scores is None else odds_of(scores[node] - scores[parent])
        cell = cell_of(own, depth)
        odds = chances[source].odds[cell] * factors[source]
        chance = odds / (1 + odds)
        cells.append(cell)
        given.append(chance)
        path.append(path[parent] * chance)
    return Offer(base, tokens, parents, sources, cells, given, path, max(depths))
