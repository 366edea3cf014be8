"""The recipe ``exits``: early exits at several depths of a frozen target, trained together.

Source: Mirror Speculative Decoding, E.2, eq. 15, with distillation from the target next to the text (the paper has
none), and with the state added to what an exit makes of it, so that it begins as the untrained one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
        for domain, batches in self.held_out.items():
            rows, hits, masses = self._sums(batches)
            for place, layer in enumerate(self.module.config.layers):
                where = f"{domain}/{layer}"
                figures[f"accuracy/{where}"] = float(hits[0, place]) / max(1, rows)
                figures[f"agreement/{where}"] = float(hits[1, place]) / max(1, rows)
                for kappa, mass in zip(KAPPAS, masses[:, place].tolist(), strict=True):
                    figures[f"mass_{kappa}/{where}"] = mass / max(1, rows)
        return figures

    def _sums(self, batches: Sequence[TokenBatch]) -> tuple[int, Tensor, Tensor]:
        """Return, for one domain: rows; [2, K] hits of the text and of the target; [kappas, K] masses."""
        count = len(self.module.config.layers)
        total, hits, masses = 0, torch.zeros(2, count), torch.zeros(len(KAPPAS), count)
        for batch in batches:
            for states, last, tokens in self._parts(batch.to(self.target.head_weight.device)):
                p = self.target.logits(self.target.final(last)).float().softmax(-1)
                for place, hidden in enumerate(states):
                    best = self.target.logits(self._normed(place, hidden)).topk(min(max(KAPPAS), p.shape[-1])).indices
                    both = torch.stack((tokens, p.argmax(-1)))
                    hits[:, place] += (best[:, 0] == both).sum(-1).cpu()
                    mass = p.gather(-1, best).cumsum(-1).sum(0).cpu()
                    masses[:, place] += torch.stack([mass[min(kappa, len(mass)) - 1] for kappa in KAPPAS])
                total += len(tokens)
        return total, hits, masses

    def _parts(self, batch: TokenBatch) -> Iterator[tuple[list[Tensor], Tensor, Tensor]]:
        """Yield states of the exits, last states and the text's next tokens, some rows at a time."""
        *states, last = self.states(batch)
        size = max(1, EVALUATED_LOGITS // self.target.head_weight.shape[0])
        parts = zip(*(hidden.split(size) for hidden in states), strict=True)
        rest = last.split(size), batch.targets[batch.weights > 0].split(size)
        for part, final, tokens in zip(parts, *rest, strict=True):
            yield list(part), final, tokens

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
