"""A fused pass in one compiled call: verdict and the streams' next drafts.

In place of `passes.embed`, the layers, `read_logits`, `decide` and `stream_reading.read_streams`, which remain the
reference: main rows and streams get the same numbers, and of the streams' logits come the few that drafts need.
What a sampled draft's tokens are scored with is computed anew here, not by torch: it can differ in its last bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..drafters.base import Levels, StreamRules
from ..kv.pool import KVPool
from ..network.decoder import Decoder
from ..network.native_streams import StreamCarrier, StreamRun, StreamTokens
from .compiled import decide_compiled
from .passes import Pass
from .riders import choose_riders, frontier_chances
from .stream_reading import most_accepted
from .stream_rows import Carriers
from .taps import Tapped


@dataclass(slots=True)
class StreamDrafts:
    """What the streams of a pass said, and what they took."""

    carriers: Sequence[Carriers]
    rows: Sequence[StreamCarrier]  # of each carrier
    answers: Sequence[StreamTokens | None]  # of each carrier
    late_ms: float  # of streams that ran after the verdict

    def levels(self, works: int) -> list[Levels | None]:
        """[B] what each sequence's drafter is shown."""
        found: list[Levels | None] = [None] * works
        for c, answer in zip(self.carriers, self.answers, strict=True):
            if answer is not None:
                found[c.work] = answer.tokens, answer.log_q
        return found


def decide_streams_compiled(
    p: Pass,
    carriers: Sequence[Carriers],
    rules: StreamRules,
    target: Decoder,
    pool: KVPool,
    tapped: Tapped | None = None,
) -> StreamDrafts | None:
    """`Pass.tokens` and `Pass.paths` of a whole pass, and what the streams say; None: it needs the long way.

    The long way is for what `compiled.decide_compiled` leaves to it, for carriers with rules beside temperature and
    truncations, and for streams that main rows see, that are rotated or that begin through a map.

    Args:
        carriers: who carries streams.
        tapped: rows whose states are taken in the same call.
    """
    streams = None
    if carriers:
        if (
            target.stack is None
            or target.ranks is not None
            or not _plain_streams(carriers)
            or not _walkable(p, carriers)
        ):
            return None
        streams = _stream_run(p, carriers, rules, pool, target.stack.free_rows, target.config.vocab_size)
    found = decide_compiled(p, target, pool, tapped, streams)
    if found is None:
        return None
    return StreamDrafts(carriers, () if streams is None else streams.carriers, *found)


def _walkable(p: Pass, carriers: Sequence[Carriers]) -> bool:
    """Whether compiled code can follow the choices of all that carry streams, to the row whose streams are read."""
    samplers = [p.works[c.work].sequence.view.sampler for c in carriers]
    return all(s.plain or s.draws for s in samplers)


def _plain_streams(carriers: Sequence[Carriers]) -> bool:
    """Whether all streams are of one lossless set that begins as state and embedding."""
    streams = carriers[0].streams
    for c in carriers:
        if c.streams is not streams or c.shared:
            return False
    return streams.config.start_rank == 0 and streams.config.value_rotation is None


def _stream_run(
    p: Pass, carriers: Sequence[Carriers], rules: StreamRules, pool: KVPool, free: int, vocab: int
) -> StreamRun:
    """Who carries streams, as the compiled layers see it."""
    gamma, room = carriers[0].gamma, pool.scratch_slots
    open_rows = -p.main_rows % free
    rows = []
    used = 0
    for c in carriers:
        work, span = p.works[c.work], p.spans[c.work]
        streams = min(gamma, work.budget or gamma)  # no draft is deeper than its budget
        riders = _riders(p, c, rules, streams, open_rows - used, room - used)
        used += streams * len(riders)
        ends = work.sequence.state.checker.enders
        rows.append(StreamCarrier(c.work, span.root, streams, most_accepted(work), ends, riders))
    scratch = pool.scratch(max(used, gamma * len(carriers)))
    return StreamRun(carriers[0].streams, rows, min(rules.k, vocab), scratch, rules.noisy, rules.attention_limit)


def _riders(p: Pass, c: Carriers, rules: StreamRules, streams: int, free: int, room: int) -> Sequence[int]:
    """The nodes of one sequence that carry streams in the pass."""
    span = p.spans[c.work]
    if rules.at == "nodes":
        return range(span.nodes)
    if p.tree is None or span.tree_index < 0:
        return choose_riders([1.0], streams, free, room)
    if p.tree.scores is None:
        return ()
    chances = frontier_chances(p.tree.parents[span.tree_index], p.tree.scores[span.tree_index])
    return choose_riders(chances, streams, free, room)


def count_stream_drafts(p: Pass, said: StreamDrafts, num_layers: int) -> None:
    """Row-layers of streams, and whether those that were read rode."""
    for c, rows, answer in zip(said.carriers, said.rows, said.answers, strict=True):
        upper, stats = num_layers - c.insertion, p.works[c.work].sequence.state.stats
        late = answer is not None and not answer.rode
        streams = rows.streams * (len(rows.riders) + late)
        stats.row_layers += streams * upper
        if streams:
            stats.upper_row_layers += (p.spans[c.work].nodes + streams) * upper
        stats.stream_drafts += answer is not None
        stats.rode += answer is not None and answer.rode
