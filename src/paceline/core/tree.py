"""Drafts: a tree of candidate tokens for one sequence, one type from the drafter to the pass.

A tree is a list of parents: node 0 is the root, the text's last token, which has no entry; node n is entry n - 1, and
its parent is an earlier node. Trees are plain lists of numbers: they have few nodes, and lists are several times
faster than tensors there. Depths, masks and paths follow from the parents.

A drafter or a round that keeps a tree between passes, while verdicts prune it, keeps a `KeptTree`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from .errors import ConfigError

PADDING = -1  # parents and path tokens of padding
NONE = -1  # number of a node, or its row, where there is none


@dataclass(slots=True)
class TokenTree:
    """Drafted nodes of one sequence, parents before children.

    Two children of one parent may carry the same token: matching takes the first.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # node of each parent; 0: the root
    # Log of the estimated chance that the path is accepted (log q summed along it); empty: not known.
    scores: list[float] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)  # of each node its proposer, 0 .. 255; empty: all 0
    numbers: list[int] = field(default_factory=list)  # its node in a draft session, if one holds it
    # By node [V]: the distribution of its children, if they were drawn: siblings in index order, without replacement.
    q: dict[int, Tensor] = field(default_factory=dict)

    @staticmethod
    def chain(tokens: list[int], chance: float) -> TokenTree:
        """Return tokens one after the other, each of them as likely, given the one before it."""
        step = math.log(chance)
        return TokenTree(tokens, [*range(len(tokens))], [(i + 1) * step for i in range(len(tokens))])

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, score: float) -> int:
        """Append a node; returns its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(score)
        return len(self.tokens)

    def score(self, node: int) -> float:
        """Return the score of a node; the root's is 0."""
        return self.scores[node - 1] if node else 0.0

    @property
    def marks(self) -> list[int]:
        """Return the source of every node."""
        return self.sources or [0] * len(self.tokens)

    # ---- operations

    def best(self, budget: int) -> TokenTree:
        """Return the ``budget`` best scored nodes, in their order; of equals the earlier ones.

        No node may have a better score than its parent.
        """
        if len(self.tokens) <= budget:
            return self
        ranked = sorted(range(1, len(self.tokens) + 1), key=lambda n: (-self.scores[n - 1], n))
        return self.subset(sorted(ranked[:budget]))

    def subset(self, nodes: Sequence[int]) -> TokenTree:
        """Return only these nodes, ascending; every one's parent is among them, unless it is the root.

        q is dropped: a choice among drawn tokens changes their distribution, even where it keeps all of them.
        """
        place = {0: 0} | {node: i for i, node in enumerate(nodes, start=1)}
        columns: list[list[Any]] = [self.tokens, self.scores, self.sources, self.numbers]
        tokens, scores, sources, numbers = ([column[n - 1] for n in nodes] if column else [] for column in columns)
        return TokenTree(tokens, [place[self.parents[n - 1]] for n in nodes], scores, sources, numbers)

    def graft(self, other: TokenTree, source: int) -> None:
        """Add the nodes of another tree below the same root; equal paths become one node, which keeps its score.

        A new node's chance given its parent is the other tree's, and its source is ``source``.
        """
        self.sources = self.marks
        if not self.tokens:
            self.tokens, self.parents, self.scores = other.tokens[:], other.parents[:], other.scores[:]
            self.sources = [source] * len(self)
            return
        children = {(p, t): i + 1 for i, (p, t) in reversed([*enumerate(zip(self.parents, self.tokens, strict=True))])}
        moved = {0: 0}
        for i, (parent, token) in enumerate(zip(other.parents, other.tokens, strict=True), start=1):
            place = moved[parent]
            node = children.get((place, token))
            if node is None:
                score = self.score(place) + (other.score(i) - other.score(parent))
                node = children[place, token] = self.add(place, token, score)
                self.sources.append(source)
            moved[i] = node

    # ---- views: everything else follows from the parents

    @property
    def is_chain(self) -> bool:
        """Return whether every node is the child of the one before."""
        return self.parents == [*range(len(self.parents))]

    @property
    def depth(self) -> int:
        """Return the depth of the deepest node; 0: there is none."""
        return max(self.depths())

    def depths(self) -> list[int]:
        """Return edges from the root to every node, the root's own 0 first."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    def path(self, node: int) -> list[int]:
        """Return the nodes from below the root to ``node``."""
        nodes: list[int] = []
        while node:
            nodes.append(node)
            node = self.parents[node - 1]
        return nodes[::-1]

    def paths(self) -> list[list[int]]:
        """Return [nodes] tokens from below the root to each node, itself included; the root's is empty."""
        paths: list[list[int]] = [[]]
        for token, parent in zip(self.tokens, self.parents, strict=True):
            paths.append([*paths[parent], token])
        return paths

    def path_tokens(self) -> Tensor:
        """Return [nodes, D] int64: `paths`, -1 padded."""
        return as_tensor(self.paths(), PADDING)

    def ancestor_mask(self) -> Tensor:
        """Return [nodes, nodes] bool, the root included: [i, j] whether node j is i itself or an ancestor.

        Only the tree: whatever comes before the root is visible to every node anyway.
        """
        mask = torch.eye(len(self) + 1, dtype=torch.bool)
        rows = mask.numpy()
        for node, parent in enumerate(self.parents, start=1):
            rows[node] |= rows[parent]
        return mask

    def check(self) -> None:
        """Check every invariant of the type.

        Raises:
            ConfigError: the first one that is broken.
            TypeError, OverflowError: an entry that is not a number of its kind.
        """
        count = len(self.tokens)
        lengths = len(self.parents), len(self.scores) or count, len(self.sources) or count
        if {*lengths} != {count}:
            raise _no_tree(f"its columns have lengths {[count, *lengths]}")
        array("q", [*self.tokens, *self.parents]), array("d", self.scores), array("B", self.sources)
        for node, parent in enumerate(self.parents, start=1):
            if not 0 <= parent < node:
                raise _no_tree(f"node {node} is below node {parent}, which is not an earlier one")
        if any(map(math.isnan, self.scores)):
            raise _no_tree("a score is not a number")


