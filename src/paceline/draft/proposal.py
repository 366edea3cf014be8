"""The draft of a drafter for one sequence. `to_tree` makes one `TokenTree` of a batch of them, for the pass.

Drafts of several drafters are merged (`graft`), ranked and cut (`best`) before that, and compared by
`expected_accepted`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf, log

import torch
from torch import Tensor

from ..core.tree import TokenTree, depths_below


@dataclass(slots=True)
class Proposal:
    """Drafted nodes of one sequence, parents before children; the root is not among them."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # tree index of each parent: 0 the root, i + 1 for tokens[i]
    log_scores: list[float] = field(default_factory=list)  # log of the estimated chance that the path is accepted
    matched: int = 0  # tokens of context that the proposal rests on, where that is counted
    sources: list[int] = field(default_factory=list)  # which source proposed each node; empty: source 0 all of them
    q: dict[int, Tensor] = field(default_factory=dict)  # tree index -> [V] what its child was drawn from, if it was

    @staticmethod
    def chain(tokens: list[int], chance: float) -> Proposal:
        """Return tokens one after the other, each of them as likely, given the one before it."""
        step = log(chance)
        return Proposal(tokens, [*range(len(tokens))], [(i + 1) * step for i in range(len(tokens))])

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, log_score: float) -> int:
        """Append a node; returns its tree index."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.log_scores.append(log_score)
        return len(self.tokens)

    def ranked(self, budget: int) -> list[int]:
        """Return indices in ``tokens`` of the ``budget`` best scored nodes, ascending; of equals the earlier ones."""
        return sorted(sorted(range(len(self.tokens)), key=lambda i: (-self.log_scores[i], i))[:budget])

    def best(self, budget: int) -> Proposal:
        """Return the ``budget`` best scored nodes, in their order. No node may have a better score than its parent."""
        return self if len(self.tokens) <= budget else self.subset(self.ranked(budget))

    def subset(self, indices: Sequence[int]) -> Proposal:
        """Return the nodes at these indices in ``tokens``, ascending; a node's parent is among them."""
        moved = {0: 0} | {i + 1: node for node, i in enumerate(indices, start=1)}
        return Proposal(
            [self.tokens[i] for i in indices],
            [moved[self.parents[i]] for i in indices],
            [self.log_scores[i] for i in indices],
            self.matched,
            [self.sources[i] for i in indices] if self.sources else [],
        )

    def graft(self, other: Proposal, source: int) -> None:
        """Add the nodes of another proposal below the same root; equal paths become one node, which keeps its score.

        A new node's chance given its parent is the other proposal's, and its source is ``source``.
        """
        self.sources += [0] * (len(self) - len(self.sources))
        if not self.tokens:
            self.tokens, self.parents, self.log_scores = other.tokens[:], other.parents[:], other.log_scores[:]
            self.sources = [source] * len(self)
            return
        children = {(p, t): i + 1 for i, (p, t) in reversed([*enumerate(zip(self.parents, self.tokens, strict=True))])}
        moved = {0: 0}
        for i, (parent, token, score) in enumerate(zip(other.parents, other.tokens, other.log_scores, strict=True)):
            place = moved[parent]
            node = children.get((place, token))
            if node is None:
                log_q = score - (other.log_scores[parent - 1] if parent else 0.0)
                above = self.log_scores[place - 1] if place else 0.0
                node = children[place, token] = self.add(place, token, above + log_q)
                self.sources.append(source)
            moved[i + 1] = node

    @property
    def is_chain(self) -> bool:
        """Return whether every node is the child of the one before."""
        return self.parents == list(range(len(self.parents)))

    @property
    def depth(self) -> int:
        """Return the depth of the deepest node; 0: there is none."""
        return max(depths_below(self.parents), default=0)

    @property
    def expected_accepted(self) -> float:
        """Return expected number of accepted tokens by the estimates: the sum of the nodes' path probabilities.

        Source: SuffixDecoding (arXiv 2411.04975), the score of a speculation tree.
        """
        return sum(map(math.exp, self.log_scores))


def to_tree(root_tokens: Sequence[int], proposals: Sequence[Proposal], *, trusted: bool = False) -> TokenTree:
    """Return one tree a sequence.

    Args:
        root_tokens: [B] the last committed token of each sequence.
        proposals: [B] drafted nodes of each.
        trusted: see `TokenTree.from_parents`.
    """
    columns = [p.parents for p in proposals], [p.tokens for p in proposals]
    sources = [p.sources or [0] * len(p.tokens) for p in proposals]
    scores = [p.log_scores for p in proposals]
    tree = TokenTree.from_parents(root_tokens, *columns, sources, scores, trusted=trusted)
    drawn = next((row for p in proposals for row in p.q.values()), None)
    if drawn is not None:
        tree.q = torch.zeros(len(tree.counts), max(tree.counts), len(drawn), dtype=drawn.dtype)
        for b, p in enumerate(proposals):
            for node, row in p.q.items():
                tree.q[b, node] = row
    return tree


def best_nodes(
    tokens: Sequence[Sequence[int]], log_q: Sequence[Sequence[float]], budget: int, floor: float = 0.0
) -> Proposal:
    """Return the best nodes of the product tree, by the sum of log q along their path, best first.

    Args:
        tokens: [depth][k] tokens of each level, likeliest first.
        log_q: [depth][k] their log-probabilities, descending; -inf where a rule forbids the token.
        budget: nodes wanted.
        floor: chance of a path from which on nothing more is wanted; the best node always is.

    A node is reached from its parent (the first child) or from the sibling before it, neither of which has a
    smaller score; so a heap yields the nodes in order without listing the tree.
    """
    proposal = Proposal()
    add = proposal.add
    most = -log(floor) if floor > 0 else inf
    depth, heap, order = len(tokens), [(-log_q[0][0], 0, 0, 0, 0)], 1  # (-score, order, parent, level, rank)
    while heap and len(proposal.tokens) < budget:
        cost, _, parent, level, rank = heappop(heap)
        if cost == inf or (cost > most and proposal.tokens):
            break
        node = add(parent, tokens[level][rank], -cost)
        row = log_q[level]
        if rank + 1 < len(row):
            heappush(heap, (cost + row[rank] - row[rank + 1], order, parent, level, rank + 1))
            order += 1
        if level + 1 < depth:
            heappush(heap, (cost - log_q[level + 1][0], order, node, level + 1, 0))
            order += 1
    return proposal
