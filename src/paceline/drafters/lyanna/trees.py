"""Token trees from a chain of logits: token-info sampling, and naive beam sampling beside it.

The logits of a level do not depend on the tokens drafted in front of it; what a parent's token says about its children
is a bias on them (`token_info`). So one chain of logits gives a whole tree, and another tree when the true token is
known.

Source: Lyanna, section 5.2 (Algorithm 1, naive beam sampling).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..proposal import Proposal, best_nodes

# Tokens [n] -> what each says about the logits of its children, [n, V]; None: nothing, for all
Bias = Callable[[Sequence[int]], "Tensor | None"]
# (logits [n, V], the drafted tokens up to each node, their depths) -> what children are ranked by, [n, V]
Rule = Callable[[Tensor, list[list[int]], list[int]], Tensor]


@dataclass(slots=True)
class LevelChain:
    """The logits of a draft's levels, and the tree that is made of them."""

    root: int  # token that the first level follows
    logits: Tensor  # [levels, V] raw: without any token's info
    rule: Rule | None = None  # sampling rules and noise; None: the logits themselves
    tree: Proposal = field(default_factory=Proposal)  # its scores are cumulative log q
    queue: list[int] = field(default_factory=lambda: [0])  # Q of Algorithm 1: nodes to give children to

    def token(self, node: int) -> int:
        """Of a node; 0 is the root."""
        return self.tree.tokens[node - 1] if node else self.root

    def path(self, node: int) -> list[int]:
        """Drafted tokens from below the root to ``node``."""
        tokens: list[int] = []
        while node:
            tokens.append(self.tree.tokens[node - 1])
            node = self.tree.parents[node - 1]
        return tokens[::-1]


def token_info_sampling(chains: Sequence[LevelChain], bias: Bias, branches: int) -> None:
    """Algorithm 1 for several sequences at once: level by level the ``branches`` likeliest children of every node of Q,
    and of all of them the ``branches`` with the highest joint probability are the next Q.

    The trees are whole ones; `Proposal.best` cuts one to a verification budget: the nodes with the highest cumulative
    probability, which holds every kept node's parent, since no node is likelier than its parent.

    Args:
        chains: their trees are filled.
        bias: token-info.
        branches: k.
    """
    for level in range(max((len(chain.logits) for chain in chains), default=0)):
        alive = [chain for chain in chains if level < len(chain.logits) and chain.queue]
        if not alive:
            return
        parents = [chain.token(node) for chain in alive for node in chain.queue]
        infos = bias(parents)
        counts = [len(chain.queue) for chain in alive]
        parts = [None] * len(alive) if infos is None else infos.split(counts)
        scores = [_scores(chain, level, part) for chain, part in zip(alive, parts, strict=True)]
        log_q = torch.cat(scores).log_softmax(-1)  # [nodes of all queues, V]
        best = log_q.topk(min(branches, log_q.shape[1]), dim=-1)
        rows = iter(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        for chain in alive:
            _grow(chain, [next(rows) for _ in chain.queue], branches)


def _scores(chain: LevelChain, level: int, info: Tensor | None) -> Tensor:
    """[len(queue), V] what the children of the nodes in Q are ranked by."""
    raw = chain.logits[level]
    logits = raw.expand(len(chain.queue), -1) if info is None else raw + info
    if chain.rule is None:
        return logits
    return chain.rule(logits, [chain.path(node) for node in chain.queue], [level] * len(chain.queue))


def _grow(chain: LevelChain, rows: Sequence[tuple[list[int], list[float]]], branches: int) -> None:
    """Children of the nodes in Q, and the next Q."""
    tree, fresh = chain.tree, []
    for node, (tokens, values) in zip(chain.queue, rows, strict=True):
        above = tree.log_scores[node - 1] if node else 0.0
        for token, value in zip(tokens, values, strict=True):
            if value > -math.inf:  # else a rule forbids it
                fresh.append(tree.add(node, token, above + value))
    chain.queue = sorted(sorted(fresh, key=lambda node: (-tree.log_scores[node - 1], node))[:branches])


def beam_sampling(logits: Tensor, width: int, budget: int) -> Proposal:
    """The naive way (section 5.2): the ``budget`` paths with the highest product of probabilities, levels independent.

    Args:
        logits: [levels, V] raw.
        width: tokens of a level that are looked at.
    """
    if not len(logits):
        return Proposal()
    best = logits.log_softmax(-1).topk(min(width, logits.shape[1]), dim=-1)
    return best_nodes(best.indices.tolist(), best.values.tolist(), budget)
