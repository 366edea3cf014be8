"""Drafters of states with gradients, unrolled as they are used, over whole packed rows.

An *anchor* t is a row whose next token is known: from its true state and that token a drafter predicts the state of t +
1, from this one that of t + 2, and so on. Step 1 is a row of its own for every t; its keys are those that a running
drafter keeps of the true text. Step s > 1 sees the step-1 keys of its document up to t, and its own steps 2 .. s: what
it will see in use, when the drafted rows' keys have gone and true ones stand in their place. Each step learns

    alpha MSE(h, H) + beta CE(softmax(l'), softmax(L))

where H is the target's state at t + s and L its logits there. Features are states *after* the final norm, which the
target's head multiplies as they are.

Steps of different anchors never see each other, so each step is one pass of all anchors at a time: attention to the
shared keys document by document, as of streams (`carriers.group_attention`), and a few keys more for each anchor.

Sources: Lyanna, section 4.1; EAGLE (Li et al. 2024), sections 4.1 and 4.2 (uniform noise on the features); the
unrolling is that of HASS (Zhang et al. 2025).

Shapes: B rows, T tokens, R anchors, d the width of a state; "flat" is [B * T].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.errors import ConfigError
from ...core.options import check, option
from ...model.hot import hot_share, places_of
from ..ahead import EVALUATED_LOGITS, argmax, no_loss, said_at
from ..carriers import CarrierRows, group_attention, make_carriers
from ..data import TokenBatch
from ..features import Features, OnlineFeatures, last_states, top_tokens
from ..losses import SoftTarget, TargetTop, mse_cross_entropy
from ..network import Network, attend, finish, project, rotation_of, visible
from .states_start import start_from_target

if TYPE_CHECKING:
    from ...draft.eagle.model import EagleModel
    from ...papers.lyanna.model import LyannaModel
    from ..registry import BuildContext

BRANCHES = 4  # children of a node that the held-out figures count (Lyanna, Table 1)


@dataclass(frozen=True, kw_only=True)
class UnrollOptions:
    """How a drafter of states learns."""

    depth: int = option(3, help="steps it is unrolled for, as many as it will draft", minimum=1, maximum=16)
    alpha: float = option(1.0, help="weight of the squared error of states", minimum=0)
    beta: float = option(1.0, help="weight of the cross-entropy with the target's distribution", minimum=0)
    noise: float = option(0.0, help="features get uniform noise of so much up and down (EAGLE: 0.1)", minimum=0)
    anchors: float = option(
        1.0, help="share of the tokens that steps start from, above 0 and at most 1", above=0, maximum=1
    )
    hot_head: float = hot_share()
    start: Literal["random", "target"] = option(
        "random", help="what the layer begins as, without --init: target: the target's last, its map fitted"
    )
    top: int = top_tokens()

    def __post_init__(self) -> None:
        check(self)
        if not self.alpha and not self.beta:
            raise ConfigError("alpha=0, beta=0", "there is nothing to learn", "give one of them a weight")
        if self.hot_head and not self.top:
            wrong = "the target's likeliest tokens are learned by their ids, of which there are none"
            raise ConfigError(f"hot_head={self.hot_head:g}, top=0", wrong, "set top, to 32 for example")


def begin(model: EagleModel | LyannaModel, options: UnrollOptions, context: BuildContext) -> None:
    """Fill a fresh drafter as the options say (see `start_from_target`), or go on from ``context.init``."""
    if context.init is not None:
        model.resume(context.init)
    elif options.start == "target":
        target, _ = context.subject()
        if context.batches is None:
            raise ConfigError("start=target", "there is no data to fit its map on", "train it on data")
        start_from_target(model.head, target, context.batches())


# -- which rows, and what lies ahead of them


def choose_anchors(batch: TokenBatch, share: float = 1.0, generator: torch.Generator | None = None) -> CarrierRows:
    """Rows from which a first step has something to learn: a weight one place on, in the same document.

    Args:
        share: a random share of them; 1: all.
        generator: of the draw.
    """
    follows = torch.zeros_like(batch.weights, dtype=torch.bool)
    same = batch.documents[:, :-1] == batch.documents[:, 1:]
    follows[:, :-1] = same & (batch.weights[:, 1:] > 0) & (batch.documents[:, :-1] >= 0)
    index = follows.flatten().nonzero()[:, 0]
    if share < 1.0 and len(index):
        count = max(1, round(share * len(index)))
        index = index[torch.randperm(len(index), generator=generator)[:count].sort().values.to(index.device)]
    return make_carriers(index, batch.positions.flatten()[index])


@dataclass(frozen=True, slots=True)
class Ahead:
    """The rows s places after some anchors."""

    rows: Tensor  # [R] flat; the anchor itself where there is none
    tokens: Tensor  # [R] int64 there; the anchor's own where there is none
    weights: Tensor  # [R] of what the target says there; 0 where there is no such row

    @staticmethod
    def of(batch: TokenBatch, index: Tensor, step: int) -> Ahead:
        """Those ``step`` places after the flat rows ``index`` [R]."""
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
    model: EagleModel | LyannaModel,
    features: Tensor,
    batch: TokenBatch,
    anchors: CarrierRows,
    steps: int,
    embed: Callable[[Tensor], Tensor],
) -> list[Tensor]:
    """The states that each step predicts.

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


