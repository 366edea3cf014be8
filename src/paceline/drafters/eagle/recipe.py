"""The recipe ``eagle``: a drafter of states that reads the tokens it drafts, over a frozen target (EAGLE, section
4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...core.errors import ConfigError
from ...core.options import option
from ...network.files import fingerprint
from ..states.head import layer_json
from ..states.unrolled import UnrolledRecipe, UnrollOptions
from .model import EagleFacts, EagleModel

if TYPE_CHECKING:
    from ...training.registry import BuildContext


@dataclass(frozen=True, kw_only=True)
class EagleOptions(UnrollOptions):
    """How it is trained; its shape is the target's."""

    noise: float = option(0.1, help="features get uniform noise of so much up and down", minimum=0)


class EagleKind:
    """How ``paceline train eagle`` builds the recipe."""

    name = "eagle"
    Options = EagleOptions
    needs_target = True
    takes_init = True

    def imitates(self, options: EagleOptions) -> bool:
        """True: a draft is accepted where it agrees with the target."""
        return True

    def top(self, options: EagleOptions) -> int:
        """Its option."""
        return options.top

    def states(self, options: EagleOptions) -> bool:
        """True: they are what it starts from and learns."""
        return True

    def build(self, options: EagleOptions, context: BuildContext) -> UnrolledRecipe:
        """A fresh head, or one that goes on from ``context.init``.

        Raises:
            ConfigError: no target, or a head of another shape to go on from.
        """
        if context.target is None or context.target_folder is None:
            raise ConfigError("training eagle", "there is no target to draft for", "give --target")
        facts = EagleFacts(
            steps=options.depth, target=context.target_folder.name, fingerprint=fingerprint(context.target_folder)
        )
        generator = torch.Generator().manual_seed(context.seed)
        made = EagleModel.fresh(layer_json(context.target.config), facts, generator, context.device)
        if context.init is not None:
            made.resume(context.init)
        given = context.target, options, context.held_out, context.features
        return UnrolledRecipe(self.name, made, *given, save=made.save)
