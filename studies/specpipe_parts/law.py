"""SpecPipe's time between tokens: a pipeline that is filled with one request's future (section 3.3.3).

Equations 1 and 2 charge a miss m + 1 steps. Algorithm 1 costs m of them: the step that would have said the token is
part of the refill. So `expected_tbt` lies (1 - P) t below equation 2; it is what a pipeline does that always flushes as
a whole. Partial refills are cheaper still: `tbt_with_bubbles` takes the mean that was measured.

Source: SpecPipe. Equations and sections in docstrings are its.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from paceline.core.errors import ConfigError
from paceline.plan.models import ModelSizes


def equation_1(stage_times: Sequence[float], hit_rate: float) -> float:
    """E(T) of equation 1.

    Args:
        stage_times: t_i(w) of the m steps, in any unit.
        hit_rate: P(w), the probability that the token was in the tree.

    Raises:
        ConfigError: no stage, or a probability outside of 0 to 1.
    """
    _check(len(stage_times), hit_rate)
    return max(stage_times) + (1 - hit_rate) * math.fsum(stage_times)


def equation_2(stage_time: float, stages: int, hit_rate: float) -> float:
    """The same for m equal stages: equation 2."""
    return equation_1([stage_time] * stages, hit_rate)


def expected_tbt(stage_time: float, stages: int, hit_rate: float) -> float:
    """P t + (1 - P) m t: a hit is a step, a miss all of Algorithm 1's m steps.

    Raises:
        ConfigError: as of `equation_1`.
    """
    _check(stages, hit_rate)
    return hit_rate * stage_time + (1 - hit_rate) * stages * stage_time


def tbt_with_bubbles(stage_time: float, mean_bubble: float) -> float:
    """t x (1 + mean bubble): exact, whatever is refilled; a bubble is a step in which no token came out."""
    return stage_time * (1 + mean_bubble)


def plain_tbt(stage_times: Sequence[float]) -> float:
    """Of a pipeline with one request: a token goes through all stages."""
    return math.fsum(stage_times)


def speedup(stages: int, hit_rate: float) -> float:
    """Over the plain pipeline, with equal stages: m at best."""
    return plain_tbt([1.0] * stages) / expected_tbt(1.0, stages, hit_rate)


def hit_rate_of(stages: int, measured: float) -> float:
    """The hit rate that `speedup` needs for a measured speed-up.

    Raises:
        ConfigError: a single stage, or a speed-up that no hit rate gives.
    """
    if stages < 2 or not 1 <= measured <= stages:
        asked = f"a speed-up of {measured:g} with {stages} stages"
        raise ConfigError(asked, "no hit rate gives it", "give 2 stages or more, and 1 to as many times")
    return (stages - stages / measured) / (stages - 1)


@dataclass(frozen=True, slots=True)
class MeasuredTree:
    """A shape of the tree's levels, and what was measured with it."""

    width: int  # w
    children: int  # k
    hit_rate: float  # P(w) with k candidates a node


def choose_tree(candidates: Iterable[MeasuredTree], step_time: Callable[[int], float], stages: int) -> MeasuredTree:
    """w and k with the lowest `expected_tbt` (section 3.3.3); of equals the smallest tree.

    Args:
        candidates: with their hit rates, measured in as many stages.
        step_time: t(w); on the paper's GPUs it leaps every 64 rows.
        stages: m.
    """

    def cost(one: MeasuredTree) -> tuple[float, int, int]:
        return expected_tbt(step_time(one.width), stages, one.hit_rate), one.width, one.children

    return min(candidates, key=cost)


def stage_bytes(
    shape: ModelSizes,
    stages: int,
    kv_tokens: int,
    runtime: float = 0.0,
    number_bytes: float = 2.0,
    layers: Sequence[int] = (),
) -> list[float]:
    """Bytes that each stage holds: layers, K/V and runtime, the first with the embedding, the last with the head.

    It is Table 1 with parameters counted right: the paper's 4 d^2 + 3 d f a layer leaves grouped queries out.

    Args:
        shape: the model.
        stages: m.
        kv_tokens: of all requests together.
        runtime: bytes of kernels' own memory a stage.
        number_bytes: of a stored weight, key or value.
        layers: of each stage; none: as many in all.
    """
    all_layers = number_bytes * (shape.body_parameters + shape.kv_values(kv_tokens))
    shares = [count / sum(layers) for count in layers] or [1 / stages] * stages
    table = number_bytes * shape.head_parameters
    ends = [table * ((stage == 0) + (stage == stages - 1)) for stage in range(stages)]
    return [share * all_layers + runtime + end for share, end in zip(shares, ends, strict=True)]


def _check(stages: int, hit_rate: float) -> None:
    if stages < 1:
        raise ConfigError(f"{stages} stages", "a pipeline has one or more", "give 1 or more")
    if not 0 <= hit_rate <= 1:
        raise ConfigError(f"a hit rate of {hit_rate:g}", "it is no probability", "give 0 to 1")
