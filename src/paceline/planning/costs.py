"""The planner's predictions as the table of costs that the engine's draft budget reads.

Of the present machine they come from a law that was fitted to its passes (`measured`), of one that has a name from its
published peaks: both are functions of sequences, context and rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .machines import Machine
from .throughput import ServedModel, pass_seconds

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # of one sequence
BATCHES = (1, 2, 4, 8, 16, 32, 64)  # sequences of one row each
CONTEXT = 128  # committed tokens of each
FURTHER = 1024  # tokens beyond it, to see how costs grow
Seconds = Callable[[int, float, int], float]  # of a pass: sequences, tokens that each has, rows of each


def cost_points(seconds: Seconds, max_position: int) -> dict[str, Any]:
    """Milliseconds of passes, the fields of `engine.costs.CostTable`.

    Args:
        seconds: what passes are predicted to take.
        max_position: of the model.
    """
    context = max(0, min(CONTEXT, max_position - ROWS[-1]))
    grown = 1e6 * (seconds(1, context + FURTHER, 1) - seconds(1, context, 1)) / FURTHER
    return {
        "chain": [[rows, 1e3 * seconds(1, context, rows)] for rows in ROWS],
        "plain": [[batch, 1e3 * seconds(batch, context, 1)] for batch in BATCHES],
        "context": context,
        "context_ms": max(0.0, grown),
    }


def predicted_points(network: ServedModel, machine: Machine) -> dict[str, Any]:
    """The table of a machine that has a name, from its published peaks: no host work, no kernel's losses."""

    def seconds(batch: int, context: float, rows: int) -> float:
        return pass_seconds(network, machine, batch, context, rows)

    return cost_points(seconds, network.shape.max_position)
