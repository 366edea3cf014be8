"""Recipe kinds by name: what can be trained, with which options.

A kind is an entry of `KINDS` and a module of `recipes` or of the paper that it trains for. The module holds the kind's
options, a frozen dataclass that the table ``[options]`` of a recipe file fills, and ``build(options, context)``, which
makes the `Recipe`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from ..core.errors import ConfigError
from ..core.options import suggest
from .data import TokenBatch
from .features import Features
from .network import Network
from .trainer import Recipe


@dataclass(kw_only=True, slots=True)
class BuildContext:
    """Describe what a recipe may be built from: the surroundings of a run."""

    target: Network | None  # frozen, float32; None where none was named
    target_folder: Path | None
    tokenizer: Any
    held_out: Mapping[str, Sequence[TokenBatch]] = field(default_factory=dict)  # by domain
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 0
    prompt_weight: float = 0.0  # of prompt tokens in the loss
    init: Path | None = None  # folder whose weights the run starts from
    features: Features | None = None  # of the target, from a cache; None: it is run on each batch
    batches: Callable[[], Iterable[TokenBatch]] | None = None  # the run's data, from the beginning
    hot: Tensor | None = None  # [H] int64, ascending: the only tokens that are to be drafted; None: all

    def subject(self) -> tuple[Network, Path]:
        """Return the target that something is trained for, and its folder.

        Raises:
            ConfigError: there is none.
        """
        if self.target is None or self.target_folder is None:
            raise ConfigError("training a drafter", "there is no target to train it for", "give --target")
        return self.target, self.target_folder


@dataclass(frozen=True, slots=True)
class RecipeKind:
    """One kind of training; modules are named, not imported, and load when they are requested."""

    options: str  # ``module:class``
    cached: bool = False  # it learns from the target's likeliest tokens, which a cache may hold
    states: bool = False  # it reads the target's last states, which a cache then holds, too: `Features.states`

    @property
    def Options(self) -> type[Any]:  # noqa: N802  (a class)
        """Return what can be set: frozen, keyword-only, its fields have help texts."""
        options: type[Any] = resolve_name(self.options)
        return options

    def build(self, options: Any, context: BuildContext) -> Recipe:
        """Return the recipe, ready to train.

        Raises:
            ConfigError: options that do not fit the target, or something missing.
        """
        recipe: Recipe = resolve_name(f"{self.options.partition(':')[0]}:build")(options, context)
        return recipe


KINDS = {
    "draft_model": RecipeKind("paceline.train.recipes.distillation:DistilledOptions", cached=True),
    "streams": RecipeKind("paceline.papers.streaming.recipe:StreamsOptions"),
    "medusa": RecipeKind("paceline.train.recipes.medusa:HeadOptions", cached=True, states=True),
    "exits": RecipeKind("paceline.papers.mirror.exits_recipe:ExitOptions"),
    "lyanna": RecipeKind("paceline.papers.lyanna.recipe:LyannaOptions", cached=True, states=True),
    "eagle": RecipeKind("paceline.train.recipes.eagle:LayerOptions", cached=True, states=True),
    "spire": RecipeKind("paceline.papers.spire.recipe:SpireOptions"),
    "tracks": RecipeKind("paceline.papers.mirror.tracks_training:TracksOptions", cached=True),
}


def kind(name: str) -> RecipeKind:
    """Return the kind of a name.

    Raises:
        ConfigError: there is none.
    """
    if name not in KINDS:
        raise ConfigError(f"recipe kind {name!r}", "there is no such kind", suggest(name, KINDS, "kind"))
    return KINDS[name]
