"""Token trees as plain lists of numbers: several times faster than tensor operations where nodes are few.

A tree is a list of parents: node 0 is the root with parent -1, every other parent is an earlier node. Batches are
lists of such trees, each as long as it has nodes; they are padded to one width where they become tensors.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from math import isnan

import torch
from torch import Tensor

from .errors import ConfigError

PADDING = -1  # parents, node ids and path tokens of padding; token columns hold 0 there


@dataclass(frozen=True, slots=True, eq=False)
class TreeLists:
    """A batch of trees as plain lists: row b has ``counts[b]`` entries, the root's first. No padding; read only."""

    tokens: list[list[int]]
    parents: list[list[int]]  # `PADDING` for the root
    sources: list[list[int]]  # who proposed each node, 0 .. 255; the root's has no meaning
    counts: list[int]  # real nodes of each, the root included
    scores: list[list[float]] | None = None  # cumulative log q along the path; the root's is 0

    @property
    def numbered(self) -> bool:
        """Whether no score is NaN."""
        return self.scores is None or not any(isnan(sum(row)) and any(map(isnan, row)) for row in self.scores)

    @property
    def chains(self) -> bool:
        """Whether every node is the child of the one before."""
        return all(row == [*range(PADDING, len(row) - 1)] for row in self.parents)

    def kept(self, nodes: Sequence[Sequence[int]]) -> TreeLists:
        """Only the ``nodes`` of each tree, ascending, the root and every kept node's parent among them."""
        if all(row[-1] + 1 == len(row) for row in nodes):  # the first ones of each: parents come before their children
            return TreeLists(
                _first(self.tokens, nodes),
                _first(self.parents, nodes),
                _first(self.sources, nodes),
                [*map(len, nodes)],
                None if self.scores is None else _first(self.scores, nodes),
            )
        places = [{old: new for new, old in enumerate((PADDING, *row), start=PADDING)} for row in nodes]
        return TreeLists(
            _picked(self.tokens, nodes),
            [[to[p] for p in row] for to, row in zip(places, _picked(self.parents, nodes), strict=True)],
            _picked(self.sources, nodes),
            [*map(len, nodes)],
            None if self.scores is None else _picked(self.scores, nodes),
        )


def _picked(rows: list[list], nodes: Sequence[Sequence[int]]) -> list[list]:
    return [[row[n] for n in own] for row, own in zip(rows, nodes, strict=True)]


def _first(rows: list[list], nodes: Sequence[Sequence[int]]) -> list[list]:
    return [row[: len(own)] for row, own in zip(rows, nodes, strict=True)]


def depths_below(parents: Sequence[int]) -> list[int]:
    """Depth of node 1, 2, ... from the parent of each."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths[1:]


def depths(lists: TreeLists) -> list[list[int]]:
    """Depth of every node, the root's first."""
    return [[0, *depths_below(row[1:])] for row in lists.parents]


def ancestor_mask(lists: TreeLists, width: int) -> Tensor:
    """[B, width, width] bool; see `TokenTree.ancestor_mask`."""
    mask = torch.zeros(len(lists.counts), width, width, dtype=torch.bool)
    for rows, parents in zip(mask.numpy(), lists.parents, strict=True):
        for node, parent in enumerate(parents):
            if node:
                rows[node] = rows[parent]
            rows[node, node] = True
    return mask


def leaf_paths(parents: Sequence[int]) -> list[list[int]]:
    """For each drafted leaf, in index order, the nodes from below the root to it; of a tree without padding."""
    inner = {*parents}
    paths: list[list[int]] = [[]]
    for node, parent in enumerate(parents[1:], start=1):
        paths.append([*paths[parent], node])
    return [path for path in paths[1:] if path[-1] not in inner]


def trie(
    paths: Sequence[Sequence[int]], log_score: Sequence[Sequence[float]] | None
) -> tuple[list[int], list[int], list[float]]:
    """Parents, tokens and scores of the nodes of a trie of token paths, in first-seen order."""
    known: dict[tuple[int, int], int] = {}
    scores: list[float] = []
    for i, path in enumerate(paths):
        node = 0
        for depth, token in enumerate(path):
            node = known.setdefault((node, token), len(known) + 1)
            if node > len(scores):
                scores.append(0.0 if log_score is None else log_score[i][depth])
    return [parent for parent, _ in known], [token for _, token in known], scores


Nodes = tuple[list[int], list[int]]  # tokens and parents of one tree, without padding


def union(mine: Nodes, theirs: Nodes, width: int, total: int) -> tuple[list[bool], list[int]]:
    """Which nodes of two trees laid side by side stay, and the parent of each in that layout, ``total`` wide.

    The second tree's nodes start at ``width``; a node stays if it is the first with its path.
    """
    known: dict[tuple[int, int], int] = {}
    keep, joined = [False] * total, [PADDING] * total
    for offset, (tokens, parents) in ((0, mine), (width, theirs)):
        place: list[int] = []  # where each node of this tree ended up
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            own = offset + node
            key = (place[parent] if node else PADDING, token)
            place.append(known.setdefault(key, own))
            keep[own], joined[own] = place[-1] == own, key[0]
    return keep, joined


_CODES = {torch.int64: "q", torch.int32: "i", torch.uint8: "B", torch.float64: "d"}  # of `array`


def as_tensor(rows: Sequence[Sequence], dtype: torch.dtype, empty: float = 0, width: int | None = None) -> Tensor:
    """[B, width] of rows, filled up with ``empty``; for a few numbers twice as fast as `torch.tensor`.

    ``width`` is that of the longest row unless it is given.
    """
    width = max(map(len, rows), default=0) if width is None else width
    if not width or not rows:
        return torch.tensor([*rows], dtype=dtype)
    flat = chain.from_iterable((*row, *[empty] * (width - len(row))) for row in rows)
    return torch.frombuffer(array(_CODES[dtype], flat), dtype=dtype).view(len(rows), width)


def check_lists(batch: int, lists: Sequence[Sequence[Sequence]]) -> None:
    """Refuse lists that do not describe trees over ``batch`` roots.

    Args:
        lists: parents, tokens, sources and, where there are any, scores of the nodes below each root.

    Raises:
        ConfigError: a parent that does not come before its child, or lists of unequal length.
        TypeError, OverflowError: an entry that is no number of its kind.
    """
    lengths = [[*map(len, rows)] for rows in lists]
    if len(lengths[0]) != batch or any(a != b for a, b in pairwise(lengths)):
        raise ConfigError(
            f"trees of {batch} roots from lists of lengths {lengths}",
            "the lists do not describe the same nodes",
            "give for every root the parent, the token (and the score) of each node",
        )
    for code, rows in zip("qqBd", lists, strict=False):
        for row in rows:
            array(code, row)
    for row in lists[0]:
        if row != [*range(len(row))]:
            _check_parents(row)


def _check_parents(row: Sequence[int]) -> None:
    for node, parent in enumerate(row, start=1):
        if not 0 <= parent < node:
            raise ConfigError(
                f"node {node} below node {parent}",
                "a parent must come before its child",
                "list the nodes top down, the root is 0",
            )
