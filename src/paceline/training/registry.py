"""Recipe kinds by name: what can be trained, with which options.

A kind is a class named in the table below, beside the drafter that it trains. It says its options (a frozen
dataclass with help texts) and builds a `Recipe`; a recipe file's ``[options]``, or flags on the command line, fill
them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ..core.errors import ConfigError
from .data import TokenBatch
from .features import Features
from .network import Network
from .trainer import Recipe

# Named, not imported: a kind loads when it is asked for.
KINDS = {
    "target": "paceline.training.target:TargetKind",
    "draft_model": "paceline.drafters.distillation:DraftModelKind",
    "streams": "paceline.drafters.streams.recipe:StreamsKind",
    "medusa": "paceline.drafters.medusa.recipe:MedusaKind",
    "exits": "paceline.training.exits:ExitsKind",
    "lyanna": "paceline.drafters.lyanna.recipe:LyannaKind",
    "eagle": "paceline.drafters.eagle.recipe:EagleKind",
    "spire": "paceline.drafters.spire.recipe:SpireKind",
}


@dataclass(kw_only=True, slots=True)
class BuildContext:
    """What a recipe may be built from: the surroundings of a run."""

    target: Network | None  # frozen, float32; None where none was named
    target_folder: Path | None
    tokenizer: Any
    held_out: Mapping[str, Sequence[TokenBatch]] = field(default_factory=dict)  # by domain
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 0
    prompt_weight: float = 0.0  # of prompt tokens in the loss
    init: Path | None = None  # folder whose weights the run starts from
    features: Features | None = None  # of the target, from a cache; None: it is run on each batch
    occurrences: Callable[[], Tensor] | None = None  # [V] float64 share of each token in the run's data


class RecipeKind(Protocol):
    """One kind of training."""

    name: str
    needs_target: bool  # it trains something for a target
    takes_init: bool  # it can start from a folder of its own kind of weights: `BuildContext.init`
    Options: ClassVar[type[Any]]  # frozen, keyword-only, its fields have help texts

    def imitates(self, options: Any) -> bool:
        """Whether it learns to say what the target says, so that the target's own answers are its best data."""
        ...

    def top(self, options: Any) -> int:
        """How many of the target's likeliest tokens it learns from, which a cache can hold; 0: it reads no cache."""
        ...

    def states(self, options: Any) -> bool:
        """Whether it reads the target's last states, which a cache then holds, too: `Features.states`."""
        ...

    def build(self, options: Any, context: BuildContext) -> Recipe:
        """The recipe, ready to train.

        Raises:
            ConfigError: options that do not fit the target, or something missing.
        """
        ...


def kind(name: str) -> RecipeKind:
    """The kind of a name.

    Raises:
        ConfigError: there is none.
    """
    if name not in KINDS:
        close = difflib.get_close_matches(name, KINDS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(f"recipe kind {name!r}", "there is no such kind", f"{hint}known kinds: {', '.join(KINDS)}")
    made: RecipeKind = resolve_name(KINDS[name])()
    return made
