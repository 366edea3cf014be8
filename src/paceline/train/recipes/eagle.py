"""The recipe ``eagle``: a drafter of states that reads the tokens it drafts, over a frozen target (EAGLE, section
4)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from ...draft.eagle.model import EagleFacts, EagleModel
from ...draft.states.head import layer_json
from ...weights.files import fingerprint
from .heads import HeadRecipe, LayerOptions, begin, unroll

if TYPE_CHECKING:
    from ..registry import BuildContext

NOISE = 0.1  # on the features


def build(options: LayerOptions, context: BuildContext) -> HeadRecipe:
    """Return a fresh head, or one that continues from ``context.init``.

    Raises:
        ConfigError: a head of another shape to continue from.
    """
    target, folder = context.subject()
    facts = EagleFacts(steps=options.depth, target=folder.name, fingerprint=fingerprint(folder))
    generator = torch.Generator().manual_seed(context.seed)
    model = EagleModel.fresh(layer_json(target.config), facts, generator, context.device)
    begin(model, options, context)
    return HeadRecipe("eagle", model, options, context, partial(unroll, model), noise=NOISE)
