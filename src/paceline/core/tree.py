"""Drafts: a batch of token trees, one type from the drafter to the pass.

A tree is a list of parents: node 0 is the root with parent -1, every other parent is an earlier node. Trees are plain
lists of numbers: they have few nodes, and lists are several times faster than tensors there. Depths, masks and paths
follow from the parents; no operation changes a tree. Axis letters: B requests, N nodes, D depth, V vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from math import isnan

import torch
from torch import Tensor

from .errors import ConfigError

PADDING = -1  # the root's parent; parents and path tokens of padding


@dataclass(slots=True, eq=False)
class TokenTree:
    """B requests with one tree of candidate tokens each.

    Row b has ``counts[b]`` entries, the root's first: the last committed token. Two children of one parent may carry
    the same token: matching takes the first. Read only, since trees share their rows.
    """

    tokens: list[list[int]]
    parents: list[list[int]]  # parent index < own index; `PADDING` for the root
    sources: list[list[int]]  # which source proposed each node, 0 .. 255 (statistics); the root's has no meaning
    counts: list[int]  # nodes of each, the root included
    scores: list[list[float]] | None = None  # cumulative log q along the path, 0 for the root; ranks nodes
    q: Tensor | None = None  # [B, N, V] for sampled drafts: what the children of each node were drawn from, siblings
    # in index order and without replacement. Rows of nodes without children are never read
    checked: bool = False  # whether `check` would find nothing
    _depths: list[list[int]] | None = field(default=None, init=False, repr=False)

    # ---- constructors

    @staticmethod
    def roots(tokens: Sequence[int]) -> TokenTree:
        """Return trees of the root alone, from ``tokens`` [B]."""
        return TokenTree.from_parents(tokens, [[] for _ in tokens], [[] for _ in tokens])

    @staticmethod
    def from_parents(
        roots: Sequence[int],
        parents: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
        source: int | Sequence[Sequence[int]] = 0,
        log_score: Sequence[Sequence[float]] | None = None,
        *,
        trusted: bool = False,
    ) -> TokenTree:
        """Return trees from lists of their drafted nodes.

        Args:
            roots: [B].
            parents: for each request the parent of node 1, 2, ...; 0 is the root.
            tokens: for each request the token of node 1, 2, ...
            source: one for all, or like ``tokens``.
            log_score: like ``tokens``, cumulative log q.
            trusted: these are trees for sure: nothing is checked.

        Raises:
            ConfigError: a parent that does not come before its child, lists of unequal length, or NaN.
            TypeError, OverflowError: an entry that is not a number of its kind.
        """
        marks = [[source] * len(row) for row in tokens] if isinstance(source, int) else source
        tree = TokenTree(
            [[root, *row] for root, row in zip(roots, tokens, strict=False)],
            [[PADDING, *row] for row in parents],
            [[0, *row] for row in marks],
            [1 + len(row) for row in tokens],
            None if log_score is None else [[0.0, *row] for row in log_score],
            checked=trusted,
        )
        if not trusted and len(roots) != len(tokens):
            raise ConfigError(f"{len(tokens)} trees of {len(roots)} roots", "each tree has one root", "give one a tree")
        tree.check()
        return tree

    # ---- operations

    def subset(self, nodes: Sequence[Sequence[int]]) -> TokenTree:
        """Return only the ``nodes`` of each tree, ascending, the root and every kept node's parent among them.

        q is dropped: a choice among drawn tokens changes their distribution, even where it keeps all of them.
        """
        parents = _picked(self.parents, nodes)
        for b, row in enumerate(nodes):
            if row[-1] + 1 != len(row):  # else the first ones: parents come before their children
                place = {old: new for new, old in enumerate((PADDING, *row), start=PADDING)}
                parents[b] = [place[parent] for parent in parents[b]]
        tokens, sources = _picked(self.tokens, nodes), _picked(self.sources, nodes)
        scores = None if self.scores is None else _picked(self.scores, nodes)
        return TokenTree(tokens, parents, sources, [*map(len, nodes)], scores, checked=self.checked)

    # ---- views: everything else follows from the parents

    @property
    def is_chain(self) -> bool:
        """Return whether every node of every request is the child of the node before it."""
        return all(row == [*range(PADDING, len(row) - 1)] for row in self.parents)

    def depths(self) -> list[list[int]]:
        """Return edges from the root to every node."""
        if self._depths is None:
            self._depths = [[0, *depths_below(row[1:])] for row in self.parents]
        return self._depths

    def ancestor_mask(self, b: int) -> Tensor:
        """Return [n, n] bool of request ``b``: [i, j] whether node j is i itself or one of its ancestors.

        Only the tree: whatever comes before the root is visible to every node anyway.
        """
        mask = torch.zeros(self.counts[b], self.counts[b], dtype=torch.bool)
        rows = mask.numpy()
        for node, parent in enumerate(self.parents[b]):
            if node:
                rows[node] = rows[parent]
            rows[node, node] = True
        return mask

    def paths(self, b: int) -> list[list[int]]:
        """Return [n] tokens from below the root to each node of request ``b``, itself included."""
        paths: list[list[int]] = [[]]
        for token, parent in zip(self.tokens[b][1:], self.parents[b][1:], strict=True):
            paths.append([*paths[parent], token])
        return paths

    def path_tokens(self, b: int) -> Tensor:
        """Return [n, D] int64: `paths`, -1 padded."""
        return as_tensor(self.paths(b), PADDING)

    def check(self) -> None:
        """Check every invariant of the type.

        Raises:
            ConfigError: the first one that is broken.
            TypeError, OverflowError: an entry that is not a number of its kind.
        """
        if self.checked:
            return
        columns = [self.tokens, self.parents, self.sources, *(() if self.scores is None else (self.scores,))]
        lengths = [[*map(len, rows)] for rows in columns]
        if any(a != b for a, b in pairwise([*lengths, [*self.counts]])):
            raise _no_tree(f"they have columns of lengths {lengths}, and {self.counts} nodes")
        for code, rows in zip("qqBd", columns, strict=False):
            for row in rows:
                array(code, row)
        for b, parents in enumerate(self.parents):
            if not parents or parents[0] != PADDING:
                raise _no_tree(f"request {b} has no root")
            wrong = [node for node, parent in enumerate(parents[1:], start=1) if not 0 <= parent < node]
            if wrong:
                raise _no_tree(f"node {wrong[0]} of request {b} is below node {parents[wrong[0]]}, no earlier one")
            if self.scores is not None and isnan(sum(self.scores[b])) and any(map(isnan, self.scores[b])):
                raise _no_tree(f"request {b} has a score that is not a number")
        self.checked = True


def _no_tree(wrong: str) -> ConfigError:
    remedy = "list the nodes top down, the root is 0, and give every column an entry a node"
    return ConfigError("lists that are not token trees", wrong, remedy)


def _picked(rows: list[list], nodes: Sequence[Sequence[int]]) -> list[list]:
    return [[row[n] for n in indices] for row, indices in zip(rows, nodes, strict=True)]


def depths_below(parents: Sequence[int]) -> list[int]:
    """Return depth of node 1, 2, ... from the parent of each."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths[1:]


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
