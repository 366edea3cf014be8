"""Verification: which drafted path is accepted, as pure functions of a tree, the target's data at every node, and
noise.

No model and no cache. ``p`` is the target's distribution and ``q`` the draft's, everywhere. Node n's row
of ``p`` (or its entry of ``chosen``) is the target's choice *after* node n.
Axis letters: B requests, N nodes, D depth, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import CapabilityError, ConfigError
from .tree import SparseQ, TokenTree

# Up to here a walk over plain lists beats tensor code on the CPU (a node costs about 0.05 us, an op 1 to 5).
_LIST_WALK_NODES = 1024

ResidualGumbel = Callable[[int, int], Tensor]
"""(request, node) -> [V] standard Gumbel noise for the token drawn after that node."""


@dataclass(frozen=True, slots=True, eq=False)
class VerifyOutcome:
    """The accepted nodes of each tree, and the target's next token."""

    path: Tensor  # [B, D] int64  accepted nodes from the root down, root excluded, -1 padded; D >= 1
    num_accepted: Tensor  # [B] int64  drafted tokens accepted; the next token is not counted
    next_token: Tensor  # [B] int64  correction or bonus, the candidate for the next root
    frontier: Tensor  # [B] int64  node at which acceptance stopped


def sample_and_match(tree: TokenTree, chosen: Tensor) -> VerifyOutcome:
    """Follow each tree along the tokens that the target itself chose.

    Lossless for any tree at all: every emitted token is the target's own choice after the tokens before
    it, so the output is that of plain decoding with the same noise. The tree decides only how many tokens are emitted
    at once. Of siblings with the same token the first is followed.

    Args:
        tree: the candidates.
        chosen: [B, N] int64, the target's choice after each node (argmax, or a draw from p with noise
            keyed by seed, sample index and position); entries at padding are not read.

    Raises:
        ConfigError: ``chosen`` has another shape than the tree.

    Source: Mirror-SD, eq. 3 and 11; SpecPipe, section 3.4.
    """
    if chosen.shape != tree.tokens.shape:
        raise ConfigError(
            f"choices of shape {tuple(chosen.shape)} for trees of shape {tuple(tree.tokens.shape)}",
            "the target's choice is needed after every node",
            "give one token a node, padding included",
        )
    if chosen.device.type == "cpu" and chosen.numel() <= _LIST_WALK_NODES:
        return _match_lists(tree, chosen)
    return _match_tensors(tree, chosen)


def rejection(
    tree: TokenTree,
    p: Tensor,
    accept_uniform: Tensor,
    residual_gumbel: ResidualGumbel,
) -> VerifyOutcome:
    """Speculative rejection sampling: the emitted tokens are distributed as p, whatever q is.

    Siblings are tried in index order, which is the order they were drawn in. Each is accepted with
    probability min(1, p(x) / q(x)); after a rejection p becomes norm(max(p - q, 0)) and, if siblings were
    drawn without replacement, q loses x and is renormalised. If all fail, the correction comes from the
    last p. Below a leaf the bonus comes from p itself.

    Args:
        tree: sampled drafts; ``tree.q`` says what they were drawn from.
        p: [B, N, V] float, the target's distribution after each node; rows at padding are not read.
        accept_uniform: [B, N] in [0, 1), decides on each node.
        residual_gumbel: noise for the correction or bonus.

    Raises:
        CapabilityError: the tree has drafted nodes and no q.
        ConfigError: shapes that do not fit, or a node that q cannot have drawn.

    Source: Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2 (chains); Miao et al. 2024
    (SpecInfer), algorithm 2 (siblings with replacement); Jeon et al. 2024 (recursive rejection sampling),
    section 3.1 (siblings without).
    """
    _check_rejection(tree, p, accept_uniform, "rejection sampling")
    if tree.q is None:
        return _bonus_only(p, residual_gumbel)
    if tree.is_chain:
        return _reject_chain(tree, tree.q, p, accept_uniform, residual_gumbel)
    return _reject_tree(tree, tree.q, p, accept_uniform, residual_gumbel)


