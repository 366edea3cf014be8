"""Drafters over a target's last states, trained as they draft: features, k steps, regression and cross-entropy.

An *anchor* t is a row whose next token is known. Step s predicts what the target's head reads at t + s: EAGLE and
Lyanna by a layer that is unrolled, from the true state and that token the state of t + 1, from this one that of t + 2,
and so on; Medusa by one head a step, all from the state at t. Each step learns

    alpha MSE(h, H) + CE(softmax(l'), softmax(L))

where H is the target's state at t + s and L its logits there, of its likeliest tokens. Features are states *after* the
final norm, which the target's head multiplies as they are.

Of an unrolled layer step 1 is a row of its own for every t; its keys are those that a running drafter keeps of the true
text. Step s > 1 sees the step-1 keys of its document up to t, and its own steps 2 .. s: what it will see in use, when
the drafted rows' keys have gone and true ones stand in their place. Steps of different anchors never see each other, so
each step is one pass of all anchors at a time: attention to the shared keys document by document, as of streams
(`carriers.group_attention`), and a few keys more for each anchor.

Sources: Lyanna, section 4.1; EAGLE (Li et al. 2024), sections 4.1 and 4.2 (uniform noise on the features); Medusa (Cai
et al. 2024), section 3.2.1 (Medusa-1); the unrolling is that of HASS (Zhang et al. 2025).

Shapes: B rows, T tokens, R anchors, d the width of a state; "flat" is [B * T].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.errors import ConfigError
from ...core.options import check, option
from ...model.hot import hot_share, places_of
from ..carriers import CarrierRows, carriers_of, group_attention
from ..chunked import wide
from ..data import TokenBatch
from ..features import EVALUATED_LOGITS, OnlineFeatures, argmax, last_states, no_loss
from ..losses import TargetTop, mixed
from ..network import attend, finish, project, rotation_of, visible
from .heads_start import start_from_target

if TYPE_CHECKING:
    from ..registry import BuildContext

ALPHA = 0.2  # weight of the squared error of states
BRANCHES = 4  # children of a node that the held-out figures count (Lyanna, Table 1)
RANKS = 10  # likeliest tokens of a step whose hit rates are counted


@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """Describe how a drafter over the target's states learns."""

    depth: int = option(3, help="steps it is trained for, as many as it will draft", minimum=1, maximum=16)
    anchors: float = option(
        1.0, help="share of the tokens that steps start from, above 0 and at most 1", above=0, maximum=1
    )
    hot_head: float = hot_share()

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class LayerOptions(HeadOptions):
    """Describe how a drafter with a layer learns."""

    start: Literal["random", "target"] = "random"  # of the layer, without --init: target: its last, its map fitted


def begin(model: Any, options: LayerOptions, context: BuildContext) -> None:
    """Fill a fresh drafter as the options state (see `start_from_target`), or continue from ``context.init``."""
    if context.init is not None:
        model.resume(context.init)
    elif options.start == "target":
        if context.batches is None:
            raise ConfigError("start=target", "there is no data to fit its map on", "train it on data")
        start_from_target(model.head, context.subject()[0], context.batches())


# -- which rows, and what lies ahead of them


def choose_anchors(batch: TokenBatch, share: float = 1.0, generator: torch.Generator | None = None) -> CarrierRows:
    """Return rows from which a first step has something to learn: a weight one place on, in the same document.

    Args:
        share: a random share of them; 1: all.
        generator: of the draw.
    """
    follows = torch.zeros_like(batch.weights, dtype=torch.bool)
    same = batch.documents[:, :-1] == batch.documents[:, 1:]
    follows[:, :-1] = same & (batch.weights[:, 1:] > 0) & (batch.documents[:, :-1] >= 0)
    return carriers_of(follows, batch, share, generator)