class UnrolledRecipe:
    """Trains a drafter of states over a frozen target.

    Args:
        name: of the recipe's kind.
        module: what is trained.
        target: the frozen target.
        options: steps and losses.
        held_out: batches by domain.
        features: the target's words and states; None: it is run on each batch.
        save: writes what users load into a folder.
        hot: [H] int64, ascending: the only tokens that are drafted, for which alone the head is computed; None: all.
    """

    def __init__(
        self,
        name: str,
        module: EagleModel | LyannaModel,
        target: Network,
        options: UnrollOptions,
        held_out: Mapping[str, Sequence[TokenBatch]],
        features: Features | None = None,
        *,
        save: Callable[[Path], None],
        hot: Tensor | None = None,
    ) -> None:
        self.save = save
        self.hot = None if hot is None else hot.to(target.head_weight.device)
        self._places = torch.empty(0) if self.hot is None else places_of(self.hot, len(target.head_weight))
        self.name, self.target, self.options, self.held_out = name, target, options, held_out
        self.module = module
        self.features = features or OnlineFeatures(target, options.top)
        self._held: dict[
            str, list[tuple[Tensor, Tensor]]
        ] = {}  # by domain: features and likeliest tokens of each batch

    def embed(self, tokens: Tensor) -> Tensor:
        """[.., d] the target's embeddings of ``tokens``."""
        return self.target.embed(tokens)

    def loss(self, batch: TokenBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, float]]:
        """Mean over steps of ``alpha MSE + beta CE``, each a mean over its rows; and both parts of each step."""
        o, anchors = self.options, choose_anchors(batch, self.options.anchors, generator)
        if not len(anchors):
            return no_loss(self.module), {}
        with torch.no_grad():
            true = self.target.final(self.features.states(batch))  # [B, T, d]
        said, places = self.features.said(batch), (batch.weights.flatten() > 0).cumsum(0) - 1
        states = unroll(self.module, self._noised(true, generator), batch, anchors, o.depth, self.embed)
        total, figures = true.new_zeros(()), {}
        for step, state in enumerate(states, 1):
            ahead = Ahead.of(batch, anchors.index, step)
            aims = true.flatten(0, 1)[ahead.rows], said_at(said, places[ahead.rows].clamp_min(0))
            loss, squared = self._step_loss(state, ahead, *aims)
            total = total + 1 / o.depth * loss
            figures[f"mse_{step}"] = squared
            if o.beta:
                figures[f"ce_{step}"] = (float(loss.detach()) - o.alpha * squared) / o.beta
        return total, figures

    def _step_loss(self, state: Tensor, ahead: Ahead, true: Tensor, said: SoftTarget) -> tuple[Tensor, float]:
        """alpha MSE + beta CE of a step, and the MSE."""
        o, weights = self.options, ahead.weights
        hidden, head = self._logit_factors(state, ahead)
        if self.hot is not None:
            assert isinstance(said, TargetTop), "the options ask for likeliest tokens"
            said = said.within(self._places)
        given = state, true, hidden, head, said, weights
        loss = mse_cross_entropy(*given, alpha=o.alpha, beta=o.beta, frozen=state.shape[1])
        with torch.no_grad():
            errors = (state.float() - true.float()).square().mean(-1)
            squared = float((errors * weights).sum() / weights.sum().clamp_min(torch.finfo().tiny))
        return loss, squared

    def _logit_factors(self, states: Tensor, ahead: Ahead) -> tuple[Tensor, Tensor]:
        """The logits of predicted ``states`` [R, d] as a product, l' = h W_head + RMSNorm(E'(t)) (Lyanna, section 4.1).

        Returns:
            [R, d + r] and [V, d + r], of which the first d columns are the target's own. Where there are hot tokens, of
            them alone, and a row of zeros for all others together.
        """
        info = self.module.info
        rows = [self.target.head_weight] if info is None else [self.target.head_weight, info.table()]
        if self.hot is not None:
            rows = [F.pad(part[self.hot], (0, 0, 0, 1)) for part in rows]
        if info is None:
            return states, rows[0]
        u = info.factors(self.embed(ahead.tokens), ahead.tokens)
        return torch.cat((states, u.to(states.dtype)), 1), torch.cat(rows, 1)

    def _noised(self, true: Tensor, generator: torch.Generator) -> Tensor:
        """With uniform noise, so that the drafter's own errors are met in training (EAGLE, section 4.2)."""
        if not self.options.noise:
            return true
        noise = torch.rand(true.shape, generator=generator).to(true) * 2 - 1
        return true + self.options.noise * noise

    # -- held-out figures

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Figures on held-out text, by domain, teacher-forced.

        ``acceptance/DOMAIN/S``: of the rows where the likeliest token of every step before S was the target's own, the
        share where that of step S is (the conditional acceptance of Lyanna's Table 1, for chains).
        ``acceptance_top4/..``: the same where a step counts if the target's token is among its four likeliest.
        ``accepted/DOMAIN``: mean length of the run of agreements, a chain's accepted tokens. ``ce/DOMAIN/S``:
        cross-entropy of step S with the text.
        """
        figures: dict[str, float] = {}
        for domain, batches in self.held_out.items():
            pairs = zip(batches, self._known(domain), strict=True)
            parts = [self._judge(batch.to(true.device), true, says) for batch, (true, says) in pairs]
            if parts:
                found = held_out_figures(*(torch.cat(own, -1) for own in zip(*parts, strict=True)))
                figures |= {name.format(domain): value for name, value in found.items()}
        return figures

    def _known(self, domain: str) -> list[tuple[Tensor, Tensor]]:
        """Features [B, T, d] and the target's likeliest tokens [B, T], 0 where nothing is to be said. It is frozen, so
        one pass serves all evaluations."""
        if domain not in self._held:
            device = self.target.head_weight.device
            self._held[domain] = [self._say(batch.to(device)) for batch in self.held_out[domain]]
        return self._held[domain]

    def _say(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        placed = (batch.places >= 0).any()  # in the run's cache
        true = self.target.final(self.features.states(batch) if placed else last_states(self.target, batch))
        says, asked = torch.zeros_like(batch.tokens), batch.weights > 0
        says[asked] = argmax(true[asked], self.target.head_weight)
        return true, says

    def _judge(self, batch: TokenBatch, true: Tensor, says: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of every step and anchor what `held_out_figures` counts: [steps, 2, R], [steps, R], [steps, R]."""
        anchors, steps = choose_anchors(batch), self.options.depth
        if not len(anchors):
            none = true.new_zeros(steps, 0)
            return none[:, None].bool().expand(-1, 2, 0), none.float(), none.bool()
        hits, losses, exists = [], [], []
        for step, state in enumerate(unroll(self.module, true, batch, anchors, steps, self.embed), 1):
            ahead = Ahead.of(batch, anchors.index, step)
            found, loss = self._guess(state, ahead, says.flatten()[ahead.rows], batch.targets.flatten()[ahead.rows])
            exists.append(ahead.weights > 0)
            hits.append(found & exists[-1])
            losses.append(loss)
        return torch.stack(hits), torch.stack(losses), torch.stack(exists)

    def _guess(self, state: Tensor, ahead: Ahead, says: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        """[2, R] whether the target's token is the likeliest, or one of `BRANCHES`; and [R] -log q of the text's."""
        hidden, head = self._logit_factors(state, ahead)
        tokens = len(head)
        if self.hot is not None:  # the last row is drafted for none of the others
            tokens, says, text = tokens - 1, self._places[says], self._places[text]
        found, losses = [], []
        for part in torch.arange(len(state), device=state.device).split(max(1, EVALUATED_LOGITS // len(head))):
            logits = F.linear(hidden[part].to(head.dtype), head).float()
            losses.append(F.cross_entropy(logits, text[part], reduction="none"))
            best = logits[:, :tokens].topk(min(BRANCHES, tokens), dim=-1).indices == says[part, None]
            found.append(torch.stack((best[:, 0], best.any(-1))))
        return torch.cat(found, 1), torch.cat(losses)

    def export(self, folder: Path) -> dict[str, Any]:
        """What users load."""
        self.save(folder)
        return {}


def held_out_figures(hits: Tensor, losses: Tensor, exists: Tensor) -> dict[str, float]:
    """The figures of `UnrolledRecipe.evaluate`; names hold ``{}`` where the domain goes.

    Args:
        hits: [steps, 2, R] bool, whether the target's token is the likeliest, or one of `BRANCHES`.
        losses: [steps, R] -log q of the text's token.
        exists: [steps, R] bool, whether there is a token to be said.
    """
    alive = hits.cumprod(0).bool()  # every step so far was right
    tried = torch.cat((torch.ones_like(alive[:1]), alive[:-1])) & exists[:, None]
    made = {}
    if exists[0].any():
        made["accepted/{}"] = float(alive[:, 0].sum()) / int(exists[0].sum())
    for step, (right, counted) in enumerate(zip(alive, tried, strict=True), 1):
        for place, name in enumerate(("acceptance", f"acceptance_top{BRANCHES}")):
            if counted[place].any():
                made[f"{name}/{{}}/{step}"] = float(right[place].sum()) / int(counted[place].sum())
        if exists[step - 1].any():
            made[f"ce/{{}}/{step}"] = float(losses[step - 1][exists[step - 1]].mean())
    return made
