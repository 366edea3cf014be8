"""Draft sessions in this process: a text and a tree of drafted nodes for each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ..core.sampling import SequenceSampler
from .base import SequenceView
from .sessions import ROOT, Opening


@dataclass(slots=True)
class Node:
    """A node of a session's tree."""

    parent: int
    token: int
    depth: int  # below the root, as of now
    score: float = 0.0  # log q of the drafted tokens behind the last given one
    row: int = -1  # of its K/V, behind the text's; -1: not computed


@dataclass(slots=True)
class DraftTree:
    """One sequence: its text, and the nodes below its root by their numbers."""

    view: SequenceView
    nodes: dict[int, Node] = field(default_factory=dict)
    children: dict[tuple[int, int], int] = field(default_factory=dict)  # parent and token -> node
    fresh: int = ROOT + 1  # the next number

    def add(self, parent: int, token: int, score: float = 0.0) -> int:
        """A child of a node, new or there already."""
        found = self.children.get((parent, token))
        if found is not None:
            return found
        if parent != ROOT and parent not in self.nodes:
            raise KeyError(f"node {parent} of sequence {self.view.key}")
        number, self.fresh = self.fresh, self.fresh + 1
        self.nodes[number] = Node(parent, token, self.depth(parent) + 1, score)
        self.children[parent, token] = number
        return number

    def depth(self, node: int) -> int:
        """Of a node; the root's is 0."""
        return self.nodes[node].depth if node != ROOT else 0

    def path(self, node: int) -> list[int]:
        """Nodes from below the root to ``node``."""
        found: list[int] = []
        while node != ROOT:
            found.append(node)
            node = self.nodes[node].parent
        return found[::-1]

    def tokens(self, node: int) -> list[int]:
        """Drafted tokens from below the root to ``node``."""
        return [self.nodes[number].token for number in self.path(node)]

    def cut(self, root: int) -> tuple[list[int], int]:
        """Make a node the root and drop all that is not below it.

        Returns:
            Rows of K/V that stay, ascending, and how many of them, the first ones, are of the text now.
        """
        path, depth = self.path(root), self.depth(root)
        below = {root}
        for number in sorted(self.nodes):  # children have higher numbers than their parents
            if self.nodes[number].parent in below:
                below.add(number)
        stays = [number for number in [*path, *sorted(below - {root})] if self.nodes[number].row >= 0]
        done = sum(self.nodes[number].row >= 0 for number in path)
        rows = sorted(self.nodes[number].row for number in stays)
        moved = {row: place - done for place, row in enumerate(rows)}
        kept = {number: self.nodes[number] for number in below - {root}}
        for node in kept.values():
            node.depth -= depth
            node.parent = ROOT if node.parent == root else node.parent
            node.row = moved.get(node.row, -1)
        self.nodes = kept
        self.children = {(node.parent, node.token): number for number, node in kept.items()}
        return rows, done


Tree = TypeVar("Tree", bound=DraftTree)


class TreeSessions(Generic[Tree]):
    """The bookkeeping of `DraftSessions`; a subclass adds `begin`, `grow`, `close` and `forget`.

    Args:
        vocab_size, eos_ids: of the target.
    """

    def __init__(self, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._vocab, self._eos_ids = vocab_size, eos_ids
        self._open: dict[int, Tree] = {}

    def begin(self, view: SequenceView) -> Tree:
        """A sequence's tree, without nodes."""
        raise NotImplementedError(f"{type(self).__name__}.begin")

    def open(self, opening: Opening) -> None:
        """See `DraftSessions`."""
        self.close(opening.key)
        self._open[opening.key] = self.begin(opened(opening, self._vocab, self._eos_ids))

    def reroot(self, key: int, node: int) -> None:
        """See `DraftSessions`."""
        tree = self._open[key]
        said = tree.tokens(node)
        rows, done = tree.cut(node)
        self._say(tree, said)
        self.keep(tree, rows, done)

    def commit(self, key: int, tokens: Sequence[int]) -> None:
        """See `DraftSessions`."""
        tree = self._open[key]
        self._say(tree, tokens)
        self.clear(tree, tokens)

    @staticmethod
    def _say(tree: Tree, tokens: Sequence[int]) -> None:
        tree.view.tokens += tokens
        tree.view.sampler.commit(tokens)

    def clear(self, tree: Tree, said: Sequence[int]) -> None:
        """The text has gone on with these tokens: drop all nodes."""
        tree.nodes, tree.children = {}, {}

    def keep(self, tree: Tree, rows: Sequence[int], done: int) -> None:
        """Keep these rows of K/V, of which the first are of the text, where there is any."""

    def close(self, key: int) -> None:
        """See `DraftSessions`."""
        raise NotImplementedError(f"{type(self).__name__}.close")


def opened(opening: Opening, vocab_size: int, eos_ids: tuple[int, ...]) -> SequenceView:
    """A sequence with a sampler of its own, for a target of so many tokens."""
    tokens, prompt = [*opening.tokens], [*opening.tokens[: opening.prompt_len]]
    sampler = SequenceSampler(
        opening.params,
        prompt,
        seed=opening.seed,
        sample_index=opening.sample_index,
        vocab_size=vocab_size,
        eos_ids=eos_ids,
    )
    sampler.commit(tokens[opening.prompt_len :])
    return SequenceView(opening.key, tokens, opening.prompt_len, sampler, opening.max_len)
