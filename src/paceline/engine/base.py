"""The contract of a round."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from ..core.named import NamedConfig
from ..core.sequence import Sequence
from ..draft.base import Drafter, DrafterSpec, DraftRule
from ..draft.sessions import AsyncSessions
from ..kv.pool import KVPool
from ..model.applications import Application
from ..model.decoder import Decoder

if TYPE_CHECKING:
    from ..model.stage_line import StageLine

DEFAULT_VERIFIER = "sample_and_match"


@dataclass(slots=True, eq=False)
class Work:
    """One sequence's part of a step. Its K/V slots are reserved. Read only."""

    sequence: Sequence
    rows: int  # pending tokens to compute now
    generates: bool  # whether these reach the last known token, so that a new one is generated
    budget: int  # drafted nodes allowed
    max_depth: int  # deepest useful node (max_tokens, context)
    may_draft: bool = False  # whether the next step may draft: worth preparing for even where the budget is 0 now


@dataclass(slots=True, eq=False)
class StepResult:
    """Describe what came out of one step: of the passes that it ended, which earlier steps may have begun."""

    works: abc.Sequence[Work]  # whose passes ended
    counts: abc.Mapping[int, tuple[int, int]]  # drafted and accepted tokens by their index; missing: none
    emitted: abc.Sequence[tuple[Sequence, int]]  # sequences that got tokens, and how many; 0: ended by a fault
    draft_ms: float
    verify_ms: float
    host_ms: float
    propose_ms: float  # of draft_ms: what calling the drafter took; the rest is taps and `observe`, called or not


class Round(Protocol):
    """One step of drafting and verification, in an order of its own.

    A round may have several passes in flight, and a step may end passes that earlier ones began. Such a round *enters*
    the rows of a pass that continues after the step (`SequenceCache.enter`), so that they are not scheduled again. The
    slots of a sequence that is released go to others at once: such a round sees to it that no pass writes them later.
    """

    name: str

    @property
    def drafter(self) -> Drafter | None:
        """The drafter; None: nothing is drafted."""

    @property
    def admits(self) -> abc.Callable[[Application], None] | None:
        """Check an application whose rows have others next to them; None: no row can have any here.

        Raises CapabilityError where they do not fit the drafter.
        """

    @property
    def sources(self) -> tuple[str, ...]:
        """The drafters that a request may choose among, by source mark; none: nothing is drafted."""

    @property
    def busy(self) -> bool:
        """Return whether a step has something to do without new work: passes are in flight."""

    @property
    def failure(self) -> str | None:
        """Why the drafter was disabled, if it failed."""

    @property
    def past(self) -> int | None:
        """Last tokens of a text that must be computed while the drafter looks on; see `DrafterSpec.past`."""

    def step(self, works: abc.Sequence[Work], rule: DraftRule | None = None) -> StepResult:
        """One target pass over the rows of ``works``, with whatever drafting belongs to it.

        Args:
            works: the sequences' parts of it; empty only while the round is busy.
            rule: chooses which of the proposed nodes are checked; None: all.

        Tokens, caches, statistics and the drafter's state of what came out are updated when it returns.
        """

    def release(self, sequences: abc.Sequence[Sequence]) -> None:
        """Let the drafter drop the state of sequences that ended or were preempted.

        Nothing of them comes out any more, and none of their passes in flight touches a sequence, or the slots that it
        had, again.
        """

    def forget(self) -> None:
        """Let the drafter forget sequences that ended."""


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Describe where a drafter's own process runs."""

    cores: tuple[int, ...] = ()  # of the CPU; none: all
    threads: int | None = None  # of its layers; None: one a core
    device: str = ""  # none: one after the target's


@dataclass(frozen=True, slots=True)
class ModelOrigin:
    """Describe where a target comes from, for rounds that read what was trained for it."""

    name: str = "this target"
    folder: Path | None = None  # of its checkpoint; None: in memory alone
    find: abc.Callable[[str], Path] = Path  # name of an embedded, local or hub folder -> its path
    trained: abc.Callable[[str], str | None] = lambda kind: (
        None
    )  # a round -> what the zoo has that it reads, of the target


UNKNOWN = ModelOrigin()


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundParts:
    """Describe what a round is made of."""

    target: Decoder  # verifies
    pool: KVPool  # its K/V
    drafter: Drafter | None = None  # where `RoundConfig.place` names a process the same drafter runs there; this one is
    # not bound then, and is called for nothing but what it declares
    verifier: str = DEFAULT_VERIFIER
    origin: ModelOrigin = UNKNOWN  # where the target comes from
    serve: abc.Callable[[int, WorkerPlace], AsyncSessions] | None = (
        None  # starts the drafter's process, where one is named, with
    )
    # room for so many drafted nodes of a sequence
    start: abc.Callable[[], StageLine] | None = (
        None  # starts stages elsewhere, where the target has the last one's layers
    )


@dataclass(frozen=True, kw_only=True)
class RoundConfig(NamedConfig):
    """Base of a round's options: its name, what it needs of a drafter, and how it is made.

    Which rounds a drafter can run in follows from what it declares: a round states what it needs in `refusal`.
    """

    automatic: ClassVar[bool] = True  # whether it may be chosen where the user names no round
    weighs: ClassVar[bool] = True  # whether the automatic budget, which adds times of drafts and passes, fits it
    stages = 0  # parts of the target's layers that it fills; 0: it runs them as a whole

    @property
    def place(self) -> WorkerPlace | None:
        """Return where the drafter runs, if that is a process of its own; None: in the target's."""
        return None

    def refusal(self, spec: DrafterSpec | None) -> tuple[str, str] | None:
        """Why a drafter (None: no drafter) cannot run in this round, and what to do; None: it can."""
        raise NotImplementedError(f"{type(self).__name__}.refusal")

    def build(self, parts: RoundParts) -> Round:
        """Make the round of parts that `refusal` has nothing against.

        Raises:
            ConfigError: options, or a verifier, that do not fit the target or the drafter; a process that cannot be
                started.
        """
        raise NotImplementedError(f"{type(self).__name__}.build")
