"""The recipe ``lyanna``: a drafter of states, with token-info at its logits, over a frozen target.

Source: Lyanna, sections 4.1 and 5.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from ...core.options import option
from ...draft.fit import tokenizer_mark
from ...draft.states.head import layer_json
from ...train.recipes.heads import HeadRecipe, LayerOptions, begin, unroll
from ...weights.files import fingerprint
from .model import LyannaModel, LyannaShape

if TYPE_CHECKING:
    from ...train.registry import BuildContext


@dataclass(frozen=True, kw_only=True)
class LyannaOptions(LayerOptions):
    """Describe what is trained, and how."""

    rank: int = option(64, help="rank of token-info's two matrices; 0: there is none", minimum=0, maximum=4096)


def build(options: LyannaOptions, context: BuildContext) -> HeadRecipe:
    """Return a fresh drafter, or one that continues from ``context.init``.

    Raises:
        ConfigError: a drafter of another shape to continue from.
    """
    target, folder = context.subject()
    shape = LyannaShape(
        layer=layer_json(target.config),
        steps=options.depth,
        rank=options.rank,
        target=folder.name,
        fingerprint=fingerprint(folder),
        tokenizer=tokenizer_mark(context.tokenizer),
    )
    model = LyannaModel.fresh(shape, torch.Generator().manual_seed(context.seed), context.device)
    begin(model, options, context)
    return HeadRecipe("lyanna", model, options, context, partial(unroll, model))
