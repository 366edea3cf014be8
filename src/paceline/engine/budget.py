"""State how many nodes to draft: a fixed number, or what the engine chooses (`auto.AutoBudget`)."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import Literal

from ..core.errors import ConfigError
from ..core.options import shown
from ..core.sequence import Sequence
from ..draft.base import DraftRule

MAX_BUDGET = 1024  # nodes a tree; beyond this a mask alone outweighs the model
AUTO: Literal["auto"] = "auto"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The record of one step, for a budget that learns. Lists are over the sequences that got tokens."""

    sequences: abc.Sequence[Sequence]  # [B] in the order of the pass
    budgets: abc.Sequence[int]  # [B] nodes that were allowed
    drafted: abc.Sequence[int]  # [B] nodes that were checked
    accepted: abc.Sequence[int]  # [B] drafted tokens that were emitted
    pure: bool  # every row was a root or a drafted node: no prompt was computed next to them
    draft_ms: float
    propose_ms: float  # of these: what calling the drafter took, which it would not take without calls
    rest_ms: float  # everything else of the step: scheduling, target pass, verification, book-keeping


class DraftBudget:
    """Decides the number of drafted nodes of each sequence, zero included.

    The methods here suit a budget that learns nothing.
    """

    most_nodes: int  # of a sequence in a step
    learns = False  # whether the engine calls `observe` for the coming step; it reads this after `plan`
    rule: DraftRule | None = None  # chooses among the proposed nodes; None: all within the budget are checked
    rests = False  # neither the coming step nor the one after it drafts: nothing need be prepared; read after `plan`

    def plan(self, sequences: abc.Sequence[Sequence], batch_size: int) -> list[int]:
        """Nodes for the coming step.

        Args:
            sequences: [b] those that can draft: one token back, and room for more than one.
            batch_size: generating sequences in the step, those that cannot draft included.

        Returns:
            [b] nodes allowed for each.
        """
        raise NotImplementedError

    def observe(self, step: StepRecord) -> None:
        """Take in the record of a step; called after each step where `learns`."""

    def forget(self, sequences: abc.Sequence[Sequence]) -> None:
        """Drop what is kept of sequences that have ended."""

    def reset_source(self, source: str, expected: float | None = None) -> None:
        """Note that another drafter takes the place of a source from now on.

        Args:
            source: name of the drafter that it replaces, which may be one of a hybrid's.
            expected: tokens of a draft of it that are accepted, if known.
        """

    def reason(self) -> str | None:
        """Why nothing is drafted at all, known before the first step; None where something may be."""
        return None

    def idle_reason(self, sequence: Sequence) -> str | None:
        """Why drafting was off for most of this sequence's steps, if it was."""
        return self.reason()

    def explain(self) -> str:
        """Explain the choice in a sentence."""
        raise NotImplementedError


@dataclass(frozen=True)
class FixedBudget(DraftBudget):
    """Allows the same number of nodes for every sequence in every step."""

    most_nodes: int
    why: str | None = None  # the reason that is given where it is 0

    def __post_init__(self) -> None:
        if not 0 <= self.most_nodes <= MAX_BUDGET:
            subject = f"budget={shown(self.most_nodes)}"
            raise ConfigError(subject, f"a draft budget is 0 to {MAX_BUDGET} nodes", "use 0 to switch drafting off")

    def plan(self, sequences: abc.Sequence[Sequence], batch_size: int) -> list[int]:
        """Return the number for each sequence."""
        return [self.most_nodes] * len(sequences)

    def reason(self) -> str | None:
        """Return why nothing is drafted, where the number is 0."""
        return None if self.most_nodes else self.why or "the draft budget is 0"

    def explain(self) -> str:
        """Return the reason, or the number."""
        return self.reason() or f"fixed at {self.most_nodes}"


def parse_budget(value: int | str | None) -> FixedBudget | Literal["auto"]:
    """Return the budget that a user requested: a number, or ``auto`` (also None).

    Raises:
        ConfigError: neither, or out of range.
    """
    text = value.strip().lower() if isinstance(value, str) else value
    if text is None or text == AUTO:
        return AUTO
    if isinstance(text, str) and text.isascii() and text.removeprefix("-").isdigit() and len(text) < 10:
        text = int(text)
    if isinstance(text, bool) or not isinstance(text, int):
        raise ConfigError(f"budget={shown(value)}", "it is not a draft budget", "give a number, or 'auto'")
    return FixedBudget(text, why=f"budget={text}")
