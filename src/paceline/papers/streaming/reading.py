"""Streams after verification: their logits at each last accepted node, and their statistics.

Source: Speculative Streaming, section 2.2. Running the streams of the last accepted node alone, after verification, is
our addition: a lossless set's main rows never see streams, so those of the other nodes can be left out; the keys are
the same, and so are the results.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...engine.base import Work
from ...engine.passes import Pass
from ...kv.pool import KVPool
from ...model.attention.base import Segment, slot_indices
from ...model.base import ForwardState
from ...model.decoder import Decoder
from .pass_rows import StreamAnchors, stream_adapters


def read_streams(p: Pass, carriers: Sequence[StreamAnchors], target: Decoder, pool: KVPool) -> list[Tensor | None]:
    """[B] logits [gamma, V] of the streams of each sequence's last accepted node; no others are read.

    Call it after emission and commit: streams that run after verification attend to committed keys.
    """
    parts: list[Tensor | None] = [None] * len(p.works)
    alive = [c for c in carriers if _of_use(p, c.work)]
    read = [c for c in alive if c.segment is not None]
    rows: list[int] = []
    for c in read:
        assert c.segment is not None
        span = p.spans[c.work]
        begin = c.segment.start + (span.root - span.start - c.first + p.frontier(c.work)) * c.gamma
        rows += range(begin, begin + c.gamma)
    hidden = [p.state.hidden[rows]] if rows else []
    late = [c for c in alive if c.segment is None]
    for layer in sorted({c.insertion for c in late}):
        group = [c for c in late if c.insertion == layer]
        hidden.append(_run_late(p, group, layer, target, pool))
        read += group
    if read:
        logits = target.read(torch.cat(hidden))
        for c, part in zip(read, logits.split([c.gamma for c in read]), strict=True):
            parts[c.work] = part
    return parts


def most_accepted(work: Work) -> int:
    """Return how many accepted nodes leave room for another draft."""
    return work.max_depth - 2


def _of_use(p: Pass, work: int) -> bool:
    """Return whether another draft can follow."""
    going_on = p.emitted[work] and not p.works[work].sequence.finished
    return bool(going_on) and len(p.paths[work]) <= most_accepted(p.works[work])


def _run_late(p: Pass, carriers: Sequence[StreamAnchors], layer: int, target: Decoder, pool: KVPool) -> Tensor:
    """[sum of gamma, d_model] the streams of each one's last accepted node, from ``layer`` through the last layer."""
    begun = [c.streams.begin(c.hidden[p.frontier(c.work)]) for c in carriers if c.hidden is not None]
    scratch = pool.scratch(sum(c.gamma for c in carriers))
    segments = list[Segment]()
    places = list[int]()
    for c in carriers:  # a chain after the committed keys, the last accepted node's among them
        cache = p.works[c.work].sequence.cache
        assert cache is not None
        start, prefix = len(places), cache.committed
        places += range(prefix, prefix + c.gamma)
        slots = torch.arange(scratch.start + start, scratch.start + len(places), device=target.device)
        keys = torch.cat((slot_indices(cache.slots(0, prefix), target.device), slots))
        segments.append(Segment(start, len(places), keys, prefix + c.gamma, prefix, None, None))
    positions = torch.tensor(places, device=target.device)
    state = ForwardState(torch.cat(begun), positions, scratch, target.plan(segments, positions))
    state.adapters = stream_adapters(carriers, segments)
    return target.run_layers(state, layer, target.num_layers, pool).hidden


def count_streams(p: Pass, carriers: Sequence[StreamAnchors], num_layers: int) -> None:
    """Count the streams and the pruned nodes of a pass that went part by part, its tokens emitted."""
    for c in carriers:
        if c.work not in p.paths:  # in mid-prompt; by now the work itself no longer states this
            continue
        useful, rode = _of_use(p, c.work), c.segment is not None
        count_carrier(p, c, c.gamma * (p.spans[c.work].nodes if rode else useful), useful, rode, num_layers)


def count_carrier(p: Pass, c: StreamAnchors, streams: int, useful: bool, rode: bool, num_layers: int) -> None:
    """Count row-layers of one sequence's streams and of its pruned nodes.

    Args:
        streams: rows of them, those of pruned nodes not counted.
        useful: whether those of its last accepted node were read.
        rode: whether they were rows of the pass itself.
    """
    upper, nodes, stats = num_layers - c.insertion, p.spans[c.work].nodes, p.works[c.work].sequence.stats
    stats.row_layers += c.pruned * c.insertion + streams * upper
    if streams:
        stats.upper_row_layers += (nodes + streams) * upper
    stats.pruned += c.pruned
    stats.stream_drafts += useful
    stats.rode += useful and rode
