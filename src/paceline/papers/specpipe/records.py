"""Records of the pipeline round: one by request, one by tick."""

from __future__ import annotations

from collections import Counter, abc
from dataclasses import dataclass, field

from ...core.sequence import Sequence
from ...kv.pool import SequenceCache
from .flight import Cut, InFlightTree


@dataclass(frozen=True, slots=True)
class Tick:
    """Describe what a tick did."""

    emitted: abc.Sequence[tuple[Running, int]]  # requests that got tokens, and how many
    entered: int  # rows
    hits: int  # of them in flight when they were emitted
    waits: bool  # whether the source was late
    verdicts: abc.Sequence[Cut] = ()  # after each token but an answer's last one
    refills: int = 0  # trees whose newest level was pruned away, and that continue from an older one
    late: int = 0  # nodes that were added next to, or in front of, a level that is there (late siblings)

    @property
    def count(self) -> int:
        """Tokens of all requests."""
        return sum(count for _, count in self.emitted)


@dataclass(slots=True, eq=False)
class Running:
    """A sequence whose levels are in flight, or parts of its prompt."""

    request: int
    sequence: Sequence
    cache: SequenceCache
    flight: InFlightTree | None = None  # None: the end of the prompt has not entered
    farthest: int = 0  # place of the last token that is of use
    # By source mark: nodes that entered since the last verdict, roots not counted.
    counted: Counter[int] = field(default_factory=Counter)
    newest: int = 0  # place of the newest level since the last flush
