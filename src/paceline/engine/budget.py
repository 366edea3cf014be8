"""How many nodes to draft: fixed, by batch size, or chosen by the engine (`auto.AutoBudget`)."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from ..core.errors import ConfigError
from ..core.options import MOST_TEXT, shown
from ..core.sequence import Sequence
from ..draft.base import DraftRule

MAX_BUDGET = 1024  # nodes a tree; beyond this a mask alone outweighs the model
AUTO: Literal["auto"] = "auto"
FORMS = "give a number, a table such as '1:8,4:4,16:0', or 'auto'"


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

    learns = False  # whether the engine calls `observe` for the coming step; it reads this after `plan`
    rests = False  # neither the coming step nor the one after it drafts: nothing need be prepared; read after `plan`

    @property
    def never_drafts(self) -> bool:
        """Return whether the budget is always 0, so that `plan` need not be called."""
        return False

    @property
    def rule(self) -> DraftRule | None:
        """Return what chooses among the proposed nodes; None: all within the budget are checked."""
        return None

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
        return str(self.describe()["why"])

    def describe(self) -> dict[str, Any]:
        """Return what was chosen and why, ready for JSON; ``kind`` and ``why`` are always there."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class FixedBudget(DraftBudget):
    """The same number of nodes for every sequence in every step, or one by batch size.

    The entry of the largest listed batch size that is not above the current one.
    """

    size: int | tuple[tuple[int, int], ...]  # nodes, or (batch size, nodes), ascending, from batch size 1 on
    why: str | None = None  # the reason that is given where the size is 0

    def __post_init__(self) -> None:
        if isinstance(self.size, int):
            _check_size(self.size, f"budget={shown(self.size)}")
            return
        subject = f"budget={shown(dict(self.size))}"
        if not self.size or self.size[0][0] != 1:
            raise ConfigError(subject, "a table begins at batch size 1", "write it like 1:8,4:4,16:0")
        if any(later <= earlier for (earlier, _), (later, _) in pairwise(self.size)):
            raise ConfigError(subject, "batch sizes must ascend, each listed once", "write it like 1:8,4:4,16:0")
        for _, size in self.size:
            _check_size(size, subject)

    def __str__(self) -> str:
        return str(self.size) if isinstance(self.size, int) else ",".join(f"{b}:{nodes}" for b, nodes in self.size)

    @property
    def never_drafts(self) -> bool:
        """Return whether every size is 0."""
        return self.size == 0 if isinstance(self.size, int) else all(nodes == 0 for _, nodes in self.size)

    def size_at(self, batch_size: int) -> int:
        """Nodes at a batch size."""
        if isinstance(self.size, int):
            return self.size
        return next(nodes for batch, nodes in reversed(self.size) if batch <= max(1, batch_size))

    def plan(self, sequences: abc.Sequence[Sequence], batch_size: int) -> list[int]:
        """Return the same number of nodes for each sequence: that of the batch size."""
        return [self.size_at(batch_size)] * len(sequences)

    def reason(self) -> str | None:
        """Why nothing is drafted at any batch size."""
        if not self.never_drafts:
            return None
        if isinstance(self.size, int):
            return self.why or "the draft budget is 0"
        return f"the draft budget is 0 at every batch size ({self})"

    def idle_reason(self, sequence: Sequence) -> str | None:
        """Why a sequence drafted nothing, also where the table allows drafts in smaller batches."""
        if isinstance(self.size, int):
            return self.reason()
        stats = sequence.stats
        return f"the draft budget is 0 at the batch sizes met ({self})" if stats.passes and not stats.drafted else None

    def describe(self) -> dict[str, Any]:
        """Return the size, or the table."""
        if isinstance(self.size, int):
            return {"kind": "fixed", "nodes": self.size, "why": self.reason() or f"fixed at {self.size}"}
        return {"kind": "table", "table": dict(self.size), "why": self.reason() or f"by batch size: {self}"}


def parse_budget(value: int | str | abc.Mapping[Any, Any] | None) -> FixedBudget | Literal["auto"]:
    """Return the budget that a user requested: a number, a table, or ``auto`` (also None).

    Raises:
        ConfigError: neither, or out of range.
    """
    if value is None:
        return AUTO
    if isinstance(value, bool) or not isinstance(value, int | str | abc.Mapping):
        raise ConfigError(f"budget={shown(value)}", "not a draft budget", FORMS)
    if isinstance(value, int):
        return FixedBudget(size=value, why=f"budget={shown(value)}")
    if isinstance(value, abc.Mapping):
        return FixedBudget(size=tuple(sorted((_whole(b, value), _whole(n, value)) for b, n in value.items())))
    text = value.strip().lower()
    if len(text) > MOST_TEXT:
        raise ConfigError(f"budget={shown(value)}", f"it has {len(text):,} characters", FORMS)
    if text == AUTO:
        return AUTO
    if ":" not in text:
        size = _whole(text, value)
        return FixedBudget(size=size, why=f"budget={size}")
    pairs = [entry.split(":") for entry in text.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        raise ConfigError(f"budget={shown(value)}", "an entry is not of the form BATCH:NODES", FORMS)
    return FixedBudget(size=tuple((_whole(batch, value), _whole(size, value)) for batch, size in pairs))


def _whole(part: Any, whole: Any) -> int:
    try:
        if isinstance(part, bool | float):
            raise ValueError
        return int(part)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"budget={shown(whole)}", f"{shown(part)} is not a whole number", FORMS) from error


def _check_size(size: int, subject: str) -> None:
    if not 0 <= size <= MAX_BUDGET:
        raise ConfigError(subject, f"a draft budget is 0 to {MAX_BUDGET} nodes", "use 0 to switch drafting off")
