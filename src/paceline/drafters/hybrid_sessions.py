"""Draft sessions of several drafters as one: their trees stand side by side, and what they draft is merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .sessions import ROOT, Ask, DraftSessions, Grown, Opening


@dataclass(slots=True)
class _Node:
    """One token of the merged tree."""

    parent: int
    token: int
    own: dict[int, int]  # its number in the parts' trees that have it


@dataclass(slots=True)
class _Tree:
    """One sequence's merged tree. The root is no node of it."""

    nodes: dict[int, _Node] = field(default_factory=dict)
    numbers: dict[tuple[int, int], int] = field(default_factory=dict)  # parent and token -> node
    fresh: int = ROOT + 1

    def add(self, parent: int, token: int, part: int | None = None, own: int = ROOT) -> int:
        """A child of a node, new or there already; ``own`` is its number in that part."""
        number = self.numbers.get((parent, token))
        if number is None:
            if parent != ROOT and parent not in self.nodes:
                raise KeyError(f"node {parent}")
            number, self.fresh = self.fresh, self.fresh + 1
            self.nodes[number], self.numbers[parent, token] = _Node(parent, token, {}), number
        if part is not None:
            self.nodes[number].own[part] = own
        return number

    def own(self, node: int, part: int) -> int | None:
        """A node's number in a part; None: it is not there."""
        return ROOT if node == ROOT else self.nodes[node].own.get(part)

    def path(self, node: int) -> list[int]:
        """Nodes from below the root to this one."""
        found = []
        while node != ROOT:
            found.append(node)
            node = self.nodes[node].parent
        return found[::-1]

    def cut(self, root: int) -> None:
        """Make a node the root, and keep what is below it."""
        below, kept = {root}, {}
        for number, node in self.nodes.items():  # parents come first
            if node.parent in below:
                below.add(number)
                node.parent = ROOT if node.parent == root else node.parent
                kept[number] = node
        self.nodes = kept
        self.numbers = {(node.parent, node.token): number for number, node in kept.items()}


class HybridSessions:
    """Sessions of several drafters.

    Each part is told the nodes that others drafted when children are wanted below them. Of a token that several of them
    draft below the same node, the highest chance counts.

    Args:
        parts: their sessions.
    """

    def __init__(self, parts: Sequence[DraftSessions]) -> None:
        self._parts = parts
        self._open: dict[int, _Tree] = {}

    def open(self, opening: Opening) -> None:
        """See `DraftSessions`."""
        self._open[opening.key] = _Tree()
        for part in self._parts:
            part.open(opening)

    def grow(self, asks: Sequence[Ask]) -> list[Grown]:
        """See `DraftSessions`."""
        trees = [self._open[ask.key] for ask in asks]
        given = [[tree.add(*one) for one in ask.given] for tree, ask in zip(trees, asks, strict=True)]
        wanted = [[*dict.fromkeys([*mine, *ask.expand])] for mine, ask in zip(given, asks, strict=True)]
        found: list[dict[int, dict[int, float]]] = [{node: {} for node in nodes} for nodes in wanted]
        for part in range(len(self._parts)):
            self._ask(part, asks, trees, found)
        return [
            self._merged(tree, mine, below, ask.width)
            for tree, mine, below, ask in zip(trees, given, found, asks, strict=True)
        ]

    def _ask(
        self, part: int, asks: Sequence[Ask], trees: Sequence[_Tree], found: Sequence[dict[int, dict[int, float]]]
    ) -> None:
        """One part's level; its tokens below each wanted node, and their chances, are put into ``found``."""
        for tree, below, ask in zip(trees, found, asks, strict=True):
            for node in below:
                for above in tree.path(node)[:-1]:
                    self._introduce(part, ask.key, tree, above)
        names, own_asks = [], []
        for tree, below, ask in zip(trees, found, asks, strict=True):
            new = [node for node in below if tree.own(node, part) is None]
            old = {number: node for node in below if (number := tree.own(node, part)) is not None}
            pairs = [(tree.own(tree.nodes[node].parent, part) or ROOT, tree.nodes[node].token) for node in new]
            names.append((new, old))
            own_asks.append(Ask(ask.key, pairs, [*old], ask.width))
        grown = self._parts[part].grow(own_asks)
        for (new, old), answer, tree, below in zip(names, grown, trees, found, strict=True):
            for node, number in zip(new, answer.given, strict=True):
                tree.nodes[node].own[part] = number
                old[number] = node
            for parent, number, token, log_q in zip(
                answer.parents, answer.nodes, answer.tokens, answer.log_q, strict=True
            ):
                node = old[parent]
                tree.add(node, token, part, number)
                below[node][token] = max(log_q, below[node].get(token, log_q))

    def _introduce(self, part: int, key: int, tree: _Tree, node: int) -> None:
        """Let a part know a node that only others have; those above it are known."""
        if tree.own(node, part) is None:
            above = tree.own(tree.nodes[node].parent, part)
            assert above is not None
            grown = self._parts[part].grow([Ask(key, given=[(above, tree.nodes[node].token)])])
            tree.nodes[node].own[part] = grown[0].given[0]

    @staticmethod
    def _merged(tree: _Tree, given: list[int], below: dict[int, dict[int, float]], width: int) -> Grown:
        grown = Grown(given)
        for parent, chances in below.items():
            for token in sorted(chances, key=lambda token: -chances[token])[:width]:
                grown.parents.append(parent)
                grown.nodes.append(tree.numbers[parent, token])
                grown.tokens.append(token)
                grown.log_q.append(chances[token])
        return grown

    def reroot(self, key: int, node: int) -> None:
        """See `DraftSessions`."""
        tree = self._open[key]
        tokens = [tree.nodes[above].token for above in tree.path(node)]
        for index, part in enumerate(self._parts):
            number = tree.own(node, index)
            if number is None:
                part.commit(key, tokens)
            else:
                part.reroot(key, number)
        lost = {index for index in range(len(self._parts)) if tree.own(node, index) is None}
        tree.cut(node)
        for left in tree.nodes.values():
            left.own = {part: number for part, number in left.own.items() if part not in lost}

    def commit(self, key: int, tokens: Sequence[int]) -> None:
        """See `DraftSessions`."""
        self._open[key].nodes, self._open[key].numbers = {}, {}
        for part in self._parts:
            part.commit(key, tokens)

    def close(self, key: int) -> None:
        """See `DraftSessions`."""
        if self._open.pop(key, None) is not None:
            for part in self._parts:
                part.close(key)
