"""Messages of stages and their coordinator.

    Clear      another epoch begins, with the address of frames that leave; is answered by the same
    Verdicts   of the target, to all stages; has no answer
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
    """Nothing that was sent before counts, nor what K and V hold. A stage or rank replies with the same."""

    epoch: int
    out: str = ""  # address of the next stage's frames (`wire.listening`)


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Verdicts of some requests, newest last."""

    survivors: list[tuple[int, int, list[int]]] = field(default_factory=list)  # request, version, nodes that are left
    closed: list[int] = field(default_factory=list)  # requests that ended
