"""The recipe ``medusa``: heads on the last state of a frozen target, whose head serves all of them.

Source: Medusa (Cai et al. 2024), section 3.2.1 (Medusa-1), with the target's distribution in place of the text.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...draft.medusa.heads import Heads, HeadsConfig, load
from ...weights.files import fingerprint
from ...weights.trained_files import resumed
from .heads import HeadOptions, HeadRecipe, Predict

if TYPE_CHECKING:
    from ..registry import BuildContext

DECAY = 0.8  # lambda: weight of each further head's loss, of the one before


class MedusaRecipe(HeadRecipe):
    """Trains a head for each token ahead, all of them on the same state."""

    def export(self, folder: Path) -> dict[str, Any]:
        """Write the heads, with the rates at which their likeliest tokens are the target's on the held-out data."""
        self.module.config = replace(self.module.config, accuracies=self.hit_rates())
        return super().export(folder)


def build(options: HeadOptions, context: BuildContext) -> MedusaRecipe:
    """Return fresh heads over the context's target, or those in ``context.init``.

    Raises:
        ConfigError: heads of another shape to continue from.
    """
    target, folder = context.subject()
    config = HeadsConfig(
        heads=options.depth,
        d_model=target.config.d_model,
        vocab_size=target.config.vocab_size,
        target=folder.name,
        fingerprint=fingerprint(folder),
    )
    if context.init is None:
        heads = Heads.fresh(config)
    else:
        heads = load(context.init, torch.float32).requires_grad_(True)
        heads = resumed(heads, config, context.init, ("accuracies",))
    heads = heads.to(context.device)
    return MedusaRecipe("medusa", heads, options, context, of_anchors(heads), alpha=0.0, decay=DECAY)


def of_anchors(heads: Heads) -> Predict:
    """Return the function that computes each head's states from those of the anchors."""
    return lambda features, batch, anchors, *_: heads(features.flatten(0, 1)[anchors.index]).unbind(1)