def block(
    tree: TokenTree,
    p: Tensor,
    accept_uniform: Tensor,
    residual_gumbel: ResidualGumbel,
) -> VerifyOutcome:
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
    if not tree.is_chain:
        raise CapabilityError(
            "block verification of a token tree",
            "it is defined for chains, and this tree has branches",
            "let the drafter propose a chain, or verify with rejection or sample_and_match",
        )
    _check_rejection(tree, p, accept_uniform, "block verification")
    if tree.q is None:
        return _bonus_only(p, residual_gumbel)
    return _block_chain(tree, tree.q, p, accept_uniform, residual_gumbel)


def lossy_stream_rejection(
    tree: TokenTree,
    p: Tensor,
    accept_uniform: Tensor,
    residual_gumbel: ResidualGumbel,
) -> VerifyOutcome:
    """The rejection rule of Speculative Streaming on a tree of likeliest tokens. Lossy: the output is not p's.

    A node is accepted with probability min(1, p(x) / q(x)), where q is its stream's distribution; of the accepted paths
    the longest one is emitted (of equals the first), and the next token is drawn from p after it. On a tree that was
    not drawn from q this shifts the output towards likely tokens.

    Args:
        tree: drafts with ``log_score``; log q of a node is its score less its parent's.
        p, accept_uniform, residual_gumbel: as for `rejection`.

    Raises:
        ConfigError: a tree with drafted nodes and no scores, or shapes that do not fit.

    Source: Speculative Streaming, eq. 9 and appendix F.
    """
    if tree.log_score is None:
        if bool((tree.num_nodes > 1).any()):
            raise ConfigError(
                "stream rejection of a tree without log_score",
                "it needs the streams' probability of every node",
                "draft with streams, or verify with sample_and_match",
            )
        return _bonus_only(p, residual_gumbel)
    _check_shapes(tree, p, accept_uniform, "stream rejection")
    parents = tree.parents.long().clamp(min=0)
    batch = torch.arange(len(parents), device=p.device)[:, None]
    q_token = (tree.log_score - tree.log_score.gather(1, parents)).double().exp()  # [B, N]
    p_token = p[batch, parents, tree.tokens].double()
    kept = tree.real() & (accept_uniform.double() * q_token < p_token)  # [B, N]
    kept[:, 0] = True
    mask = tree.ancestor_mask()  # [B, N, N]
    whole = (kept[:, None, :] | ~mask).all(dim=2) & tree.real()
    depths = torch.where(whole, tree.depths(), -1)
    frontier = depths.argmax(dim=1)  # the first of the deepest
    path = _path_to(frontier, mask, max(1, tree.bound()))
    next_token = _draw(_rows(p, frontier), frontier, residual_gumbel)
    return VerifyOutcome(path, (path >= 0).sum(dim=1), next_token, frontier)


def _path_to(nodes: Tensor, mask: Tensor, depth: int) -> Tensor:
    """[B, depth] int64: drafted nodes from the root down to ``nodes`` [B], -1 padded."""
    width = mask.shape[1]
    index = torch.arange(width, device=mask.device)
    lineage = mask[torch.arange(len(nodes), device=mask.device), nodes] & (index > 0)  # [B, N]
    found = torch.where(lineage, index, width).sort(dim=1).values[:, :depth]
    return torch.where(found < width, found, -1)


# ---- sample and match


