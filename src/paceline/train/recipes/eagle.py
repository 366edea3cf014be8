"""The recipe ``eagle``: a drafter of states that reads the tokens it drafts, over a frozen target (EAGLE, section
4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...core.options import option
from ...draft.eagle.model import EagleFacts, EagleModel
from ...draft.states.head import layer_json
from ...weights.files import fingerprint
from .states import UnrolledRecipe, UnrollOptions, begin

if TYPE_CHECKING:
    from ..registry import BuildContext


@dataclass(frozen=True, kw_only=True)
class EagleOptions(UnrollOptions):
    """How it is trained; its shape is the target's."""

    noise: float = option(0.1, help="features get uniform noise of so much up and down", minimum=0)


def build(options: EagleOptions, context: BuildContext) -> UnrolledRecipe:
    """A fresh head, or one that goes on from ``context.init``.

    Raises:
        ConfigError: a head of another shape to go on from.
    """
    target, folder = context.subject()
    facts = EagleFacts(steps=options.depth, target=folder.name, fingerprint=fingerprint(folder))
    generator = torch.Generator().manual_seed(context.seed)
    made = EagleModel.fresh(layer_json(target.config), facts, generator, context.device)
    begin(made, options, context)
    given = target, options, context.held_out, context.features
    return UnrolledRecipe("eagle", made, *given, save=made.save, hot=context.hot)
