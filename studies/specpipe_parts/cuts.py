"""Cuts of a target by what its layers cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.core.errors import ConfigError


def cut_layers(layers: int, stages: int, cost: Callable[[int, int, int], float]) -> list[int]:
    """Return where to cut a target so that the slowest stage is as fast as can be; of equals the earliest.

    These are the m + 1 bounds, from 0 to ``layers``.

    Args:
        cost: of a stage (its number, its first layer, one past its last one), in any unit; what is measured with the
            rows that this stage has, and with what else it does: the last one reads the head.

    Raises:
        ConfigError: fewer layers than stages, or no stage.
    """
    if not 1 <= stages <= layers:
        raise ConfigError(f"{stages} stages", f"the target has {layers} layers", f"give 1 to {layers} stages")
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}  # by end: the slowest stage so far, and the bounds
    for stage in range(stages):
        left = stages - stage - 1
        best = {
            end: min(
                (max(slow, cost(stage, start, end)), [*cuts, end])
                for start, (slow, cuts) in best.items()
                if start < end
            )
            for end in range(stage + 1, layers - left + 1)
        }
    return best[layers][1]


def cut_by_rows(
    layers: int, rows: Sequence[float], layer_time: Callable[[float], float], head_time: float = 0.0
) -> list[int]:
    """Return bounds of stages that take about as long.

    Rows fall along a pipeline, since its trees are pruned on their way. ``rows`` are what each stage has in a tick, as
    measured; ``layer_time`` of one layer by rows, and ``head_time`` of the last stage's head, in one unit.

    Raises:
        ConfigError: as of `cut_layers`.
    """

    def cost(stage: int, start: int, stop: int) -> float:
        return (stop - start) * layer_time(rows[stage]) + head_time * (stage == len(rows) - 1)

    return cut_layers(layers, len(rows), cost)
