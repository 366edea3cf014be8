"""Verification: choose the accepted path, as pure functions of trees, the target's data at every node, and noise.

No model and no cache. ``p`` is the target's distribution and ``q`` the draft's, everywhere. Node n's row
of ``p`` (or its entry of ``chosen``) is the target's choice *after* node n.
Axis letters: B requests, N nodes, D depth, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .errors import CapabilityError, ConfigError
from .tree import PADDING, TokenTree, as_tensor

Accepted = tuple[list[int], int]
"""Of one tree: the accepted nodes from below the root down, and the target's next token (correction or bonus)."""

ResidualGumbel = Callable[[int, int], Tensor]
"""(request, node) -> [V] standard Gumbel noise for the token drawn after that node."""


def walk(tree: TokenTree, chosen: Sequence[int]) -> Accepted:
    """Follow one tree along the tokens that the target itself chose after each node (sample and match).

    It chooses by argmax, or by a draw from p with noise keyed by seed, sample index and position.
    Lossless for any tree at all: every emitted token is the target's own choice after the tokens before it, so the
    output is that of plain decoding with the same noise. One scan, since children come after their parents; of siblings
    with the same token the first is followed. A node after which nothing could be chosen (-1) is not entered.

    Source: Mirror-SD, eq. 3 and 11; SpecPipe, section 3.4.
    """
    path: list[int] = []
    frontier, want = 0, chosen[0]
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True), start=1):
        if parent == frontier and token == want and chosen[node] >= 0:
            path.append(node)
            frontier, want = node, chosen[node]
    return path, want


def rejection(
    trees: Sequence[TokenTree],
    p: Tensor,
    accept_uniform: Tensor,
    residual_gumbel: ResidualGumbel,
) -> list[Accepted]:
    """Speculative rejection sampling: the emitted tokens are distributed as p, whatever q is.

    Siblings are tried in index order, which is the order they were drawn in. Each is accepted with
    probability min(1, p(x) / q(x)); after a rejection p becomes norm(max(p - q, 0)), and q loses x and is
    renormalised. If all fail, the correction comes from the last p. Below a leaf the bonus comes from p itself.

    Args:
        trees: [B] sampled drafts; ``tree.q`` states what they were drawn from.
        p: [B, N, V] float, the target's distribution after each node; rows at padding are not read.
        accept_uniform: [B, N] in [0, 1), decides on each node.
        residual_gumbel: noise for the correction or bonus.

    Raises:
        CapabilityError: a tree has drafted nodes and no q.
        ConfigError: shapes that do not fit, or a node that q cannot have drawn.

    Source: Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2 (chains); Jeon et al. 2024 (recursive
    rejection sampling), section 3.1 (siblings without replacement).
    """
    drafts = _Drafts(trees, p, accept_uniform, residual_gumbel, "rejection sampling")
    if not drafts.depth:
        return drafts.stopped(torch.zeros_like(drafts.last), drafts.rows(0))
    return _reject_chain(drafts) if all(tree.is_chain for tree in trees) else _reject_tree(drafts)


def block(
    trees: Sequence[TokenTree],
    p: Tensor,
    accept_uniform: Tensor,
    residual_gumbel: ResidualGumbel,
) -> list[Accepted]:
    """Block verification: judges the drafted tokens of a chain jointly, and accepts the longest block.

    Distributed as p like `rejection`, and accepts at least as many tokens in expectation. The arguments
    are those of `rejection`.

    Raises:
        CapabilityError: a tree that is not a chain, or no q.
        ConfigError: shapes that do not fit, or a node that q cannot have drawn.

    Source: Sun et al. 2024, "Block Verification Accelerates Speculative Decoding", algorithm 2 and eq. 4.
    Where the paper's h is 0 / 0 (p and q agree after a fully accepted block) it is 1 here: the longer block is then
    accepted with certainty, so the value has no effect.
    """
    if not all(tree.is_chain for tree in trees):
        raise CapabilityError(
            "block verification of a token tree",
            "it is defined for chains, and this tree has branches",
            "let the drafter propose a chain, or verify with rejection or sample_and_match",
        )
    drafts = _Drafts(trees, p, accept_uniform, residual_gumbel, "block verification")
    if not drafts.depth:
        return drafts.stopped(torch.zeros_like(drafts.last), drafts.rows(0))
    return _block_chain(drafts)


