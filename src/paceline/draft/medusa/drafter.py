"""Drafts by several heads on the target's last state (Medusa, Cai et al. 2024).

Head j predicts what comes j + 2 tokens after the last state's own token, whatever the token in between is. That state
is of the token in front of the root, so head 0 proposes children of the root, head 1 their children, and so on. Which
of a head's likeliest tokens become nodes is fixed before: the tree that has the most hits by the heads' calibrated
rates (section 3.3). Its tokens and their scores are those of the moment.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from math import inf, log
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from ...core.errors import CapabilityError
from ...core.inference import inference
from ...core.sequence import Sequence
from ...core.tree import TokenTree
from ...kernels.calls import join
from ...kernels.drafts import NativeHeads
from ...model.hot import FILE, load_hot, masked
from ...model.linear import LinearOp, make_linear
from ...weights.files import check_target
from ..base import Drafter, DrafterSpec, DraftRequest, LevelScores, StepFeatures
from ..fit import TrainedDrafterConfig
from ..levels import best_levels, best_nodes
from ..registry import DrafterContext, option, proposes_option
from .heads import MOST_HEADS, Heads, load, read_config

if TYPE_CHECKING:
    from ...model.decoder import TargetInfo
    from ...model.handle import TargetHandle

MAX_NODES = 256


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(TrainedDrafterConfig):
    """Medusa: heads on the target's last state, one for each token ahead."""

    kind: ClassVar[str] = "medusa"

    path: str = option(
        "", help="folder of trained heads, ours or as the Medusa repository saves them; none: the zoo's for the model"
    )
    depth: int | None = option(
        None, help="heads to draft with; default: as many as were trained", minimum=1, maximum=MOST_HEADS
    )
    nodes: int = option(24, help="nodes of the tree, those with the best hit rates", minimum=1, maximum=MAX_NODES)
    topk: int = option(10, help="most tokens taken of a head; 1: a chain", minimum=1, maximum=64)
    proposes: Literal["point", "coupled"] = proposes_option()

    def build(self, context: DrafterContext) -> MedusaDrafter:
        """Load the heads, and check that they were trained for the target."""
        folder = self.folder(context)
        config = read_config(folder)
        if config is not None:
            self.check_weights(config, context)
        heads = load(folder, context.dtype, context.device or "cpu")
        hot = load_hot(folder, heads.config.vocab_size)
        if hot is not None and heads.own is not None:
            wrong = "its folder names hot tokens, and its heads are its own, over all tokens"
            raise CapabilityError(self.label, wrong, f"remove {FILE} from it")
        return MedusaDrafter(self, heads, hot)


class MedusaDrafter(Drafter):
    """Proposes a static tree over the heads' likeliest tokens.

    Args:
        config: shape and kind of the drafts.
        heads: trained heads, in the target's dtype.

    Raises:
        ConfigError: more heads are requested than there are.
    """

    trusted = True
    _pass: HeadPass  # `bind` sets it

    def __init__(self, config: MedusaConfig, heads: Heads, hot: Tensor | None = None) -> None:
        self.config, self.heads, self._hot = config, heads, hot
        trained = heads.config.heads
        config.require("depth", (config.depth or 1) <= trained, f"is more than the {trained} heads that were trained")
        self.trees = static_trees(
            heads.config.hit_rates(config.topk)[: config.depth], config.nodes if config.topk > 1 else trained
        )
        full = self.trees[-1]
        self._k = 1 + max(rank for tree in self.trees for rank in tree.tokens)
        self.spec = DrafterSpec(
            name=config.kind,
            taps=(-1,),
            network=True,
            proposes=config.proposes,
            default_budget=len(full),
            tree=not full.is_chain,
        )
        self._last: dict[int, tuple[Tensor, int, int]] = {}  # sequence -> states, row of its last one, position after

    # -- the contract

    def bind(self, target: TargetInfo, max_sequences: int, pool_tokens: int, device: torch.device) -> None:
        """Check the heads against the target, and bring them into the fastest form."""
        config = self.heads.config
        check_target(f"Medusa heads for {config.target or 'another target'}", config, target.name, target)
        self._k = min(self._k, target.vocab_size)
        self._pass = HeadPass(self.heads, target.handle, len(self.trees), self._hot)

    def observe(self, step: StepFeatures) -> None:
        """Note where each sequence's last state is."""
        states = step.hidden.get(-1)
        for b, view in enumerate(step.sequences):
            rows = step.hidden_rows[b] if states is not None else slice(0, 0)
            if states is None or rows.start == rows.stop:
                self._last.pop(view.key, None)
            else:
                self._last[view.key] = states, rows.stop - 1, step.first[b] + rows.stop - rows.start

    def release(self, keys: abc.Sequence[int]) -> None:
        """Forget ended or preempted sequences."""
        for key in keys:
            self._last.pop(key, None)

    @inference
    def draft(self, want: DraftRequest) -> list[TokenTree]:
        """Return one tree a sequence; empty where no state of the token before it was seen."""
        able = [row for row in want.rows() if min(row[1:]) > 0 and self._knows(row[0])]
        want.passes, trees = 1 if able else 0, dict[int, TokenTree]()
        if able:
            rated = self._said([view for view, _, _ in able])
            sets = [(view, one) for (view, _, _), one in zip(able, rated, strict=True)]
            best = best_levels(sets, self._k, self.config.proposes == "coupled")
            for (view, budget, max_depth), levels in zip(able, best, strict=True):
                tree = self.trees[min(max_depth, len(self.trees)) - 1]
                trees[view.key] = filled(tree, *levels, budget)
        return [trees.get(view.key) or TokenTree() for view in want.sequences]

    # -- the heads

    def _knows(self, view: Sequence) -> bool:
        """Return whether its last known state is that of the token in front of the root."""
        last = self._last.get(view.key)
        return last is not None and last[2] == len(view.tokens) - 1

    def _said(self, views: abc.Sequence[Sequence]) -> list[LevelScores]:
        """Return the heads' output: short where compiled code knows a sequence's rules, else logits."""
        places, samplers = [self._last[view.key] for view in views], [view.sampler for view in views]
        states = join([held[row : row + 1] for held, row, _ in places])  # without a copy where there is one
        compiled, coupled = self._pass.native, self.config.proposes == "coupled"
        if compiled is not None and all(s.plain or s.draws for s in samplers):
            rules = None if all(s.plain for s in samplers) else b"".join([s.rules for s in samplers])
            return [*compiled.best(states, self._k, [len(view.tokens) for view in views], rules, coupled)]
        return [*self._pass.logits(states)]  # [heads, V] each


