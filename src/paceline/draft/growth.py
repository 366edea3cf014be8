"""Growing a draft tree level by level, from the logits after its last nodes: what all drafters with a network share.

Three shapes: a chain; a static tree, with so many children a level (SpecInfer, Miao et al. 2024); a dynamic one, of the
top-k children of the best nodes (EAGLE-2, Li et al. 2024b, section 4.1), of which `TokenTree.best` keeps the best by
cumulative probability (its re-ranking, section 4.2).
"""

from __future__ import annotations

import math
from collections import abc
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from ..core.sequence import Sequence
from ..core.tree import TokenTree, padded_paths
from ..kv.pool import SequenceCache

NONE = torch.empty(0)


@dataclass(slots=True)
class Growth:
    """One sequence's tree while it grows."""

    sequence: Sequence
    budget: int
    max_depth: int
    tree: TokenTree = field(default_factory=TokenTree)
    frontier: list[int] = field(default_factory=lambda: [0])  # nodes to expand next
    cache: SequenceCache | None = None  # the target's K/V of the text, where the target's layers draft
    logits: Tensor = NONE  # [levels, V] raw, where a whole tree is made of a draft's levels

    @property
    def rules(self) -> bytes | None:
        """Return how compiled code draws coupled drafts; None: the likeliest tokens."""
        sampler = self.sequence.sampler
        return None if sampler.plain else sampler.rules

    def add(self, parent: int, token: int, log_q: float) -> int:
        """Append a child; returns its node."""
        return self.tree.add(parent, token, self.tree.score(parent) + log_q)

    def path(self, node: int) -> list[int]:
        """Return the tokens from below the root to ``node``."""
        return [self.tree.tokens[n - 1] for n in self.tree.path(node)]

    def token(self, node: int) -> int:
        """Return the token of a node; the root's is the text's last."""
        return self.tree.tokens[node - 1] if node else self.sequence.tokens[-1]

    def follow(self, chain: abc.Sequence[tuple[int, float]]) -> None:
        """Append a chain below the root: tokens and their log q."""
        for node, (token, log_q) in enumerate(chain):
            self.add(node, token, log_q)


@dataclass(frozen=True, slots=True)
class Grower:
    """The shape of trees, and how children are picked."""

    factors: tuple[int, ...]  # children a level of a static tree or chain
    topk: int = 1  # of a dynamic tree children of a node, and nodes of a level that are expanded; 1: a static one
    proposes: Literal["point", "coupled", "sampled"] = "point"
    floor: float = -math.inf  # score of a path that is expanded at least

    def bounded(self, floor: float) -> Grower:
        """Return the same shape with a floor, where tokens are not drawn: the draw must not decide what is drawn."""
        return replace(self, floor=-math.inf if self.proposes == "sampled" else floor)

    def grow(self, growths: abc.Sequence[Growth], forward: abc.Callable[[abc.Sequence[Growth]], Tensor]) -> int:
        """Grow all trees, a pass a level; returns the passes that it took.

        Args:
            growths: new ones.
            forward: [frontier nodes of all, V] the logits after the frontiers of growths that have one.
        """
        level = 0
        while growths:
            self.expand(growths, forward(growths), level)
            growths = [growth for growth in growths if growth.frontier]
            level += 1
        return level

    def expand(self, growths: abc.Sequence[Growth], logits: Tensor, level: int) -> None:
        """Children of every frontier node, from the logits after it; then choose the next frontier.

        Args:
            logits: [frontier nodes of all, V].
            level: 0 for the root's children.
        """
        children = self.topk if self.topk > 1 else self.factors[level]
        scores = self._scores(growths, logits)  # [frontier nodes, V]
        rows = iter(likeliest(scores, children))
        for growth in growths:
            fresh: list[int] = []
            # Later levels are grown only where they fit; of the first one, what fits.
            most = growth.budget if level == 0 and self.topk == 1 else children
            for node in growth.frontier:
                fresh += [growth.add(node, token, log_q) for token, log_q in next(rows)[:most]]
            growth.frontier = self._next_frontier(growth, fresh, level + 1)

    def _scores(self, growths: abc.Sequence[Growth], logits: Tensor) -> Tensor:
        """Return what children are ranked by; its softmax is the chance that a child is the target's choice."""
        if all(g.sequence.sampler.plain for g in growths) and self.proposes != "sampled":
            return logits
        parts = zip(growths, logits.split([len(growth.frontier) for growth in growths]), strict=True)
        return torch.cat([self._sequence_scores(growth, part) for growth, part in parts if growth.frontier])

    def _sequence_scores(self, growth: Growth, logits: Tensor) -> Tensor:
        sampler = growth.sequence.sampler
        paths = [growth.path(node) for node in growth.frontier]
        positions = [len(growth.sequence.tokens) + len(path) for path in paths]
        if self.proposes != "sampled":
            return sampler.ranked(logits, paths, positions, self.proposes == "coupled")
        probs = sampler.probs(logits, padded_paths(paths, logits.device))  # [n, V]
        growth.tree.q.update(zip(growth.frontier, probs, strict=True))
        return probs.log() + sampler.draft_noise(positions, growth.frontier, logits.device)

    def _next_frontier(self, growth: Growth, fresh: list[int], level: int) -> list[int]:
        """Return the nodes worth expanding: within depth and budget, likely enough, the best few of a dynamic tree."""
        if level >= growth.max_depth:
            return []
        if self.topk > 1:
            fresh = sorted(fresh, key=growth.tree.score, reverse=True)[: self.topk]
        else:
            following = len(growth.tree) + len(fresh) * self.factors[level]
            if following > growth.budget:
                return []
        return sorted(node for node in fresh if growth.tree.score(node) >= self.floor)


def compiles(growths: abc.Sequence[Growth], proposes: str) -> bool:
    """Return whether compiled code can choose the drafts' tokens: likeliest ones, or coupled ones."""
    samplers = [growth.sequence.sampler for growth in growths]
    return proposes != "sampled" and all(s.plain or (s.draws and proposes == "coupled") for s in samplers)


def likeliest(scores: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """Return the best children of each row of ``scores`` [rows, V] and their log q, best first.

    Fewer than ``count`` where rules forbid the others.
    """
    log_q = scores.log_softmax(dim=-1)
    # Of equals `topk` takes any; a chain takes the one that the drafter takes elsewhere.
    best = log_q.max(dim=-1, keepdim=True) if count == 1 else log_q.topk(min(count, log_q.shape[-1]), dim=-1)
    rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [[pair for pair in zip(*row, strict=True) if pair[1] > -math.inf] for row in rows]