# ---- rejection


class _Drafts:
    """Sampled drafts as tensors, next to what decides on them."""

    def __init__(
        self, trees: Sequence[TokenTree], p: Tensor, accept_uniform: Tensor, residual_gumbel: ResidualGumbel, what: str
    ) -> None:
        if any(len(tree) and not tree.q for tree in trees):
            raise CapabilityError(
                f"{what} of a tree without q",
                "it needs the distribution that every drafted node was drawn from, and either the draft was not"
                " sampled or q was dropped because a choice among the nodes changed the drawn set",
                "draft with sampled proposals within the budget, or verify with sample_and_match, which takes any tree",
            )
        size = len(trees), 1 + max(map(len, trees))
        if p.dim() != 3 or p.shape[:2] != size or accept_uniform.shape != size:
            raise ConfigError(
                f"{what} with p {tuple(p.shape)} and accept_uniform {tuple(accept_uniform.shape)}",
                f"the trees are {size[0]} x {size[1]} nodes",
                "give p as [B, N, V] and accept_uniform as [B, N]",
            )
        first = next((row for tree in trees for row in tree.q.values()), p)
        self.p, self.q = p, torch.zeros(p.shape, dtype=first.dtype, device=p.device)
        for b, tree in enumerate(trees):
            for node, row in tree.q.items():
                if row.shape != p.shape[2:]:
                    subject, wrong = f"{what} with q of shape {tuple(row.shape)}", f"p has {p.shape[2]} tokens"
                    raise ConfigError(subject, wrong, "give every node with children a row of q over all tokens")
                self.q[b, node] = row
        self.uniform, self.noise = accept_uniform.double(), residual_gumbel
        self.tokens = as_tensor([[0, *tree.tokens] for tree in trees], 0).to(p.device)  # [B, N]
        self.parents = as_tensor([[PADDING, *tree.parents] for tree in trees], PADDING).to(p.device)  # [B, N]
        self.last = torch.tensor([*map(len, trees)], device=p.device)  # [B] drafted nodes
        self.depth = max(tree.depth for tree in trees)
        self.batch = torch.arange(len(self.last), device=p.device)

    def rows(self, nodes: Tensor | int) -> Tensor:
        """Return [B, V] float64: p after ``nodes`` [B]."""
        return self.p[self.batch, nodes].double()

    def q_rows(self, nodes: Tensor | int) -> Tensor:
        """Return [B, V] float64: q after ``nodes`` [B]."""
        return self.q[self.batch, nodes].double()

    def token_probs(self) -> tuple[Tensor, Tensor]:
        """p and q of every drafted token below its parent, [B, N - 1] float64 each; 1 at padding."""
        parents, tokens = self.parents[:, 1:].clamp(min=0), self.tokens[:, 1:]
        drafted = self.parents[:, 1:] >= 0
        p_token = torch.where(drafted, self.p[self.batch[:, None], parents, tokens].double(), 1.0)
        q_token = torch.where(drafted, self.q[self.batch[:, None], parents, tokens].double(), 1.0)
        if not bool((q_token > 0.0).all()):
            b, node = ((q_token > 0.0).logical_not()).nonzero()[0].tolist()
            raise ConfigError(
                f"node {node + 1} of request {b} as a sampled draft",
                f"q gives its token {int(tokens[b, node])} no probability, so it was not drawn from q",
                "store the distribution that the drafter drew from, after temperature and truncation",
            )
        return p_token, q_token

    def stopped(self, count: Tensor, leftover: Tensor) -> list[Accepted]:
        """Return chains with the first ``count`` [B] nodes accepted, and the next token drawn from ``leftover``."""
        paths = [[*range(1, n + 1)] for n in count.tolist()]
        return [*zip(paths, _draw(leftover, count, self.noise), strict=True)]


def _reject_chain(drafts: _Drafts) -> list[Accepted]:
    """`rejection` of chains: only the row where acceptance stops needs a residual."""
    p_token, q_token = drafts.token_probs()  # [B, D] each
    ok = (drafts.parents[:, 1:] >= 0) & (drafts.uniform[:, 1:] * q_token < p_token)
    count = ok.long().cumprod(dim=1).sum(dim=1)  # [B], the frontier of a chain is the node of that number
    p_row = drafts.rows(count)
    residual = _positive_part(p_row, drafts.q_rows(count))
    return drafts.stopped(count, torch.where((count == drafts.last)[:, None], p_row, residual))


