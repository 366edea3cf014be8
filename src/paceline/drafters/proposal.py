"""What a drafter that works on token ids proposes, in plain Python, until the batch's tree is built.

One `Proposal` a sequence; `to_tree` turns a batch of them into one `TokenTree`. Proposals of several
drafters can be compared by `expected_accepted` before any tensor exists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..core.tree import TokenTree


@dataclass(slots=True)
class Proposal:
    """Drafted nodes of one sequence, parents before children; the root is not among them."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # tree index of each parent: 0 the root, i + 1 for tokens[i]
    log_scores: list[float] = field(default_factory=list)  # log of the estimated chance that the path is accepted

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, log_score: float) -> int:
        """Append a node; returns its tree index."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.log_scores.append(log_score)
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether every node is the child of the one before."""
        return self.parents == list(range(len(self.parents)))

    @property
    def expected_accepted(self) -> float:
        """Drafted tokens that the estimates expect to be accepted: a node counts with its path's chance.

        Source: SuffixDecoding (arXiv 2411.04975), the score of a speculation tree.
        """
        return sum(map(math.exp, self.log_scores))


def to_tree(root_tokens: Sequence[int], proposals: Sequence[Proposal], source: int = 0) -> TokenTree:
    """One tree a sequence, on the CPU.

    Args:
        root_tokens: [B] the last committed token of each sequence.
        proposals: [B] drafted nodes of each.
        source: who proposed them, for statistics.

    Returns:
        [B, N] with N = 1 + the largest proposal; ``log_score`` is set.
    """
    if len(proposals) == 1 and proposals[0].is_chain:  # the hot case, at half the cost of the general one
        only = proposals[0]
        scores = torch.tensor([[0.0, *only.log_scores]], dtype=torch.float64)
        return TokenTree.from_chain(torch.tensor([[*root_tokens, *only.tokens]]), None, source, scores)
    return TokenTree.from_parents(
        root_tokens,
        [p.parents for p in proposals],
        [p.tokens for p in proposals],
        source,
        [p.log_scores for p in proposals],
    )