@dataclass(frozen=True, slots=True)
class Ahead:
    """The rows s places after some anchors."""

    rows: Tensor  # [R] flat; the anchor itself where there is none
    tokens: Tensor  # [R] int64 there; the anchor's own where there is none
    weights: Tensor  # [R] of what the target emits there; 0 where there is no such row

    @staticmethod
    def of(batch: TokenBatch, index: Tensor, step: int) -> Ahead:
        """Return those ``step`` places after the flat rows ``index`` [R]."""
        length = batch.tokens.shape[1]
        documents = batch.documents.flatten()
        inside = index % length + step < length
        rows = torch.where(inside, index + step, index)
        exists = inside & (documents[rows] == documents[index])
        rows = torch.where(exists, rows, index)
        weights = torch.where(exists, batch.weights.flatten()[rows], 0.0)
        return Ahead(rows, batch.tokens.flatten()[rows], weights)


# -- the network


def unroll(
    model: Any,
    features: Tensor,
    batch: TokenBatch,
    anchors: CarrierRows,
    steps: int,
    embed: Callable[[Tensor], Tensor],
) -> list[Tensor]:
    """Return the states that each step predicts.

    Args:
        features: [B, T, d] the target's states after the final norm (with noise, where there is any).
        anchors: the rows that steps start from.
        steps: how many.
        embed: the target's embedding of tokens.

    Returns:
        [R, d] of each step.
    """
    head, config, index = model.head, model.head.config, anchors.index
    following = F.pad(batch.tokens[:, 1:], (0, 1))  # a document's last row has none of its own, and nothing sees it
    fused = head.fuse(features, embed(following) if model.reads_tokens else None)  # [B, T, d]
    q, k, v = project(head.layer, config, fused, rotation_of(head.rope, batch.positions))
    attended = attend(q, k, v, visible(batch)).flatten(0, 1)[index]
    states = [finish(head.layer, config, fused.flatten(0, 1)[index], attended)]
    shared, own_k, own_v = (k.flatten(0, 1), v.flatten(0, 1)), [], []
    for step in range(2, steps + 1):
        token = embed(Ahead.of(batch, index, step).tokens) if model.feeds_tokens else None
        fed = head.fuse(states[-1], token)[:, None]  # [R, 1, d]
        q, new_k, new_v = project(
            head.layer, config, fed, rotation_of(head.rope, anchors.positions[:, None] + step - 1)
        )
        own_k.append(new_k)
        own_v.append(new_v)
        order = torch.tensor([step - 1], device=index.device)
        attended = group_attention(q, shared, (torch.cat(own_k, 1), torch.cat(own_v, 1)), anchors, order, None)
        states.append(finish(head.layer, config, fed[:, 0], attended[:, 0]))
    return states


# -- the recipe

# (features [B, T, d], the batch, R anchors, steps, the target's embedding of tokens) -> [R, d] of each step.
Predict = Callable[[Tensor, TokenBatch, CarrierRows, int, Callable[[Tensor], Tensor]], Sequence[Tensor]]


