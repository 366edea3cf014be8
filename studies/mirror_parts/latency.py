"""Mirror's latency law: a step in which the draft runs beside the target's upper layers (section 3.4, appendix C).

All times are in one unit of the caller's choice.

Source: Mirror Speculative Decoding. Equations in docstrings are its.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.core.errors import ConfigError
from paceline.core.options import check, option


@dataclass(frozen=True, kw_only=True)
class MirrorStep:
    """The times of one step.

    Raises:
        ConfigError: a time below 0.
    """

    prefix: float = option(help="target layers up to the early exit (T_target^{1:l_e}), 0 or more", minimum=0)
    suffix: float = option(help="target layers after it (T_target^{l_e+1:N}), 0 or more", minimum=0)
    draft: float = option(help="a branch-complete window (T_draft^gen), 0 or more", minimum=0)
    rendezvous_exit: float = option(0.0, help="sampling and transfer at the early exit, 0 or more", minimum=0)
    rendezvous_final: float = option(0.0, help="sampling and transfer after verification, 0 or more", minimum=0)

    def __post_init__(self) -> None:
        check(self)

    @property
    def target(self) -> float:
        """One whole target pass."""
        return self.prefix + self.suffix

    @property
    def rendezvous(self) -> float:
        """T_rv."""
        return self.rendezvous_exit + self.rendezvous_final

    @property
    def budget(self) -> float:
        """The overlap budget, Delta: what the draft may take for nothing."""
        return self.suffix

    @property
    def hidden(self) -> bool:
        """Whether the whole draft runs under the target's suffix."""
        return self.draft <= self.budget

    @property
    def exposed(self) -> float:
        """Draft time on the critical path; over the whole draft time it is the relative draft overhead of D.1."""
        return max(0.0, self.draft - self.budget)

    @property
    def time(self) -> float:
        """T_Mirror, equations 10 and 14."""
        return self.prefix + self.rendezvous_exit + max(self.suffix, self.draft) + self.rendezvous_final

    @property
    def serial(self) -> float:
        """T_SD, equation 5: target and draft one after the other."""
        return self.target + self.draft

    @property
    def saved(self) -> float:
        """Delta T of appendix C: min(Delta, T_draft) - T_rv; below 0 where the rendezvous cost more than is hidden."""
        return min(self.budget, self.draft) - self.rendezvous

    @property
    def speedup(self) -> float:
        """S of appendix C: T_SD / T_Mirror at the same acceptance."""
        return self.serial / self.time


def split_at_exit(layer_times: list[float], exit_layer: int) -> tuple[float, float]:
    """Prefix and suffix of a target, from the time of each of its layers (section 3.4).

    Args:
        layer_times: c_1 .. c_N.
        exit_layer: l_e, the layers before the exit.

    Raises:
        ConfigError: an exit that leaves no layer on one side.
    """
    if not 1 <= exit_layer < len(layer_times):
        asked, last = f"an exit after layer {exit_layer}", len(layer_times) - 1
        raise ConfigError(asked, f"of {len(layer_times)} layers", f"leave layers on both sides: 1 to {last}")
    return math.fsum(layer_times[:exit_layer]), math.fsum(layer_times[exit_layer:])


def internal_steps(window: int, tokens_a_step: float) -> int:
    """Most draft passes J for a window of gamma tokens, where a pass makes eta of them on average (section 3.2)."""
    return math.ceil(window / tokens_a_step)


def draft_time(steps: int, compute: float, synchronisation: float = 0.0) -> float:
    """T_draft^gen of appendix C: J passes, each of computation and synchronisation."""
    return steps * (compute + synchronisation)


def message_words(batch: int, tokens: int, width: int, devices: int) -> float:
    """M = B S H / G, as appendix C prints what one rank sends in a collective; it is one share of G (`ring_words`)."""
    return batch * tokens * width / devices


def ring_words(batch: int, tokens: int, width: int, devices: int) -> float:
    """2 (G - 1) / G of B S H: what one rank sends in an all-reduce on a ring.

    G - 1 shares of 1 / G go round to be summed, and again to be known to all: 2 (G - 1) times `message_words`.
    """
    return 2 * (devices - 1) * message_words(batch, tokens, width, devices)


def target_communication(layers: int, allreduce: float) -> float:
    """T_target^comm: two all-reduces a layer, as in Megatron's tensor parallel (appendix C)."""
    return 2 * layers * allreduce


def draft_communication(steps: int, allreduce: float) -> float:
    """T_draft^comm: two all-reduces a pass however many layers, as in SPD's tracks (appendix C, section 3.3)."""
    return 2 * steps * allreduce
