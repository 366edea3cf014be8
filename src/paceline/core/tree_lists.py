"""Token trees as plain lists of numbers: several times faster than tensor operations where nodes are few.

A tree is a list of parents: node 0 is the root with parent -1, every other parent is an earlier node. Batches are
lists of such trees, padded to one width where they become tensors.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import torch
from torch import Tensor

from .errors import ConfigError

PADDING = -1  # parents, node ids and path tokens of padding; token columns hold 0 there


@dataclass(frozen=True, slots=True, eq=False)
class TreeLists:
    """A batch of trees as plain lists, padding included."""

    tokens: list[list[int]]
    parents: list[list[int]]
    sources: list[list[int]]
    counts: list[int]  # real nodes of each, the root included


def depths_below(parents: Sequence[int]) -> list[int]:
    """Depth of node 1, 2, ... from the parent of each."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths[1:]


def padded_depths(parents: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[int]]:
    """Depth of every node, `PADDING` behind the last, from padded parents."""
    rows = zip(parents, counts, strict=True)
    return [[0, *depths_below(row[1:count]), *[PADDING] * (len(row) - count)] for row, count in rows]


def ancestor_mask(lists: TreeLists) -> Tensor:
    """[B, N, N] bool; see `TokenTree.ancestor_mask`."""
    width = len(lists.tokens[0])
    mask = torch.zeros(len(lists.counts), width, width, dtype=torch.bool)
    for rows, parents, count in zip(mask.numpy(), lists.parents, lists.counts, strict=True):
        for node in range(count):
            if node:
                rows[node] = rows[parents[node]]
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


def padded(rows: Sequence[Sequence], first: object, width: int, value: float) -> list[list]:
    """[B][width]: ``first`` (one for all or one a row), the row, then padding."""
    heads = first if isinstance(first, list) else [first] * len(rows)
    return [[head, *row, *([value] * (width - 1 - len(row)))] for head, row in zip(heads, rows, strict=True)]


_CODES = {torch.int64: "q", torch.int32: "i", torch.uint8: "B", torch.float64: "d"}  # of `array`


def as_tensor(rows: list[list], dtype: torch.dtype) -> Tensor:
    """Rows of equal length as a tensor, in half the time that `torch.tensor` takes for a few numbers."""
    if not rows or not rows[0]:
        return torch.tensor(rows, dtype=dtype)
    flat = rows[0] if len(rows) == 1 else chain.from_iterable(rows)
    return torch.frombuffer(array(_CODES[dtype], flat), dtype=dtype).view(len(rows), len(rows[0]))


def check_lists(batch: int, parents: Sequence, tokens: Sequence, *more: Sequence) -> None:
    """Refuse lists that do not describe trees over ``batch`` roots.

    Args:
        parents, tokens: of the nodes below each root.
        more: other lists with an entry a node.

    Raises:
        ConfigError: a parent that does not come before its child, or lists of unequal length.
    """
    lengths = [[len(row) for row in rows] for rows in (parents, tokens, *more)]
    if len(tokens) != batch or any(a != b for a, b in pairwise(lengths)):
        raise ConfigError(
            f"trees of {batch} roots from lists of lengths {lengths}",
            "the lists do not describe the same nodes",
            "give for every root the parent, the token (and the score) of each node",
        )
    for row in parents:
        for node, parent in enumerate(row, start=1):
            if not 0 <= parent < node:
                raise ConfigError(
                    f"node {node} below node {parent}",
                    "a parent must come before its child",
                    "list the nodes top down, the root is 0",
                )