def _match_lists(tree: TokenTree, chosen: Tensor) -> VerifyOutcome:
    """`sample_and_match` over plain lists: one scan a tree, since children come after their parents."""
    paths: list[list[int]] = []
    next_tokens: list[int] = []
    frontiers: list[int] = []
    lists = tree.lists()
    for tokens, parents, wants in zip(lists.tokens, lists.parents, chosen.tolist(), strict=True):
        frontier = 0
        want = wants[0]
        path = []
        for node in range(1, len(tokens)):
            if parents[node] == frontier and tokens[node] == want:
                frontier = node
                want = wants[node]
                path.append(node)
        paths.append(path)
        next_tokens.append(want)
        frontiers.append(frontier)
    lengths = [len(path) for path in paths]
    width = max(lengths, default=0) or 1
    return VerifyOutcome(
        path=torch.tensor([path + [-1] * (width - len(path)) for path in paths]).view(len(paths), width),
        num_accepted=torch.tensor(lengths),
        next_token=torch.tensor(next_tokens),
        frontier=torch.tensor(frontiers),
    )


def _match_tensors(tree: TokenTree, chosen: Tensor) -> VerifyOutcome:
    """`sample_and_match` without waiting for the device: link every node to its matching child, then walk."""
    width = tree.tokens.shape[1]
    parents = tree.parents.long().clamp(min=0)
    matches = (tree.parents >= 0) & (tree.tokens == chosen.gather(1, parents))  # [B, N]
    index = torch.arange(width, device=chosen.device).expand(parents.shape)
    # The first matching child of each node; a node without one links to itself.
    candidates = torch.where(matches, index, width)
    link = torch.full_like(parents, width).scatter_reduce_(1, parents, candidates, "amin")
    link = torch.where(link < width, link, index)
    node = parents.new_zeros(len(parents), 1)
    steps = [node]
    for _ in range(max(1, tree.bound())):
        node = link.gather(1, node)
        steps.append(node)
    walk = torch.cat(steps, dim=1)  # [B, D + 1]
    path = torch.where(walk[:, 1:] != walk[:, :-1], walk[:, 1:], -1)
    return VerifyOutcome(path, (path >= 0).sum(dim=1), chosen.gather(1, node).squeeze(1), node.squeeze(1))


# ---- rejection


def _reject_chain(
    tree: TokenTree, q: SparseQ, p: Tensor, accept_uniform: Tensor, residual_gumbel: ResidualGumbel
) -> VerifyOutcome:
    """`rejection` of chains: only the row where acceptance stops needs a residual."""
    drafted = tree.real()[:, 1:]  # [B, D]
    p_token, q_token = _token_probs(tree, q, p)  # [B, D] each
    ok = drafted & (accept_uniform[:, 1:].double() * q_token < p_token)
    num_accepted = ok.long().cumprod(dim=1).sum(dim=1)  # [B]
    p_row = _rows(p, num_accepted)  # the frontier of a chain is the node of that number
    residual = _positive_part(p_row, q.rows(num_accepted, p.shape[2]))
    at_leaf = num_accepted == tree.num_nodes - 1
    leftover = torch.where(at_leaf[:, None], p_row, residual)
    return _chain_outcome(num_accepted, leftover, tree.bound(), residual_gumbel)


