"""No guesses: plain decoding, under the same contract as every drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from ..core.tree import TokenTree
from .base import DrafterSpec, DraftRequest, StepFeatures
from .registry import DrafterConfig, DrafterContext

if TYPE_CHECKING:
    from ..target.base import TargetInfo


@dataclass(frozen=True, kw_only=True)
class NoneConfig(DrafterConfig):
    """No drafting: the target alone, one token a pass."""

    kind: ClassVar[str] = "none"

    def build(self, context: DrafterContext) -> NoDrafter:
        return NoDrafter()


class NoDrafter:
    """Proposes the roots alone. Its default budget is 0, so an engine need not ask it at all."""

    spec = DrafterSpec(name="none")

    def bind(self, target: TargetInfo, max_sequences: int, pool_tokens: int, device: torch.device) -> None:
        """Nothing to prepare."""

    def observe(self, step: StepFeatures) -> None:
        """Nothing to learn."""

    def propose(self, want: DraftRequest) -> TokenTree:
        """[B, 1] trees of one root each."""
        return TokenTree.roots(want.roots())

    def release(self, keys: Sequence[int]) -> None:
        """Nothing to drop."""
