"""Choose which nodes carry streams in a fused pass of one compiled call, by what rows cost on this machine.

The result is what `reading.read_streams` and the parts of the pass give, which remain the reference. Of the
streams' logits come the few that drafts need; scores of a sampled draft's tokens can differ in their last bits.

Of a tree those nodes carry streams in the pass that are likely to be the last accepted ones (`_choose_stream_nodes`).
Speculative Streaming, appendix G.1, has every node carry them. Where the last accepted node carried none, its streams
run after the verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import exp, inf
from time import perf_counter
from weakref import WeakKeyDictionary

import torch

from ...core.tree import TokenTree
from ...engine.passes import Pass
from ...kernels import TILE_ROWS
from ...kernels.calls import RowSpan, TokenPass
from ...kernels.layers import Stack
from ...kv.pool import KVPool
from ...model.decoder import Decoder
from .model import StreamSet
from .native import StreamCarrier, StreamRun, decide_streams
from .pass_rows import StreamAnchors
from .reading import most_accepted

PRICED_ROWS = 1, TILE_ROWS  # main rows of the passes by which `stream_prices` measures
REPEATS, MOST_MS = 24, 200.0  # timings of each kind of pass, the fastest of which counts; time for all
_PRICES: WeakKeyDictionary[Stack, WeakKeyDictionary[StreamSet, tuple[float, float]]] = WeakKeyDictionary()


def stream_prices(decoder: Decoder, streams: StreamSet) -> tuple[float, float]:
    """Return the cost of the first row of streams of a pass, and of each row beyond the free ones.

    Measured once for a set.

    The unit is a pass of these streams after the verdict, which they save if they are those of the last accepted node.
    """
    stack = decoder.stack
    assert stack is not None, "layers that are not compiled have no such pass"
    prices = _PRICES.setdefault(stack, WeakKeyDictionary())
    if streams not in prices:
        few, many = [max(0, streams.config.gamma - (-rows % stack.free_rows)) for rows in PRICED_ROWS]  # not free
        low, high = [min(1.0, max(0.0, cost)) for cost in _stream_costs(decoder, streams)]
        each = max(0.0, high - low) / max(1, many - few)
        prices[streams] = max(0.0, low - each * few), each
    return prices[streams]


@torch.inference_mode()
def _stream_costs(decoder: Decoder, streams: StreamSet) -> list[float]:
    """Return what the streams of one row add to passes of `PRICED_ROWS`, in passes of them after the verdict."""
    stack, gamma, vocab, most = decoder.stack, streams.config.gamma, decoder.config.vocab_size, max(PRICED_ROWS)
    assert stack is not None
    pool = KVPool(*decoder.cache_shape, most, decoder.dtype, decoder.device, scratch_slots=gamma)
    cache = pool.open(expected=most)
    cache.reserve(most)
    best: dict[tuple[int, bool], float] = {}  # by main rows, and whether streams go with them: ms without late streams
    late_ms, began = inf, perf_counter()
    for turn, rows, rides in product(range(REPEATS), PRICED_ROWS, (False, True)):
        if turn > 1 and (perf_counter() - began) * 1e3 > MOST_MS:
            break
        slots = cache.slots(0, rows)
        where, span = slots if isinstance(slots, slice) else slots.tolist(), RowSpan(0, rows, 0, slots, None)
        whole = TokenPass([n % vocab for n in range(rows)], range(rows), where, [span], [rows - 1])
        carrier = StreamCarrier(0, rows - 1, gamma, 0, (), [0] if rides else [])
        start = perf_counter()
        late = decide_streams(stack, whole, StreamRun(streams, [carrier], 1, pool.scratch(gamma)), pool)[2]
        if turn:  # the first one does what is done once
            best[rows, rides] = min((perf_counter() - start) * 1e3 - late, best.get((rows, rides), inf))
            late_ms = late_ms if rides else min(late, late_ms)
    return [(best[rows, True] - best[rows, False]) / late_ms for rows in PRICED_ROWS]


def stream_run(
    p: Pass, carriers: Sequence[StreamAnchors], everywhere: bool, k: int, noisy: bool, pool: KVPool, target: Decoder
) -> StreamRun:
    """Return the streams of a pass as the compiled layers see them.

    Args:
        everywhere: whether every node carries them.
        k, noisy: of `StreamRun`.
    """
    gamma, room = carriers[0].gamma, pool.scratch_slots
    assert target.stack is not None
    open_rows = -p.main_rows % target.stack.free_rows
    prices = (0.0, 0.0) if everywhere else stream_prices(target, carriers[0].streams)
    rows = []
    used = 0
    for c in carriers:
        work, span = p.works[c.work], p.spans[c.work]
        streams = min(gamma, work.budget or gamma)  # no draft is deeper than its budget
        nodes: Sequence[int] = range(span.nodes)
        if not everywhere:
            tree = span.tree or TokenTree()
            reached = [1.0, *map(exp, tree.scores)]
            chances = [*reached]  # of every node that it is the last accepted one: its own, less those of its children
            for node, parent in enumerate(tree.parents, start=1):
                chances[parent] -= reached[node]
            nodes = _choose_stream_nodes(chances, streams, open_rows - used, room - used, *prices)
        used += streams * len(nodes)
        ends = work.sequence.checker.enders
        rows.append(StreamCarrier(c.work, span.root, streams, most_accepted(work), ends, nodes))
    scratch = pool.scratch(max(used, gamma * len(carriers)))
    return StreamRun(carriers[0].streams, rows, min(k, target.config.vocab_size), scratch, noisy)


def _choose_stream_nodes(
    chances: Sequence[float], streams: int, free: int, room: int, first: float, each: float
) -> list[int]:
    """Return the nodes that carry streams, ascending: those that save the most time.

    Args:
        chances: [nodes] that each is the last accepted one.
        streams: of a node.
        free: rows that cost next to nothing.
        room: rows that there may be.
        first, each: what the first row costs, and each beyond the free ones; see `stream_prices`.
    """
    order = sorted(range(len(chances)), key=lambda n: (-chances[n], n))[: room // streams]
    best, saved, count_best = 0.0, -first, 0
    for count, node in enumerate(order, start=1):
        beyond = min(streams, max(0, count * streams - free))
        saved += chances[node] - each * beyond
        if saved > best:
            best, count_best = saved, count
    return sorted(order[:count_best])