def _reject_tree(
    tree: TokenTree, q: SparseQ, p: Tensor, accept_uniform: Tensor, residual_gumbel: ResidualGumbel
) -> VerifyOutcome:
    """`rejection` of trees: one pass a level over the siblings below the frontier."""
    batch, width = tree.tokens.shape
    vocab_size = p.shape[2]
    _token_probs(tree, q, p)  # refuses nodes that q cannot have drawn
    uniform = accept_uniform.double()
    frontier = torch.zeros(batch, dtype=torch.int64, device=p.device)
    alive = torch.ones(batch, dtype=torch.bool, device=p.device)
    leftover = _rows(p, frontier)
    steps = []
    most_children = _most_children(tree)
    for _ in range(tree.bound()):
        target, draft = _rows(p, frontier), q.rows(frontier, vocab_size)  # [B, V] each
        siblings = tree.parents == frontier[:, None]  # [B, N]
        accepted = torch.zeros_like(alive)
        for _ in range(most_children):
            is_open = alive & ~accepted & siblings.any(dim=1)
            child = siblings.int().argmax(dim=1)  # the first one left, in the order of the draw
            siblings = siblings.scatter(1, child[:, None], False)
            token = tree.tokens.gather(1, child[:, None])  # [B, 1]
            chance = uniform.gather(1, child[:, None]) * draft.gather(1, token) < target.gather(1, token)
            taken = is_open & chance.squeeze(1)
            refused = (is_open & ~taken)[:, None]
            frontier = torch.where(taken, child, frontier)
            accepted = accepted | taken
            target = torch.where(refused, _positive_part(target, draft), target)
            if not q.replacement:
                draft = torch.where(refused, _without(draft, token), draft)
        leftover = torch.where((alive & ~accepted)[:, None], target, leftover)
        alive = alive & accepted
        leftover = torch.where(alive[:, None], _rows(p, frontier), leftover)
        steps.append(torch.where(alive, frontier, -1))
        if p.device.type == "cpu" and not bool(alive.any()):
            break
    path = torch.stack(steps, dim=1) if steps else frontier.new_full((batch, 1), -1)
    return VerifyOutcome(path, (path >= 0).sum(dim=1), _draw(leftover, frontier, residual_gumbel), frontier)


# ---- block verification


def _block_chain(
    tree: TokenTree, q: SparseQ, p: Tensor, accept_uniform: Tensor, residual_gumbel: ResidualGumbel
) -> VerifyOutcome:
    batch, vocab_size = p.shape[0], p.shape[2]
    p_token, q_token = _token_probs(tree, q, p)  # [B, D] each
    last = tree.num_nodes - 1  # [B]
    joint = torch.ones(batch, dtype=torch.float64, device=p.device)  # the paper's p_i
    leftover = _positive_part(_rows(p, torch.zeros_like(last)), q.rows(torch.zeros_like(last), vocab_size))
    leftover = torch.where((last == 0)[:, None], _rows(p, torch.zeros_like(last)), leftover)
    num_accepted = torch.zeros_like(last)
    for i in range(1, tree.bound() + 1):
        node = torch.full_like(last, i)
        joint = (joint * p_token[:, i - 1] / q_token[:, i - 1]).clamp(max=1.0)
        target = _rows(p, node)
        scaled = joint[:, None] * target
        residual = (scaled - q.rows(node, vocab_size)).clamp(min=0.0)  # [B, V]
        mass = residual.sum(dim=1)
        denominator = mass + 1.0 - joint
        inner = torch.where(denominator > 0.0, mass / denominator, 1.0)
        h = torch.where(last == i, joint, inner)
        ok = (i <= last) & (accept_uniform[:, i].double() < h)
        num_accepted = torch.where(ok, i, num_accepted)
        after = torch.where(((last == i) | (mass <= 0.0))[:, None], target, residual)
        leftover = torch.where(ok[:, None], after, leftover)
    return _chain_outcome(num_accepted, leftover, tree.bound(), residual_gumbel)


# ---- shared parts


def _check_rejection(tree: TokenTree, p: Tensor, accept_uniform: Tensor, what: str) -> None:
    if tree.q is None and bool((tree.num_nodes > 1).any()):
        raise CapabilityError(
            f"{what} of a tree without q",
            "it needs the distribution that every drafted node was drawn from, and either the draft was not"
            " sampled or q was dropped because prune, merge, extend or a budget cut changed the drawn set",
            "draft with sampled proposals within the budget, or verify with sample_and_match, which takes any tree",
        )
    _check_shapes(tree, p, accept_uniform, what)
    if tree.q is not None and tree.q.probs.shape[:2] != tree.tokens.shape:
        raise ConfigError(
            f"{what} with q of shape {tuple(tree.q.probs.shape)}",
            f"the trees are {_size(tree)} nodes",
            "give q one row for every node, padding and leaves included",
        )
    if tree.q is not None:
        tree.q.require_vocab(p.shape[2])


