"""What the mirror round tells those who listen: verdicts, and the times of its steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WindowVerdict:
    """What became of one sequence's window in one pass."""

    key: int
    window: list[int]  # tokens that were verified
    accepted: int
    said: int  # the correction, or the bonus token
    told: bool  # whether the exit spoke and a draft could follow: what was said is then reused, or a fallback
    reused: bool
    prepared: int  # tokens of the next window that were drafted before the verdict
    candidates: list[int]  # where the window ended, likeliest first; empty: the exit did not speak
    chances: list[float]  # the target's own probability of each

    @property
    def mass(self) -> float:
        """Of the candidates together: the overlap mass of eq. 9 where the window ended."""
        return sum(self.chances)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What the terms of eq. 10 and 14 were in one step, in ms. They are no forecast of it: together they are the step.

    While the rollout runs beside the target ``exposed`` is what of ``draft`` the step had to wait for; between the
    layers it is all of it. Of sessions elsewhere ``draft`` is from the start of the rollout until they had drafted the
    last level that they were not called off from, and what was still missing after that.
    """

    fresh: float  # windows drafted before the pass, after outcomes that were not prepared for
    prefix: float  # T_target^{1:l_e}
    rendezvous_exit: float  # the exit's scores, the token channel, candidates laid out
    suffix: float  # T_target^{l_e+1:N}, head and verdict
    exposed: float
    rendezvous_final: float  # the verdict told, surviving branches kept: T_rv^(fv)
    host: float  # emitting tokens, keeping K/V
    draft: float  # T_draft^gen
    nodes: int  # drafted in it
