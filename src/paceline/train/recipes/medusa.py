"""The recipe ``medusa``: heads on the last state of a frozen target, whose head serves all of them.

Source: Medusa (Cai et al. 2024), section 3.2.1 (Medusa-1), with distillation from the target beside the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...core.options import check, option
from ...draft.medusa.heads import MOST_HEADS, Heads, HeadsConfig, load
from ...model.hot import hot_share
from ...weights.files import fingerprint
from ...weights.trained_files import resumed
from ..ahead import EVALUATED_LOGITS, Aims, Tally, argmax, said_at
from ..carriers import CarrierRows, choose_carriers
from ..data import TokenBatch
from ..features import Features, OnlineFeatures, last_states, top_tokens
from ..losses import SoftTarget, distilled
from ..network import Network

if TYPE_CHECKING:
    from ..registry import BuildContext

DECAY = 0.8  # lambda: weight of each further head's loss, of the one before
RANKS = 10  # of each head's likeliest tokens, whose hit rates are kept


@dataclass(frozen=True, kw_only=True)
class MedusaOptions:
    """How many heads, and what they learn from."""

    hot_head: float = hot_share()
    heads: int = option(4, help="tokens drafted ahead", minimum=1, maximum=MOST_HEADS)
    rank: int = option(0, help="rank of each head's matrix; 0: a full one", minimum=0)
    distill: float = option(
        0.8, help="weight of the distance from the target, 0 to 1; the rest is cross-entropy", minimum=0, maximum=1
    )
    top: int = top_tokens()
    positions: float = option(
        1.0, help="share of the answers' tokens that are learned from in a step", above=0, maximum=1
    )

    def __post_init__(self) -> None:
        check(self)


class MedusaRecipe:
    """sum_j lambda^j (w KL(p, q_j) + (1 - w) CE_j), with p what the target says j + 1 tokens later.

    Args:
        heads: what is trained.
        target: the frozen target.
        options: the loss.
        held_out: batches by domain, which calibrate the heads, too.
        features: what the target says and its states, from a cache; None: it is run on each batch.
    """

    name = "medusa"

    def __init__(
        self,
        heads: Heads,
        target: Network,
        options: MedusaOptions,
        held_out: Mapping[str, Sequence[TokenBatch]] | None = None,
        features: Features | None = None,
    ) -> None:
        self.module, self.target, self.options, self.held_out = heads, target, options, held_out or {}
        self.features = features or OnlineFeatures(target, options.top)

    def loss(self, batch: TokenBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, float]]:
        """The weighted mean over the heads' tokens, and each head's part of it (nats)."""
        carriers = choose_carriers(batch, self.options.positions, generator)
        aims, count = Aims.of(batch, carriers, self.module.config.heads), self.module.config.heads
        weights = aims.exists * batch.weights.flatten()[aims.main]  # [R, heads] of the tokens aimed at
        sums = weights.sum(0)
        scale = torch.tensor([DECAY**j for j in range(count)], device=weights.device)
        normed = self._normed(self.features.states(batch), carriers)
        loss, parts = distilled(
            self.module(normed).flatten(0, 1),
            self.target.head_weight,
            self._said(batch, aims, weights),
            aims.tokens.flatten(),
            (weights * scale / sums.clamp_min(1e-9)).flatten(),
            share=self.options.distill,
            denominator=float(scale.sum()),
        )
        means = (parts.unflatten(1, (-1, count)) * weights).sum(1) / sums  # [2, heads]
        return loss, _figures("kl", means[0]) | _figures("ce", means[1])

    def _normed(self, states: Tensor, carriers: CarrierRows) -> Tensor:
        """[R, d_model] the carriers' states behind the final norm."""
        with torch.no_grad():
            return self.target.final(states.flatten(0, 1)[carriers.index])

    def _said(self, batch: TokenBatch, aims: Aims, weights: Tensor) -> SoftTarget:
        """What the target says where each head's token comes next: `Features.said`, row for row of [R * heads]."""
        known = batch.weights.flatten() > 0
        places = torch.where(weights > 0, (known.cumsum(0) - 1)[aims.main], 0).flatten()
        return said_at(self.features.said(batch), places)

    # -- held-out figures

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """By domain, teacher-forced: each head's loss with the text (nats) and agreement with the target's likeliest
        token, and the length of a chain, and of a tree of three children a node, that would be accepted."""
        figures: dict[str, float] = {}
        for domain, batches in self.held_out.items():
            tally = Tally(self.module.config.heads)
            for logits, says, aims in self._outputs(batches):
                tally.count(logits, says, aims.tokens, aims.exists)
            figures |= {name.format(domain): value for name, value in tally.figures().items()}
        return figures

    def _outputs(self, batches: Sequence[TokenBatch]) -> Iterator[tuple[Tensor, Tensor, Aims]]:
        """Of some rows at a time: logits [n, heads, V], the target's likeliest tokens [n, heads], what is aimed at."""
        count, head = self.module.config.heads, self.target.head_weight
        for held in batches:
            batch = held.to(head.device)
            states, carriers = last_states(self.target, batch), choose_carriers(batch)
            says = argmax(self.target.final(states).flatten(0, 1), head)  # [B * T]
            for part in carriers.segments(max(1, EVALUATED_LOGITS // (head.shape[0] * count))):
                aims = Aims.of(batch, part, count)
                logits = self.target.logits(self.module(self._normed(states, part))).float()
                yield logits, says[aims.main], aims

    @torch.no_grad()
    def calibrated(self) -> HeadsConfig:
        """The heads' shape, with the rates at which their likeliest tokens are the target's on all held-out answers."""
        count = self.module.config.heads
        hits, rows = torch.zeros(count, min(RANKS, self.module.config.vocab_size)), torch.zeros(count)
        for batches in self.held_out.values():
            for logits, says, aims in self._outputs(batches):
                hit = logits.topk(hits.shape[1], dim=-1).indices == says[..., None]  # [n, heads, ranks]
                hits += (hit & aims.exists[..., None]).sum(0).cpu()
                rows += aims.exists.sum(0).cpu()
        if not bool((rows > 0).all()):  # no held-out data, or too short: a guess is made in their place
            return replace(self.module.config, accuracies=())
        rates = (hits / rows[:, None]).tolist()
        return replace(self.module.config, accuracies=tuple(tuple(round(rate, 5) for rate in row) for row in rates))

    # -- result

    def export(self, folder: Path) -> dict[str, Any]:
        """`Heads.save` in bf16, with calibrated hit rates."""
        self.module.config = self.calibrated()
        self.module.save(folder)
        return {"parameters": sum(parameter.numel() for parameter in self.module.parameters())}


def _figures(name: str, values: Tensor) -> dict[str, float]:
    """Of the heads that some row of the batch has a token for."""
    return {f"{name}_{j}": value for j, value in enumerate(values.tolist(), 1) if value == value}


def build(options: MedusaOptions, context: BuildContext) -> MedusaRecipe:
    """Fresh heads over the context's target, or those in ``context.init``.

    Raises:
        ConfigError: heads of another shape to go on from.
    """
    target, folder = context.subject()
    shape = target.config
    config = HeadsConfig(
        heads=options.heads,
        d_model=shape.d_model,
        vocab_size=shape.vocab_size,
        rank=options.rank,
        target=folder.name,
        fingerprint=fingerprint(folder),
    )
    if context.init is None:
        heads = Heads.fresh(config, torch.Generator().manual_seed(context.seed))
    else:
        heads = load(context.init, torch.float32).requires_grad_(True)
        heads = resumed(heads, config, context.init, ("accuracies",))
    return MedusaRecipe(heads.to(context.device), target, options, context.held_out, context.features)
