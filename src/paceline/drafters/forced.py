"""Tokens that a grammar forces: under compact JSON about half of an answer follows from the schema alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import Drafter, DrafterSpec, DraftRequest, SequenceView
from .proposal import Proposal
from .registry import DrafterConfig, DrafterContext, option

CHANCE = 0.99  # of a token, given those before it: it may be split in another way than the tokenizer would


@dataclass(frozen=True, kw_only=True)
class ForcedConfig(DrafterConfig):
    """Tokens that a request's grammar forces, and nothing for requests without one."""

    kind: ClassVar[str] = "grammar"

    depth: int = option(16, help="tokens drafted at once", minimum=1, maximum=1024)

    def build(self, context: DrafterContext) -> ForcedDrafter:
        return ForcedDrafter(self)


class ForcedDrafter(Drafter):
    """Drafts what comes next in every text that the sequence's grammar allows."""

    trusted = True

    def __init__(self, config: ForcedConfig) -> None:
        self.config = config
        self.spec = DrafterSpec(name=config.kind, default_budget=config.depth, observes=False)

    def draft(self, want: DraftRequest) -> list[Proposal]:
        """A chain for each sequence whose grammar forces a token."""
        return [self._draft(*row) for row in want.rows()]

    def _draft(self, view: SequenceView, budget: int, max_depth: int) -> Proposal:
        matcher = view.sampler.matcher
        if matcher is None:
            return Proposal()
        most = min(self.config.depth, budget, max_depth)
        return Proposal.chain(matcher.forced(view.sampler.output_ids, most), CHANCE)