def _reject_tree(drafts: _Drafts) -> list[Accepted]:
    """`rejection` of trees: one pass a level over the siblings below the frontier."""
    drafts.token_probs()  # refuses nodes that q cannot have drawn
    frontier = torch.zeros_like(drafts.last)
    alive = torch.ones_like(frontier, dtype=torch.bool)
    leftover = drafts.rows(frontier)
    paths: list[list[int]] = [[] for _ in drafts.last]
    for _ in range(drafts.depth):
        target, draft = drafts.rows(frontier), drafts.q_rows(frontier)  # [B, V] each
        siblings = drafts.parents == frontier[:, None]  # [B, N]
        accepted = torch.zeros_like(alive)
        for _ in range(int(siblings.sum(dim=1).max())):
            is_open = alive & ~accepted & siblings.any(dim=1)
            child = siblings.int().argmax(dim=1)  # the first one left, in the order of the draw
            siblings = siblings.scatter(1, child[:, None], False)
            token = drafts.tokens.gather(1, child[:, None])  # [B, 1]
            chance = drafts.uniform.gather(1, child[:, None]) * draft.gather(1, token) < target.gather(1, token)
            chosen = is_open & chance.squeeze(1)
            refused = (is_open & ~chosen)[:, None]
            frontier = torch.where(chosen, child, frontier)
            accepted = accepted | chosen
            target = torch.where(refused, _positive_part(target, draft), target)
            draft = torch.where(refused, _without(draft, token), draft)
        leftover = torch.where((alive & ~accepted)[:, None], target, leftover)
        alive = alive & accepted
        leftover = torch.where(alive[:, None], drafts.rows(frontier), leftover)
        for path, node, goes_on in zip(paths, frontier.tolist(), alive.tolist(), strict=True):
            path += [node] * goes_on
        if not bool(alive.any()):
            break
    return [*zip(paths, _draw(leftover, frontier, drafts.noise), strict=True)]


# ---- block verification


def _block_chain(drafts: _Drafts) -> list[Accepted]:
    p_token, q_token = drafts.token_probs()  # [B, D] each
    last, p_root = drafts.last, drafts.rows(0)
    joint = torch.ones_like(last, dtype=torch.float64)  # the paper's p_i
    leftover = torch.where((last == 0)[:, None], p_root, _positive_part(p_root, drafts.q_rows(0)))
    count = torch.zeros_like(last)
    for i in range(1, drafts.depth + 1):
        joint = (joint * p_token[:, i - 1] / q_token[:, i - 1]).clamp(max=1.0)
        target = drafts.rows(i)
        residual = (joint[:, None] * target - drafts.q_rows(i)).clamp(min=0.0)  # [B, V]
        mass = residual.sum(dim=1)
        denominator = mass + 1.0 - joint
        inner = torch.where(denominator > 0.0, mass / denominator, 1.0)
        h = torch.where(last == i, joint, inner)
        ok = (i <= last) & (drafts.uniform[:, i] < h)
        count = torch.where(ok, i, count)
        after = torch.where(((last == i) | (mass <= 0.0))[:, None], target, residual)
        leftover = torch.where(ok[:, None], after, leftover)
    return drafts.stopped(count, leftover)


# ---- shared parts


def _positive_part(p: Tensor, q: Tensor) -> Tensor:
    """Return [B, V]: norm(max(p - q, 0)); p itself where nothing is left, which only rounding can reach."""
    residual = (p - q).clamp_(min=0.0)
    mass = residual.sum(dim=1, keepdim=True)
    return torch.where(mass > 0.0, residual / mass, p)


def _without(q: Tensor, token: Tensor) -> Tensor:
    """Return [B, V]: q given that it is not ``token`` [B, 1]."""
    q = q.scatter(1, token, 0.0)
    return q / q.sum(dim=1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)


def _draw(weights: Tensor, nodes: Tensor, residual_gumbel: ResidualGumbel) -> list[int]:
    """Return [B] one token a request in proportion to ``weights`` [B, V], by Gumbel-max."""
    noise = torch.stack([residual_gumbel(b, node) for b, node in enumerate(nodes.tolist())])
    return (weights.log() + noise.to(weights)).argmax(dim=1).tolist()