class HeadPass:
    """The heads over a target, ready to run.

    Args:
        heads: trained heads.
        handle: of the target.
        count: heads that are used, the first ones.
        hot: [H] int64, the only tokens that they predict; None: all.
    """

    def __init__(self, heads: Heads, handle: TargetHandle, count: int, hot: Tensor | None = None) -> None:
        dtype, width = handle.dtype, heads.config.d_model
        matrices, bias = heads.matrices()[: count * width].to(dtype), heads.bias.detach()[:count].to(dtype)
        outputs = None if heads.own is None else heads.own.detach()[:count].to(dtype)
        self.handle, self.count, self._hot = handle, count, hot
        self.native = None if handle.stack is None else NativeHeads(handle.stack, matrices, bias, outputs, hot)
        self.blocks: LinearOp
        self.own: abc.Sequence[LinearOp] | None
        if self.native is not None:
            self.blocks, self.own = self.native.blocks, self.native.own or None
        else:
            self.blocks = make_linear(matrices, bias.flatten())
            self.own = None if outputs is None else [make_linear(part, None) for part in outputs]

    def logits(self, states: Tensor) -> Tensor:
        """[rows, heads, V] float32 or wider, from raw states [rows, d_model]: the reference of `NativeHeads.best`."""
        scores = self._said(states)
        return scores if self._hot is None else masked(scores, self._hot)

    def _said(self, states: Tensor) -> Tensor:
        normed = self.handle.final(states)
        inner = self.blocks.wide(normed).unflatten(1, (self.count, -1))  # [rows, heads, d_model]
        states_out = (normed.to(inner.dtype)[:, None] + torch.nn.functional.silu(inner)).to(normed.dtype)
        if self.own is None:
            return self.handle.logits(states_out.flatten(0, 1), normed=True).unflatten(0, (-1, self.count))
        return torch.stack([head.wide(states_out[:, j].contiguous()) for j, head in enumerate(self.own)], dim=1)


def static_trees(rates: abc.Sequence[abc.Sequence[float]], nodes: int) -> list[TokenTree]:
    """Return the trees of 1, 2, .. levels that hit most often, best nodes first.

    ``tokens`` are ranks among a head's tokens.

    A path of ranks is taken to be right with the product of their hit rates (section 3.3).

    Args:
        rates: [heads][k] how often each of a head's likeliest tokens is right, never rising.
        nodes: of a tree, at most.
    """
    ranks, scores = [[*range(len(row))] for row in rates], [[log(rate) for rate in row] for row in rates]
    return [best_nodes(ranks[:depth], scores[:depth], nodes) for depth in range(1, len(rates) + 1)]


def filled(
    tree: TokenTree, tokens: abc.Sequence[abc.Sequence[int]], log_q: abc.Sequence[abc.Sequence[float]], budget: int
) -> TokenTree:
    """Return the first nodes of a static tree with the tokens of the moment, without those that a rule forbids.

    Args:
        tree: of `static_trees`.
        tokens, log_q: [levels][k] of each head, best first.
        budget: nodes wanted.
    """
    proposal, places, levels = TokenTree(), [0], [0]  # of the tree's nodes: the node made of each, -1 none; its level
    for rank, parent in zip(tree.tokens, tree.parents, strict=True):
        if len(proposal) == budget:
            break
        level, place = levels[parent], places[parent]
        levels.append(level + 1)
        chance = log_q[level][rank] if rank < len(log_q[level]) else -inf
        if place < 0 or chance == -inf:
            places.append(-1)
            continue
        above = proposal.score(place)
        places.append(proposal.add(place, tokens[level][rank], above + chance))
    return proposal
