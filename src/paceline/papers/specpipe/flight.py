"""The tree of one request whose levels are in flight: its growth and its pruning by verdicts.

    text ... root            the last emitted token; the verdict on it is what the target emits next
              |- a           level 1, one tick after the root
              |  |- c        level 2
              |- b
                 |- d

A verdict makes a child of the root the root, and drops what is not below it: embeddings in flight, nodes that wait,
rows of K/V. Where the emitted token is not a child, all is dropped and the pipeline starts again with that token. A
node keeps its number while it is there, and the row of its K/V gives its place after the committed text.

Source: SpecPipe, sections 3.2, 3.3.2 and 3.3.3, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import nsmallest

import torch
from torch import Tensor

from ...core.trace import StepTrace
from ...core.tree import NONE, KeptNode, KeptTree


@dataclass(slots=True)
class Node(KeptNode):
    """One token that may be part of the text; it has a row once it has entered the pipeline."""

    score: float = 0.0  # log of the chance of its path, up to a number that all nodes share
    source: int = NONE  # its number in the source's tree
    requested: bool = False  # whether children were requested
    mark: int = 0  # of the drafter that proposed it


@dataclass(frozen=True, slots=True)
class Cut:
    """Describe what an emitted token has done to the tree."""

    version: int  # verdicts so far, this one included
    token: int
    hit: bool  # whether the token was in flight: else the pipeline starts again with it
    alive: frozenset[int]  # nodes that are left, of those that had been added before; none: a flush
    rows: tuple[int, ...]  # of K/V that stay, ascending; the first is the old root's, which is text now


@dataclass(frozen=True, slots=True)
class Offer:
    """A child that a source gives for a node."""

    parent: int
    token: int
    log_q: float
    source: int = NONE  # its number in the source's tree
    mark: int = 0  # of the drafter that proposes it


class InFlightTree(KeptTree[Node]):
    """One request's tree.

    Args:
        token: the last one of the text, which no pass has computed yet.
        place: of that token in the text.
    """

    def __init__(self, token: int, place: int) -> None:
        super().__init__()
        self.version = 0
        self.rows = 0  # that have entered and are left
        self.spare: list[Offer] = []  # that levels had no room for
        self.restart(Node(NONE, token, place))

    @property
    def place(self) -> int:
        """Return the position of the root in the text."""
        return self.nodes[self.root].place

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
            number = self.children.get((offer.parent, offer.token))
            if number is None:
                above = self.nodes[offer.parent]
                score = above.score + offer.log_q
                shape = offer.parent, offer.token, above.place + 1
                node = Node(*shape, score=score, source=offer.source, mark=offer.mark)
                number = self.put(node)
            elif self.nodes[number].source == NONE != offer.source:  # a source that has lost it finds it again
                self.nodes[number].source, self.nodes[number].requested = offer.source, False
            numbers.append(number)
        return numbers

    def best(self, offers: Sequence[Offer], width: int) -> list[Offer]:
        """Apply the fixed-width rule (section 3.3.3): those with the likeliest paths, in the order of their parents.

        Args:
            offers: of parents that are there; others are left out.
            width: w, how many at most. Of equals the first are taken.
        """
        alive = [offer for offer in offers if offer.parent in self.nodes]
        ranked = nsmallest(width, range(len(alive)), lambda i: (-self.nodes[alive[i].parent].score - alive[i].log_q, i))
        return [alive[i] for i in sorted(ranked, key=lambda i: (alive[i].parent, i))]

    def append(self, offers: Sequence[Offer], width: int) -> list[int]:
        """Append a layer within the width: the best of the offers, then the best of those that had no room before.

        These are late siblings ("potential break points", section 4.2). Where a verdict left nothing of the newest
        level they are all there is, and the pipeline is refilled from the level that they hang below (section 3.3.2).

        Returns:
            The nodes that are new.
        """
        chosen = self.best(offers, width)
        used = {*map(id, chosen)}
        older = [o for o in self.spare if o.parent in self.nodes and (o.parent, o.token) not in self.children]
        late = self.best(older, width - len(chosen))
        used.update(map(id, late))
        self.spare = [offer for offer in [*older, *offers] if offer.parent in self.nodes and id(offer) not in used]
        before = {*self.nodes}
        return [number for number in dict.fromkeys(self.extend([*chosen, *late])) if number not in before]

    def tips(self, farthest: int) -> list[int]:
        """Return the deepest nodes without requested children.

        The newest level, or what a verdict left of an older one.

        Args:
            farthest: place of the last token that is of use.
        """
        open_ = [number for number, node in self.nodes.items() if not node.requested and node.place < farthest]
        if not open_:
            return []
        deepest = max(self.nodes[number].place for number in open_)
        return [number for number in open_ if self.nodes[number].place == deepest]

    def ask(self, tips: Iterable[int]) -> None:
        """Note that children of these nodes were requested."""
        for number in tips:
            self.nodes[number].requested = True

    def ask_again(self, tips: Iterable[int]) -> None:
        """Children of those of these nodes that are left were canceled: request them again."""
        for number in tips:
            if number in self.nodes:
                self.nodes[number].requested = False

    def detach_source(self) -> None:
        """Forget the source's numbers, whose tree is lost; drafting begins below the root again."""
        for number, node in self.nodes.items():
            node.source, node.requested = NONE, number != self.root
        self.spare = []

    # -- entering

    @property
    def waiting(self) -> list[int]:
        """Nodes that have not entered the pipeline, parents first."""
        return [number for number, node in self.nodes.items() if node.row == NONE]

    def enter(self, width: int) -> list[int]:
        """Return the level that enters the pipeline now: nodes that wait, the root first, at most ``width``.

        Their rows lie after those that have entered.
        """
        entering = self.waiting[:width]
        for number in entering:
            self.nodes[number].row, self.rows = self.rows, self.rows + 1
        return entering

    def visible(self, level: Sequence[int]) -> Tensor:
        """[rows of the level, rows that have entered] bool: ancestors, and itself."""
        mask = torch.zeros(len(level), self.rows, dtype=torch.bool)
        for row, number in enumerate(level):
            mask[row, [self.nodes[above].row for above in (self.root, *self.path(number))]] = True
        return mask

    # -- verdicts

    def number(self, parent: int, token: int) -> int:
        """Return the number of a node's child; `NONE`: it has none with this token."""
        return self.children.get((parent, token), NONE)

    def child(self, token: int) -> Node | None:
        """Return the root's child with this token."""
        return self.nodes.get(self.number(self.root, token))

    def holds(self, token: int) -> bool:
        """Return whether the root's child with this token is in flight."""
        node = self.child(token)
        return node is not None and node.row != NONE

    def trace(self, token: int, first: int, names: Callable[[int], str]) -> StepTrace:
        """Return the tree in flight at the moment when the target emits ``token``, as a step of that one token.

        Args:
            token: the emitted token, if it is not cut by the stop rules.
            first: tokens of the output before it.
            names: of the drafters, by their source marks.
        """
        numbers = [self.root, *(n for n, node in self.nodes.items() if n != self.root and node.row != NONE)]
        place = {number: at for at, number in enumerate(numbers)}
        nodes = [self.nodes[number] for number in numbers]
        return StepTrace(
            first=first,
            emitted=1,
            tokens=[node.token for node in nodes],
            parents=[-1, *(place[node.parent] for node in nodes[1:])],
            sources=["", *(names(node.mark) for node in nodes[1:])],
            scores=[node.score - nodes[0].score for node in nodes],
            path=[place[self.number(self.root, token)]] if self.holds(token) else [],
            allowed=len(nodes) - 1,
        )

    def say(self, token: int) -> Cut:
        """Take the target's token after the root: reroot to the child that carries it, or start again with it.

        Raises:
            ValueError: the root has not entered the pipeline, so that nothing can be emitted after it.
        """
        old = self.nodes[self.root]
        if old.row == NONE:
            raise ValueError(f"a verdict after node {self.root}, which has not entered")
        child = self.number(self.root, token)
        self.version += 1
        if child == NONE:
            self.restart(Node(NONE, token, old.place + 1))
            self.rows, self.spare = 0, []
            return Cut(self.version, token, False, frozenset(), (0,))
        self.reroot(child)
        rows = self.pack_rows()
        self.rows = len(rows)
        return Cut(self.version, token, self.nodes[child].row != NONE, frozenset(self.nodes), (0, *rows))
