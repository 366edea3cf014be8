"""How many nodes to draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..core.errors import ConfigError
from ..rounds.base import RunningSequence

MAX_BUDGET = 1024  # nodes a tree; beyond this a mask alone outweighs the model


class DraftBudget(Protocol):
    """Decides the number of drafted nodes of each sequence, zero included."""

    def nodes(self, sequence: RunningSequence, batch_size: int) -> int:
        """Nodes for this sequence in a step with ``batch_size`` generating sequences."""
        ...

    def reason(self) -> str | None:
        """Why nothing is drafted, where nothing is."""
        ...


@dataclass(frozen=True, kw_only=True)
class FixedBudget:
    """The same number of nodes for every sequence in every step."""

    size: int
    why: str | None = None  # said where size is 0

    def __post_init__(self) -> None:
        if not 0 <= self.size <= MAX_BUDGET:
            raise ConfigError(
                f"budget={self.size}", f"a draft budget is 0 to {MAX_BUDGET} nodes", "use 0 to switch drafting off"
            )

    def nodes(self, sequence: RunningSequence, batch_size: int) -> int:
        """The fixed size."""
        return self.size

    def reason(self) -> str | None:
        """Why nothing is drafted."""
        return (self.why or "the draft budget is 0") if self.size == 0 else None
