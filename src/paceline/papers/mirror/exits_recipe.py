"""The recipe ``exits``: early exits at several depths of a frozen target, trained together.

Source: Mirror Speculative Decoding, E.2, eq. 15, with distillation from the target next to the text (the paper has
none), and with the state added to what an exit makes of it, so that it begins as the untrained one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...train.data import TokenBatch
from ...train.features import EVALUATED_LOGITS
from ...train.losses import TargetHidden, distilled
from ...train.network import Network
from ...train.registry import BuildContext
from ...weights.files import fingerprint
from ...weights.trained_files import resumed
from .exits import ExitHeads, ExitsConfig, load, shares

DISTILL = 0.8  # weight of the distance from the target; the rest is cross-entropy
KAPPAS = (1, 4, 8)  # candidates whose overlap mass is logged (eq. 9)


@dataclass(frozen=True, kw_only=True)
class ExitOptions:
    """There is nothing to choose."""


class ExitRecipe:
    """sum_e (w KL(p, q_e) + (1 - w) CE_e) / K over the tokens with weight (eq. 15); held-out batches are by domain."""

    name = "exits"

    def __init__(
        self,
        heads: ExitHeads,
        target: Network,
        held_out: Mapping[str, Sequence[TokenBatch]] | None = None,
    ) -> None:
        self.module, self.target, self.held_out = heads, target, held_out or {}

    @torch.no_grad()
    def states(self, batch: TokenBatch) -> list[Tensor]:
        """Return [rows, d_model] of the tokens with weight: after the layers of every exit, and after the last."""
        rows = batch.weights > 0
        hidden, states, start = self.target.embed(batch.tokens), [], 0
        for stop in (*self.module.config.layers, self.target.config.num_layers):
            hidden, start = self.target.run(hidden, start, stop, batch)[0], stop
            states.append(hidden[rows])
        return states

    def loss(self, batch: TokenBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, float]]:
        """Return the mean over the exits, and each one's parts (nats)."""
        *states, last = self.states(batch)
        rows, count = batch.weights > 0, len(states)
        weights, tokens = batch.weights[rows], batch.targets[rows]
        normed = torch.cat([self._normed(place, hidden) for place, hidden in enumerate(states)])
        loss, parts = distilled(
            normed,
            self.target.head_weight,
            TargetHidden(self.target.final(last).repeat(count, 1), self.target.head_weight),
            tokens.repeat(count),
            weights.repeat(count),
            share=DISTILL,
        )
        means = (parts.unflatten(1, (count, -1)) * weights).sum(-1) / weights.sum().clamp_min(1e-9)  # [2, K]
        layers = self.module.config.layers
        named = {"kl": means[0], "ce": means[1]}
        return loss, {
            f"{what}_{layer}": value
            for what, values in named.items()
            for layer, value in zip(layers, values.tolist(), strict=True)
        }

    def _normed(self, place: int, hidden: Tensor) -> Tensor:
        """Return what the target's head reads of one exit."""
        return self.target.final(self.module.adapt(place, hidden))

    # -- held-out figures (figure 9)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Measure by domain and layer accuracy, agreement and overlap mass.

        How often the likeliest token is the text's (accuracy) and the target's (agreement), and the target's own
        probability of the kappa likeliest (overlap mass, eq. 9, at every position).
        """
        figures: dict[str, float] = {}
        device, vocab = self.target.head_weight.device, len(self.target.head_weight)
        names, layers = ("accuracy", "agreement", *(f"mass_{kappa}" for kappa in KAPPAS)), self.module.config.layers
        for domain, batches in self.held_out.items():
            total, sums = 0, torch.zeros(len(names), len(layers))
            for held in batches:
                batch = held.to(device)
                *states, last = self.states(batch)
                tokens = batch.targets[batch.weights > 0]
                total += len(tokens)
                for part in torch.arange(len(tokens), device=device).split(max(1, EVALUATED_LOGITS // vocab)):
                    p = self.target.logits(self.target.final(last[part])).float().softmax(-1)
                    both = torch.stack((tokens[part], p.argmax(-1)))
                    for place, hidden in enumerate(states):
                        logits = self.target.logits(self._normed(place, hidden[part]))
                        best = logits.topk(min(max(KAPPAS), vocab)).indices
                        mass = p.gather(-1, best).cumsum(-1).sum(0)
                        masses = mass[[min(kappa, len(mass)) - 1 for kappa in KAPPAS]]
                        sums[:, place] += torch.cat(((best[:, 0] == both).sum(-1), masses)).cpu()
            for name, row in zip(names, sums.tolist(), strict=True):
                for layer, value in zip(layers, row, strict=True):
                    figures[f"{name}/{domain}/{layer}"] = value / max(1, total)
        return figures

    # -- result

    def export(self, folder: Path) -> dict[str, Any]:
        """Return `ExitHeads.save` in bf16; parameters, and their share of the target's."""
        self.module.save(folder)
        trained, all_ = (sum(p.numel() for p in part.parameters()) for part in (self.module, self.target))
        return {"parameters": trained, "share_of_target": trained / all_}


def build(options: ExitOptions, context: BuildContext) -> ExitRecipe:
    """Return fresh exits of the context's target, or those in ``context.init``.

    Raises:
        ConfigError: one without a middle, or exits of another shape to continue from.
    """
    target, folder = context.subject()
    shape = target.config
    config = ExitsConfig(
        layers=shares(shape.num_layers),
        num_layers=shape.num_layers,
        d_model=shape.d_model,
        vocab_size=shape.vocab_size,
        target=folder.name,
        fingerprint=fingerprint(folder),
    )
    if context.init is None:
        heads = ExitHeads.fresh(config, torch.Generator().manual_seed(context.seed))
    else:
        heads = resumed(load(context.init, torch.float32).requires_grad_(True), config, context.init)
    return ExitRecipe(heads.to(context.device), target, context.held_out)
