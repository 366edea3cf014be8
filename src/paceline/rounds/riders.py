"""Which nodes of a tree carry streams in the pass itself, where those of one node alone will be read.

Source: Speculative Streaming, appendix G.1, has every node carry them. That only likely ones do is ours: where the last
accepted node carried none, its streams run after verification.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

# In passes of streams that run after verification. Measured on 2 cores of Zen 4 without AMX (docs/measured/engine.md).
FIRST = 0.28  # what the first row of streams costs in a pass: adapters are read, and are computed beside all rows
EACH = 0.09  # what a row beyond the free ones costs


def frontier_chances(parents: Sequence[int], log_scores: Sequence[float]) -> list[float]:
    """The chance of every node that it is the last accepted one: its own, less those of its children.

    Args:
        parents: [nodes], the root's -1.
        log_scores: [nodes] log of the estimated chance that the path to a node is accepted; the root's 0.
    """
    reached = [exp(score) for score in log_scores]
    chances = [*reached]
    for node in range(1, len(reached)):
        chances[parents[node]] -= reached[node]
    return chances


def choose_riders(chances: Sequence[float], streams: int, free: int, room: int) -> list[int]:
    """The nodes that carry streams, ascending: those that save the most time.

    Args:
        chances: [nodes] that each is the last accepted one.
        streams: of a node.
        free: rows that cost next to nothing.
        room: rows that there may be.
    """
    order = sorted(range(len(chances)), key=lambda n: (-chances[n], n))[: room // streams]
    best, saved, kept = 0.0, -FIRST, 0
    for count, node in enumerate(order, start=1):
        beyond = min(streams, max(0, count * streams - free))
        saved += chances[node] - EACH * beyond
        if saved > best:
            best, kept = saved, count
    return sorted(order[:kept])
