"""The recipe ``lyanna``: a drafter of states, with token-info at its logits, over a frozen target (Lyanna, 4.1 and
5.1)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ...core.errors import ConfigError
from ...core.options import option
from ...draft.fit import tokenizer_mark
from ...draft.states.head import layer_json
from ...model.hot import most_frequent
from ...train.recipes.states import UnrolledRecipe, UnrollOptions, begin
from ...weights.files import fingerprint
from .model import LyannaModel, LyannaShape

if TYPE_CHECKING:
    from ...train.registry import BuildContext


@dataclass(frozen=True, kw_only=True)
class LyannaOptions(UnrollOptions):
    """What is trained, and how."""

    fusion: Literal["concat", "sum"] = option("concat", help="how state and token become the layer's input")
    first_token: bool = option(True, help="whether the first step sees the token that follows the state")
    token_info: bool = option(True, help="whether a parent's token is added to the logits")
    rank: int = option(64, help="rank of token-info's two matrices", minimum=1, maximum=4096)
    hot: float = option(
        0.0, help="share of the vocabulary, most frequent first, that has token-info; 0: all of it", minimum=0, below=1
    )
    hot_in_training: bool = option(
        True, help="with hot: other tokens have none in training, either; else the table is cut afterwards"
    )

    def hot_tokens(self, vocab: int) -> int:
        """How many tokens are hot; 0: token-info knows no difference."""
        return max(1, round(self.hot * vocab)) if self.token_info and self.hot else 0


def build(options: LyannaOptions, context: BuildContext) -> UnrolledRecipe:
    """A fresh drafter, or one that goes on from ``context.init``.

    Raises:
        ConfigError: a drafter of another shape to go on from.
    """
    target, folder = context.subject()
    config = target.config
    hot = _hot_tokens(options, context)
    trained = hot if options.hot_in_training else None  # what training knows of them
    shape = LyannaShape(
        layer=layer_json(config),
        steps=options.depth,
        fusion=options.fusion,
        first_token=options.first_token,
        rank=options.rank if options.token_info else 0,
        hot=0 if trained is None else len(trained),
        hot_columns=trained is not None,
        target=folder.name,
        fingerprint=fingerprint(folder),
        tokenizer=tokenizer_mark(context.tokenizer),
    )
    made = LyannaModel.fresh(shape, trained, torch.Generator().manual_seed(context.seed), context.device)
    begin(made, options, context)
    save = made.save if hot is None or trained is not None else partial(_save_cut, made, hot)
    given = target, options, context.held_out, context.features
    return UnrolledRecipe("lyanna", made, *given, save=save, hot=context.hot)


def _save_cut(model: LyannaModel, hot: Tensor, folder: Path) -> None:
    model.cut(hot).save(folder)


def _hot_tokens(options: LyannaOptions, context: BuildContext) -> Tensor | None:
    """[H] int64, ascending: the tokens that occur most often in the run's data (Lyanna, section 6.1)."""
    assert context.target is not None
    count = options.hot_tokens(context.target.config.vocab_size)
    if not count:
        return None
    if context.occurrences is None:
        raise ConfigError(f"hot={options.hot}", "there are no statistics of tokens", "train it on data")
    return most_frequent(context.occurrences(), count)