def _check_shapes(tree: TokenTree, p: Tensor, accept_uniform: Tensor, what: str) -> None:
    if p.dim() != 3 or p.shape[:2] != tree.tokens.shape or accept_uniform.shape != tree.tokens.shape:
        raise ConfigError(
            f"{what} with p {tuple(p.shape)} and accept_uniform {tuple(accept_uniform.shape)}",
            f"the trees are {_size(tree)} nodes",
            "give p as [B, N, V] and accept_uniform as [B, N]",
        )


def _size(tree: TokenTree) -> str:
    return " x ".join(map(str, tree.tokens.shape))


def _token_probs(tree: TokenTree, q: SparseQ, p: Tensor) -> tuple[Tensor, Tensor]:
    """p and q of every drafted token below its parent, [B, N - 1] float64 each; 1 at padding."""
    parents = tree.parents[:, 1:].long().clamp(min=0)
    tokens = tree.tokens[:, 1:]
    drafted = tree.real()[:, 1:]
    batch = torch.arange(len(tokens), device=tokens.device)[:, None]
    p_token = torch.where(drafted, p[batch, parents, tokens].double(), 1.0)
    q_token = torch.where(drafted, q.of_tokens(parents, tokens), 1.0)
    if not bool((q_token > 0.0).all()):
        b, node = ((q_token > 0.0).logical_not()).nonzero()[0].tolist()
        raise ConfigError(
            f"node {node + 1} of request {b} as a sampled draft",
            f"q gives its token {int(tokens[b, node])} no probability, so it was not drawn from q",
            "store the distribution that the drafter drew from, after temperature and truncation",
        )
    return p_token, q_token


def _rows(p: Tensor, nodes: Tensor) -> Tensor:
    """[B, V] float64: the distribution after ``nodes`` [B]."""
    return p[torch.arange(len(nodes), device=nodes.device), nodes].double()


def _positive_part(p: Tensor, q: Tensor) -> Tensor:
    """[B, V]: norm(max(p - q, 0)); p itself where nothing is left, which only rounding can reach."""
    residual = (p - q).clamp_(min=0.0)
    mass = residual.sum(dim=1, keepdim=True)
    return torch.where(mass > 0.0, residual / mass, p)


def _without(q: Tensor, token: Tensor) -> Tensor:
    """[B, V]: q given that it is not ``token`` [B, 1]."""
    q = q.scatter(1, token, 0.0)
    return q / q.sum(dim=1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)


def _most_children(tree: TokenTree) -> int:
    """The largest number of siblings anywhere in the batch (waits for the device)."""
    parents = tree.parents.long().clamp(min=0)
    counts = torch.zeros_like(parents).scatter_add_(1, parents, (tree.parents >= 0).long())
    return int(counts.max())


def _draw(weights: Tensor, nodes: Tensor, residual_gumbel: ResidualGumbel) -> Tensor:
    """[B] int64: one token a request in proportion to ``weights`` [B, V], by Gumbel-max."""
    noise = torch.stack([residual_gumbel(b, node) for b, node in enumerate(nodes.tolist())])
    return (weights.log() + noise.to(weights)).argmax(dim=1)


def _chain_outcome(
    num_accepted: Tensor, leftover: Tensor, depth: int, residual_gumbel: ResidualGumbel
) -> VerifyOutcome:
    nodes = torch.arange(1, max(depth, 1) + 1, device=num_accepted.device)
    path = torch.where(nodes <= num_accepted[:, None], nodes, -1)
    return VerifyOutcome(path, num_accepted, _draw(leftover, num_accepted, residual_gumbel), num_accepted)


def _bonus_only(p: Tensor, residual_gumbel: ResidualGumbel) -> VerifyOutcome:
    """Trees of bare roots: the next token is a plain draw from p."""
    roots = torch.zeros(p.shape[0], dtype=torch.int64, device=p.device)
    return _chain_outcome(roots, _rows(p, roots), 1, residual_gumbel)