@dataclass(slots=True)
class KeptNode:
    """One node of a `KeptTree`."""

    parent: int  # its number; `NONE` for the root
    token: int
    place: int  # of the token in the text
    row: int = NONE  # of its K/V after the text's; `NONE`: it is not computed


N = TypeVar("N", bound=KeptNode)


@dataclass(slots=True, kw_only=True, eq=False)
class KeptTree(Generic[N]):
    """A tree below a text's last token, its root, that stays between passes. A node keeps its number while it is there.

    Parents have lower numbers than their children. Two children of a parent carry different tokens.
    """

    nodes: dict[int, N] = field(default_factory=dict)
    children: dict[tuple[int, int], int] = field(default_factory=dict)  # parent and token -> node
    root: int = NONE
    fresh: int = 0  # the next number

    def put(self, node: N) -> int:
        """Add a node; return its number."""
        number, self.fresh = self.fresh, self.fresh + 1
        self.nodes[number] = node
        self.children[node.parent, node.token] = number
        return number

    def restart(self, root: N) -> None:
        """Drop all nodes, and begin again with a root."""
        self.nodes, self.children = {}, {}
        self.root = self.put(root)

    def path(self, number: int) -> list[int]:
        """Return the nodes from below the root to this one."""
        nodes: list[int] = []
        while number != self.root:
            nodes.append(number)
            number = self.nodes[number].parent
        return nodes[::-1]

    def reroot(self, number: int) -> list[N]:
        """Make a node the root, and drop all that is not below it; return the nodes before it, the old root first."""
        before = [self.nodes[n] for n in (self.root, *self.path(number)) if n != number]
        below = {number}
        for n, node in self.nodes.items():
            if node.parent in below:
                below.add(n)
        self.nodes = {n: node for n, node in self.nodes.items() if n in below}
        self.root, self.nodes[number].parent = number, NONE
        self.children = {(node.parent, node.token): n for n, node in self.nodes.items()}
        return before

    def computed(self) -> list[N]:
        """Return the nodes that have a row, in the order of their rows."""
        return sorted((node for node in self.nodes.values() if node.row != NONE), key=lambda node: node.row)

    def pack_rows(self) -> list[int]:
        """Renumber the rows from 0 on; return what they were, ascending."""
        nodes = self.computed()
        rows = [node.row for node in nodes]
        for row, node in enumerate(nodes):
            node.row = row
        return rows


def _no_tree(wrong: str) -> ConfigError:
    remedy = "list the nodes top down, the root is 0, and give every column an entry a node"
    return ConfigError("lists that are not a token tree", wrong, remedy)


def padded_paths(paths: Sequence[Sequence[int]], device: torch.device) -> Tensor | None:
    """Return [n, D] int64 drafted tokens up to each of n rows, -1 padded; None: no row has any."""
    return as_tensor(paths, PADDING).to(device) if any(paths) else None


def as_tensor(rows: Sequence[Sequence[int]], empty: int) -> Tensor:
    """Return [rows, longest row] int64, filled up with ``empty``; for a few numbers twice as fast as `torch.tensor`."""
    width = max(map(len, rows), default=0)
    if not width:
        return torch.empty(len(rows), 0, dtype=torch.int64)
    flat = chain.from_iterable((*row, *[empty] * (width - len(row))) for row in rows)
    return torch.frombuffer(array("q", flat), dtype=torch.int64).view(len(rows), width)