class HeadRecipe:
    """Trains a drafter over the states of a frozen target.

    Args:
        name: of the recipe's kind.
        module: the drafter; token-info, where it has any, is its ``info``.
        options: steps and anchors.
        context: with the target, held-out batches, features and hot tokens, for which alone the head is computed.
        predict: computes the states of each step.
        alpha: weight of the squared error of states.
        decay: weight of a step's loss, over that of the one before.
        noise: features get uniform noise of so much up and down, so that the drafter's own errors are met in training
            (EAGLE, section 4.2).
    """

    def __init__(
        self,
        name: str,
        module: Any,
        options: HeadOptions,
        context: BuildContext,
        predict: Predict,
        *,
        alpha: float = ALPHA,
        decay: float = 1.0,
        noise: float = 0.0,
    ) -> None:
        assert context.target is not None, "a drafter is trained for a target"
        self.name, self.module, self.options, self.predict = name, module, options, predict
        self.alpha, self.decay, self.noise = alpha, decay, noise
        self.target, self.held_out = context.target, context.held_out
        self.features = context.features or OnlineFeatures(self.target)
        self.hot = None if context.hot is None else context.hot.to(self.target.head_weight.device)
        self._places = torch.empty(0) if self.hot is None else places_of(self.hot, len(self.target.head_weight))
        self._held: dict[str, list[tuple[Tensor, Tensor]]] = {}  # by domain: features and likeliest tokens of a batch

    def loss(self, batch: TokenBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, float]]:
        """Mean over steps of ``alpha MSE + CE``, each a mean over its rows; and both parts of each step."""
        steps, anchors = self.options.depth, choose_anchors(batch, self.options.anchors, generator)
        if not len(anchors):
            return no_loss(self.module), {}
        with torch.no_grad():
            true = self.target.final(self.features.states(batch))  # [B, T, d]
        fed = true
        if self.noise:
            fed = true + self.noise * (torch.rand(true.shape, generator=generator).to(true) * 2 - 1)
        target, places = self.features.targets(batch), (batch.weights.flatten() > 0).cumsum(0) - 1
        total, figures = true.new_zeros(()), {}
        shares = [self.decay**step for step in range(steps)]
        states = self.predict(fed, batch, anchors, steps, self.target.embed)
        for step, (state, share) in enumerate(zip(states, shares, strict=True), 1):
            ahead = Ahead.of(batch, anchors.index, step)
            aims = true.flatten(0, 1)[ahead.rows], target.at(places[ahead.rows].clamp_min(0))
            loss, squared = self._step_loss(state, ahead, *aims)
            total = total + share / sum(shares) * loss
            figures[f"mse_{step}"], figures[f"ce_{step}"] = squared, float(loss.detach()) - self.alpha * squared
        return total, figures

    def _step_loss(self, state: Tensor, ahead: Ahead, true: Tensor, target: TargetTop) -> tuple[Tensor, float]:
        """alpha MSE + CE of a step, and the MSE."""
        weights = ahead.weights
        hidden, head = self._logit_factors(state, ahead)
        if self.hot is not None:
            target = target.within(self._places)
        loss = mixed(hidden, head, target, weights, omega=1.0, frozen=state.shape[1])
        kind = wide(state, true)
        errors = (state.to(kind) - true.to(kind)).square().mean(-1)  # of the d entries of a state
        squared = (errors * weights).sum() / weights.sum().clamp_min(torch.finfo().tiny)
        return self.alpha * squared + loss, float(squared.detach())

    def _logit_factors(self, states: Tensor, ahead: Ahead) -> tuple[Tensor, Tensor]:
        """Return the logits of predicted ``states`` [R, d] as a product, l' = h W_head + RMSNorm(E'(t)) (Lyanna,
        section 4.1).

        Returns:
            [R, d + r] and [V, d + r], of which the first d columns are the target's own. Where there are hot tokens, of
            them alone, and a row of zeros for all others together.
        """
        info = getattr(self.module, "info", None)
        rows = [self.target.head_weight] if info is None else [self.target.head_weight, info.table()]
        if self.hot is not None:
            rows = [F.pad(part[self.hot], (0, 0, 0, 1)) for part in rows]
        if info is None:
            return states, rows[0]
        u = info.factors(self.target.embed(ahead.tokens))
        return torch.cat((states, u.to(states.dtype)), 1), torch.cat(rows, 1)

    # -- held-out figures

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return figures on held-out text, by domain, teacher-forced.

        ``acceptance/DOMAIN/S``: of the rows where the likeliest token of every step before S was the target's own, the
        share where that of step S is (the conditional acceptance of Lyanna's Table 1, for chains).
        ``acceptance_top4/..``: the same where a step counts if the target's token is among its four likeliest.
        ``accepted/DOMAIN``: mean length of the run of agreements, a chain's accepted tokens.
        """
        figures: dict[str, float] = {}
        for domain in self.held_out:
            if parts := self._judged(domain):
                domain_figures = held_out_figures(*(torch.cat(columns, 1) for columns in zip(*parts, strict=True)))
                figures |= {name.format(domain): value for name, value in domain_figures.items()}
        return figures

    @torch.no_grad()
    def hit_rates(self) -> tuple[tuple[float, ...], ...]:
        """Return [steps][ranks], how often each of a step's likeliest tokens is the target's, over all held-out data;
        none where there is too little."""
        parts = [part for domain in self.held_out for part in self._judged(domain)]
        if not parts:
            return ()
        hits, exists = (torch.cat(columns, 1) for columns in zip(*parts, strict=True))
        rates = hits.float().sum(1) / exists.sum(1, keepdim=True)
        whole = bool(exists.any(1).all())
        return tuple(tuple(round(rate, 5) for rate in row) for row in rates.tolist()) if whole else ()

    def _judged(self, domain: str) -> list[tuple[Tensor, Tensor]]:
        """Return, by step and anchor of each batch, what `held_out_figures` counts."""
        device, sums = self.target.head_weight.device, []
        batches = [batch.to(device) for batch in self.held_out[domain]]
        if domain not in self._held:  # the target is frozen, so one pass serves all evaluations
            self._held[domain] = [self._say(batch) for batch in batches]
        for batch, (true, says) in zip(batches, self._held[domain], strict=True):
            anchors, steps = choose_anchors(batch), self.options.depth
            if not len(anchors):
                continue
            hits, exists = [], []
            for step, state in enumerate(self.predict(true, batch, anchors, steps, self.target.embed), 1):
                ahead = Ahead.of(batch, anchors.index, step)
                exists.append(ahead.weights > 0)
                hits.append(self._guess(state, ahead, says.flatten()[ahead.rows]) & exists[-1][:, None])
            sums.append((torch.stack(hits), torch.stack(exists)))
        return sums

    def _say(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return features [B, T, d] and the target's likeliest tokens [B, T], 0 where nothing is to be emitted."""
        true = self.target.final(last_states(self.target, batch))
        says, counted = torch.zeros_like(batch.tokens), batch.weights > 0
        says[counted] = argmax(true[counted], self.target.head_weight)
        return true, says

    def _guess(self, state: Tensor, ahead: Ahead, says: Tensor) -> Tensor:
        """Return [R, ranks] bool: the target's token is the likeliest, the next one, and so on."""
        hidden, head = self._logit_factors(state, ahead)
        tokens = len(head)
        if self.hot is not None:  # the last row is drafted for none of the others
            tokens, says = tokens - 1, self._places[says]
        hits = []
        for part in torch.arange(len(state), device=state.device).split(max(1, EVALUATED_LOGITS // len(head))):
            logits = F.linear(hidden[part].to(head.dtype), head[:tokens])
            hits.append(logits.topk(min(RANKS, tokens), dim=-1).indices == says[part, None])
        return torch.cat(hits)

    def export(self, folder: Path) -> dict[str, Any]:
        """Write what users load."""
        self.module.save(folder)
        return {}


def held_out_figures(hits: Tensor, exists: Tensor) -> dict[str, float]:
    """Return the figures of `HeadRecipe.evaluate`; names hold ``{}`` where the domain goes.

    Args:
        hits: [steps, R, ranks] bool, whether the target's token is the likeliest, the next one, ..
        exists: [steps, R] bool, whether there is a token to be emitted.
    """
    best = torch.stack((hits[..., 0], hits[..., :BRANCHES].any(-1)), 1)  # [steps, 2, R]
    alive = best.cumprod(0).bool()  # every step so far was right
    tried = torch.cat((torch.ones_like(alive[:1]), alive[:-1])) & exists[:, None]
    figures = {}
    if exists[0].any():
        figures["accepted/{}"] = float(alive[:, 0].sum()) / int(exists[0].sum())
    for step, (right, counted) in enumerate(zip(alive, tried, strict=True), 1):
        for place, name in enumerate(("acceptance", f"acceptance_top{BRANCHES}")):
            if counted[place].any():
                figures[f"{name}/{{}}/{step}"] = float(right[place].sum()) / int(counted[place].sum())
    return figures
