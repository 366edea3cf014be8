"""Scores of each place ahead, independent of the tokens drafted in front of it, and the product trees made of them.

A level is given by logits, or by its best tokens and their log q, where compiled code gave no more.
"""

from __future__ import annotations

import math
from collections import abc
from heapq import heappop, heappush

import torch
from torch import Tensor

from ..core.sequence import Sequence
from ..core.tree import TokenTree
from ..kernels.linear import top
from .base import Levels, LevelScores


def cut(scores: LevelScores, start: int, stop: int | None = None) -> LevelScores:
    """Return the levels from ``start`` to in front of ``stop``."""
    if isinstance(scores, tuple):
        return scores[0][start:stop], scores[1][start:stop]
    return scores[start:stop]


def best_levels(sets: abc.Sequence[tuple[Sequence, LevelScores]], k: int, coupled: bool) -> list[Levels]:
    """Return the k best tokens of each level and their log q, best first, in one call for all sequences.

    Args:
        sets: levels of each sequence; the first one is of the place after its text.
        k: tokens of a level; a level given by its best tokens has at least as many, or fewer in all.
        coupled: ranked with the noise of the target's own choices; levels given by their best tokens already are.
    """
    rows = []  # [levels, V]: the softmax of row j is the chance of what the target emits j places after the text
    for view, one in sets:
        if isinstance(one, Tensor):
            first = len(view.tokens)
            rows.append(view.sampler.ranked(one, (), range(first, first + len(one)), coupled))
    tokens, log_q = top(rows[0] if len(rows) == 1 else torch.cat(rows), k) if rows else ([], [])
    best, start = list[Levels](), 0
    for _, one in sets:
        if isinstance(one, Tensor):
            stop = start + len(one)
            best.append((tokens[start:stop], log_q[start:stop]))
            start = stop
        else:
            best.append(([row[:k] for row in one[0]], [row[:k] for row in one[1]]))
    return best


def product_trees(
    rows: abc.Sequence[tuple[Sequence, LevelScores | None, int]], k: int, coupled: bool, floor: float = 0.0
) -> list[TokenTree]:
    """For each sequence `best_nodes` of its levels; an empty tree where it has none.

    Args:
        rows: sequence, levels, nodes wanted.
        k, coupled: see `best_levels`.
        floor: see `best_nodes`.
    """
    levels = iter(best_levels([(view, scores) for view, scores, _ in rows if scores is not None], k, coupled))
    return [TokenTree() if scores is None else best_nodes(*next(levels), nodes, floor) for _, scores, nodes in rows]


def best_nodes(
    tokens: abc.Sequence[abc.Sequence[int]], log_q: abc.Sequence[abc.Sequence[float]], budget: int, floor: float = 0.0
) -> TokenTree:
    """Return the best nodes of the product tree, by the sum of log q along their path, best first.

    Args:
        tokens: [depth][k] tokens of each level, likeliest first.
        log_q: [depth][k] their log-probabilities, descending; -inf where a rule forbids the token.
        budget: nodes wanted.
        floor: chance of a path from which on nothing more is wanted; the best node always is.

    A node is reached from its parent (the first child) or from the sibling before it, neither of which has a
    smaller score; so a heap yields the nodes in order without listing the tree.
    """
    tree = TokenTree()
    add = tree.add
    most = -math.log(floor) if floor > 0 else math.inf
    depth, heap, order = len(tokens), [(-log_q[0][0], 0, 0, 0, 0)], 1  # (-score, order, parent, level, rank)
    while heap and len(tree.tokens) < budget:
        cost, _, parent, level, rank = heappop(heap)
        if cost == math.inf or (cost > most and tree.tokens):
            break
        node = add(parent, tokens[level][rank], -cost)
        row = log_q[level]
        if rank + 1 < len(row):
            heappush(heap, (cost + row[rank] - row[rank + 1], order, parent, level, rank + 1))
            order += 1
        if level + 1 < depth:
            heappush(heap, (cost - log_q[level + 1][0], order, node, level + 1, 0))
            order += 1
    return tree
