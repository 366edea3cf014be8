"""Messages of stages and their coordinator.

    Clear      another epoch begins, with the address of frames that leave; is answered by `Ready`
    Verdicts   of the target, to all stages; has no answer
    Dropped    a stage lost its K/V, and comes back by itself
    Compute    a frame, from the coordinator to the first stage, from stage to stage, and back from the last but one

States go in and come out: embedding tokens and reading the last states are the coordinator's (`stage_workers`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..model.stages import Frame


@dataclass(frozen=True, slots=True)
class Compute:
    """Carries a frame to a stage, its tokens embedded."""

    frame: Frame
    seconds: float = 0.0  # the most that a stage spent on it so far


@dataclass(frozen=True, slots=True)
class Clear:
    """Nothing in flight counts any more."""

    epoch: int
    out: str  # address of the next stage's frames (`wire.listening`)


@dataclass(frozen=True, slots=True)
class Ready:
    """Frames of an epoch may come."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """A stage lost its K/V."""

    epoch: int
    why: str


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Verdicts of some requests, newest last."""

    survivors: list[tuple[int, int, list[int]]] = field(default_factory=list)  # request, version, nodes that are left
    closed: list[int] = field(default_factory=list)  # requests that ended
