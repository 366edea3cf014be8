"""The tree of one request whose levels are in flight: what enters the pipeline, and what a verdict leaves of it.

    text ... root            the last token that was said; the verdict on it is what the target says next
              |- a           level 1, one tick behind the root
              |  |- c        level 2
              |- b
                 |- d

A verdict makes a child of the root the root, and drops what is not below it: embeddings in flight, nodes that wait,
rows of K/V. Where the token that was said is no child, all is dropped and the pipeline starts again with that token. A
node keeps its number while it is there, and the row of its K/V tells its place behind the committed text.

Source: SpecPipe, sections 3.2, 3.3.2 and 3.3.3, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import nsmallest

NONE = -1


@dataclass(slots=True)
class Node:
    """One token that may be part of the text."""

    parent: int  # its number; `NONE`: it was the root when it was added
    token: int
    place: int  # of the token in the text
    score: float = 0.0  # log of the chance of its path, up to a number that all nodes share
    source: int = NONE  # its number in the source's tree
    row: int = NONE  # of its K/V behind the committed text; `NONE`: it has not entered the pipeline
    asked: bool = False  # whether children were asked for
    rank: int = 0  # among the tokens that were appended with it, the likeliest first
    level: int = 0  # of a static tree, from its root on


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a token that was said has done to the tree."""

    version: int  # verdicts so far, this one included
    token: int
    hit: bool  # whether the token was in flight: else the pipeline starts again with it
    alive: frozenset[int]  # nodes that are left; of those that had been added before
    rows: tuple[int, ...]  # of K/V that stay, ascending; the first is the old root's, which is text now
    rank: int = NONE  # of the token where it was appended; `NONE`: it was not in the tree
    missed: int = NONE  # the rank that it had where there was no room for it; `NONE`: it was no candidate


@dataclass(frozen=True, slots=True)
class Offer:
    """A child that a source gives for a node."""

    parent: int
    token: int
    log_q: float
    source: int = NONE  # its number in the source's tree


