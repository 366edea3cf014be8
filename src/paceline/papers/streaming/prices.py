"""Measure on this machine what streams next to the main rows add to a compiled pass."""

from __future__ import annotations

from itertools import product
from math import inf
from time import perf_counter

import torch

from ...kernels import TILE_ROWS
from ...kernels.calls import RowSpan, TokenPass
from ...kernels.streams import StreamCarrier, StreamRun
from ...kv.pool import KVPool
from ...model.decoder import Decoder
from .model import StreamSet

STREAM_ROWS = 1, TILE_ROWS  # main rows of the passes by which `stream_prices` measures
STREAM_REPEATS, STREAM_MS = 24, 200.0  # timings of each kind of pass, the fastest of which counts; time for all


def stream_prices(decoder: Decoder, streams: StreamSet) -> tuple[float, float]:
    """Return what the first row of streams costs that goes with the main rows of a pass, and each row beyond the free
    ones; measured once for a set.

    The unit is a pass of these streams after the verdict, which they save if they are those of the last accepted node.
    """
    stack = decoder.stack
    assert stack is not None, "layers that are not compiled have no such pass"
    if streams not in stack.stream_prices:
        few, many = [max(0, streams.config.gamma - (-rows % stack.free_rows)) for rows in STREAM_ROWS]  # not free
        low, high = [min(1.0, max(0.0, cost)) for cost in _stream_costs(decoder, streams)]
        each = max(0.0, high - low) / max(1, many - few)
        stack.stream_prices[streams] = max(0.0, low - each * few), each
    return stack.stream_prices[streams]


@torch.inference_mode()
def _stream_costs(decoder: Decoder, streams: StreamSet) -> list[float]:
    """Return what the streams of one row add to passes of `STREAM_ROWS`, in passes of them after the verdict."""
    stack, gamma, vocab, most = decoder.stack, streams.config.gamma, decoder.config.vocab_size, max(STREAM_ROWS)
    assert stack is not None
    pool = KVPool(*decoder.cache_shape, most, decoder.dtype, decoder.device, scratch_slots=gamma)
    cache = pool.open(expected=most)
    cache.reserve(most)
    best: dict[tuple[int, bool], float] = {}  # by main rows, and whether streams go with them: ms without late streams
    late_ms, began = inf, perf_counter()
    for turn, rows, rides in product(range(STREAM_REPEATS), STREAM_ROWS, (False, True)):
        if turn > 1 and (perf_counter() - began) * 1e3 > STREAM_MS:
            break
        slots = cache.slots(0, rows)
        where, span = slots if isinstance(slots, slice) else slots.tolist(), RowSpan(0, rows, 0, slots, None)
        whole = TokenPass([n % vocab for n in range(rows)], range(rows), where, [span], [rows - 1])
        carrier = StreamCarrier(0, rows - 1, gamma, 0, (), [0] if rides else [])
        start = perf_counter()
        late = stack.decide_streams(whole, StreamRun(streams, [carrier], 1, pool.scratch(gamma)), pool)[2]
        if turn:  # the first one does what is done once
            best[rows, rides] = min((perf_counter() - start) * 1e3 - late, best.get((rows, rides), inf))
            late_ms = late_ms if rides else min(late, late_ms)
    return [(best[rows, True] - best[rows, False]) / late_ms for rows in STREAM_ROWS]
