"""No drafts: plain decoding, under the same contract as every drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..core.tree import TokenTree
from .base import Drafter, DrafterSpec, DraftRequest
from .registry import DrafterConfig, DrafterContext


@dataclass(frozen=True, kw_only=True)
class NoneConfig(DrafterConfig):
    """No drafting: the target alone, one token a pass."""

    kind: ClassVar[str] = "none"

    def build(self, context: DrafterContext) -> NoDrafter:
        return NoDrafter()


class NoDrafter(Drafter):
    """Proposes the roots alone. Its default budget is 0, so the engine does not call it."""

    spec = DrafterSpec(name="none")

    def draft(self, want: DraftRequest) -> list[TokenTree]:
        """Return empty trees."""
        return [TokenTree() for _ in want.sequences]