class Flight:
    """One request's tree.

    Args:
        token: the last one of the text, which no pass has computed yet.
        place: of that token in the text.
        levels: below a root, of static trees. The first root enters without one: its child is the next root.
    """

    def __init__(self, token: int, place: int, levels: int = 0) -> None:
        self.version = 0
        self.rows = 0  # that have entered and are left
        self.nodes: dict[int, Node] = {}
        self.spare: list[Offer] = []  # that levels had no room for
        self._missed: dict[tuple[int, int], int] = {}  # parent and token of these -> rank in their level
        self._fresh = 0
        self._children: dict[tuple[int, int], int] = {}  # parent and token -> node
        self._levels = levels
        self.root = self._add(Node(NONE, token, place, level=levels))

    def _add(self, node: Node) -> int:
        number, self._fresh = self._fresh, self._fresh + 1
        self.nodes[number] = node
        self._children[node.parent, node.token] = number
        return number

    # -- growing

    def extend(self, offers: Iterable[Offer]) -> list[int]:
        """Append children, in any levels; late siblings too. One that is there already is taken again.

        Returns:
            The number of each.

        Raises:
            KeyError: a parent that is not there.
        """
        numbers = []
        for offer in offers:
            found = self._children.get((offer.parent, offer.token))
            if found is None:
                above = self.nodes[offer.parent]
                score = above.score + offer.log_q
                level = (above.level + 1) % (self._levels + 1)
                found = self._add(Node(offer.parent, offer.token, above.place + 1, score, offer.source, level=level))
            elif self.nodes[found].source == NONE != offer.source:  # a source that has lost it finds it again
                self.nodes[found].source, self.nodes[found].asked = offer.source, False
            numbers.append(found)
        return numbers

    def best(self, offers: Sequence[Offer], width: int) -> list[Offer]:
        """The fixed-width rule (section 3.3.3): those with the likeliest paths, in the order of their parents.

        Args:
            offers: of parents that are there; others are left out.
            width: w, how many at most. Of equals the first are taken.
        """
        alive = [offer for offer in offers if offer.parent in self.nodes]
        ranked = nsmallest(width, range(len(alive)), lambda i: (-self._path_score(alive[i]), i))
        return [alive[i] for i in sorted(ranked, key=lambda i: (alive[i].parent, i))]

    def append(self, offers: Sequence[Offer], width: int) -> list[int]:
        """Layer appending within the width: the best of the offers, and in what room they leave the best of those that
        earlier levels had no room for.

        These are late siblings ("potential break points", section 4.2). Where a verdict left nothing of the newest
        level they are all there is, and the pipeline is refilled from the level that they hang below (section 3.3.2).

        Returns:
            The nodes that are new.
        """
        chosen = self.best(offers, width)
        taken = {*map(id, chosen)}
        older = [o for o in self.spare if o.parent in self.nodes and (o.parent, o.token) not in self._children]
        late = self.best(older, width - len(chosen))
        taken.update(map(id, late))
        self.spare = [offer for offer in [*older, *offers] if offer.parent in self.nodes and id(offer) not in taken]
        self._note_missed(offers)
        known = {*self.nodes}
        numbers = [number for number in dict.fromkeys(self.extend([*chosen, *late])) if number not in known]
        ranked = sorted(numbers, key=lambda number: (-self.nodes[number].score, number))
        for rank, number in enumerate(ranked):
            self.nodes[number].rank = rank
        return numbers

    def _note_missed(self, offers: Sequence[Offer]) -> None:
        """Ranks of the candidates that there was no room for, of those whose parents are there."""
        ranked = sorted((o for o in offers if o.parent in self.nodes), key=self._path_score, reverse=True)
        ranks = {(offer.parent, offer.token): rank for rank, offer in enumerate(ranked)}
        left = ((offer.parent, offer.token) for offer in self.spare)
        self._missed = {key: rank for key in left if (rank := ranks.get(key, self._missed.get(key))) is not None}

    def _path_score(self, offer: Offer) -> float:
        return self.nodes[offer.parent].score + offer.log_q

    def tips(self, farthest: int) -> list[int]:
        """The deepest nodes that children were not asked for: the newest level, or what a verdict left of an older one.

        Args:
            farthest: place of the last token that is of use.
        """
        open_ = [number for number, node in self.nodes.items() if not node.asked and node.place < farthest]
        if not open_:
            return []
        deepest = max(self.nodes[number].place for number in open_)
        return [number for number in open_ if self.nodes[number].place == deepest]

    def ask(self, tips: Iterable[int]) -> None:
        """Note that children of these nodes were asked for."""
        for number in tips:
            self.nodes[number].asked = True

    def ask_again(self, tips: Iterable[int]) -> None:
        """Children of these nodes, as far as they are there, were called off."""
        for number in tips:
            if number in self.nodes:
                self.nodes[number].asked = False

    def orphan(self) -> None:
        """The source has lost its tree: what is here goes on, and drafting begins below the root again."""
        for number, node in self.nodes.items():
            node.source, node.asked = NONE, number != self.root
        self.spare, self._missed = [], {}

    # -- entering

    @property
    def waiting(self) -> list[int]:
        """Nodes that have not entered the pipeline, parents first."""
        return [number for number, node in self.nodes.items() if node.row == NONE]

    def enter(self, width: int, deepest: int | None = None) -> list[int]:
        """The level that enters the pipeline now: nodes that wait, the root first, at most ``width``.

        Their rows lie behind those that have entered.

        Args:
            width: of the level.
            deepest: place of the last tokens that may enter; None: all may.
        """
        entering = [n for n in self.waiting if deepest is None or self.nodes[n].place <= deepest][:width]
        for number in entering:
            self.nodes[number].row, self.rows = self.rows, self.rows + 1
        return entering

    def path(self, number: int) -> list[int]:
        """Nodes from the root to this one, both included."""
        found = []
        while number != NONE:
            found.append(number)
            number = self.nodes[number].parent
        return found[::-1]

    # -- verdicts

    def child(self, token: int) -> Node | None:
        """The root's child with this token."""
        number = self._children.get((self.root, token))
        return None if number is None else self.nodes[number]

    def in_flight(self) -> dict[int, float]:
        """The root's children that have entered: token -> log of the chance of its path."""
        below = [node for node in self.nodes.values() if node.parent == self.root and node.row != NONE]
        return {node.token: node.score for node in below}

    def holds(self, token: int) -> bool:
        """Whether the root's child with this token is in flight."""
        node = self.child(token)
        return node is not None and node.row != NONE

    def say(self, token: int) -> Verdict:
        """The target says ``token`` behind the root: reroot to the child that carries it, or start again with it.

        Raises:
            ValueError: the root has not entered the pipeline, so that nothing can be said behind it.
        """
        old = self.nodes[self.root]
        if old.row == NONE:
            raise ValueError(f"a verdict behind node {self.root}, which has not entered")
        child = self._children.get((self.root, token))
        self.version += 1
        if child is None:
            missed = self._missed.get((self.root, token), NONE)
            self.nodes, self._children, self.rows, self.spare, self._missed = {}, {}, 0, [], {}
            self.root = self._add(Node(NONE, token, old.place + 1))
            return Verdict(self.version, token, False, frozenset(), (0,), missed=missed)
        return self._reroot(child)

    def _reroot(self, child: int) -> Verdict:
        self.nodes = {number: self.nodes[number] for number in self._below(child)}
        self.nodes[child].parent = NONE
        self.root = child
        self._children = {(node.parent, node.token): number for number, node in self.nodes.items()}
        entered = sorted((node for node in self.nodes.values() if node.row != NONE), key=lambda node: node.row)
        rows = 0, *(node.row for node in entered)
        for row, node in enumerate(entered):
            node.row = row
        self.rows = len(entered)
        root = self.nodes[child]
        return Verdict(self.version, root.token, root.row != NONE, frozenset(self.nodes), rows, root.rank)

    def _below(self, root: int) -> list[int]:
        """A node and all below it; parents have lower numbers than their children."""
        found = {root: None}
        for number, node in self.nodes.items():
            if node.parent in found:
                found[number] = None
        return [*found]
