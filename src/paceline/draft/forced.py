"""Tokens that a grammar forces: under compact JSON about half of an answer follows from the schema alone."""

from __future__ import annotations

import math
from collections import abc
from dataclasses import dataclass
from typing import ClassVar

from ..core.sequence import Sequence
from ..core.tree import TokenTree
from .base import DrafterSpec
from .registry import DrafterConfig, DrafterContext, option
from .text_sessions import LookUp

CHANCE = 0.99  # of a token, given those before it: it may be split in another way than the tokenizer would


@dataclass(frozen=True, kw_only=True)
class ForcedConfig(DrafterConfig):
    """Tokens that a request's grammar forces, and nothing for requests without one."""

    kind: ClassVar[str] = "grammar"

    depth: int = option(16, help="tokens drafted at once", minimum=1, maximum=1024)

    def build(self, context: DrafterContext) -> ForcedDrafter:
        return ForcedDrafter(self)


class ForcedDrafter(LookUp):
    """Drafts what comes next in every text that the sequence's grammar allows."""

    def __init__(self, config: ForcedConfig) -> None:
        self.config = config
        self.spec = DrafterSpec(name=config.kind, default_budget=config.depth, observes=False, ahead=True)

    def draft_one(self, seq: Sequence, budget: int, max_depth: int) -> TokenTree:
        """Return a chain of the tokens that the grammar forces."""
        return TokenTree.chain(self._forced(seq, (), min(self.config.depth, budget, max_depth)), CHANCE)

    def continuations(self, sequence: Sequence, path: abc.Sequence[int], width: int) -> list[tuple[int, float]]:
        """Return the one token that the grammar forces, if it forces one."""
        return [(token, math.log(CHANCE)) for token in self._forced(sequence, path, 1)]

    @staticmethod
    def _forced(view: Sequence, path: abc.Sequence[int], most: int) -> list[int]:
        matcher = view.sampler.matcher
        return [] if matcher is None else matcher.forced([*view.sampler.output_ids, *path], most)
