"""A pass, its verdict and its streams' next drafts in one compiled call.

In place of `passes.embed`, the layers, `read_logits`, the choices and `papers.streaming.reading.read_streams`, which
remain the reference: the same numbers are computed in the same order, and what comes out is equal. Sequences that take
the likeliest token and those that sample with temperature, top-k, top-p and min-p alone, within a grammar or not, have
their choices made in the call; others choose from its logits. Of the streams' logits come the few that drafts need.
What a sampled draft's tokens are scored with is computed anew here, not by torch: it can differ in its last bits.

Of a tree those nodes carry streams in the pass that are likely to be the last accepted ones (`choose_riders`).
Speculative Streaming, appendix G.1, has every node carry them. Where the last accepted node carried none, its streams
run after verification.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

import torch
from torch import Tensor

from ..draft.base import Levels, StreamRules
from ..kernels.calls import NativeTaps
from ..kernels.streams import StreamCarrier, StreamRun, StreamTokens
from ..kv.pool import KVPool
from ..model.decoder import Decoder
from ..papers.streaming.pass_rows import Carriers
from ..papers.streaming.prices import stream_prices
from ..papers.streaming.reading import count_carrier, most_accepted
from .passes import Pass, decide, token_pass
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


def decide_compiled(
    p: Pass,
    carriers: Sequence[Carriers],
    rules: StreamRules | None,
    target: Decoder,
    pool: KVPool,
    tapped: Tapped | None = None,
) -> StreamDrafts | None:
    """`Pass.tokens` and `Pass.paths` of a whole pass, and what the streams say; None: it needs the long way, and
    nothing was done.

    The long way is for layers that are not compiled or of which ranks have parts, for requests that want
    log-probabilities of their prompt, for carriers with rules beside temperature and truncations, and for streams that
    main rows see. `Pass.logits` are set unless every choice is the likeliest token and nobody wants more.

    Args:
        carriers: who carries streams.
        rules: of the drafter; None: there are no streams.
        tapped: rows whose states are taken in the same call.
    """
    stack, params = target.stack, [work.sequence.params for work in p.works]
    if stack is None or target.ranks is not None or not params:
        return None
    if any(own.prompt_logprobs is not None for own in params):
        return None
    streams = None
    if carriers and rules is not None:
        samplers = [p.works[c.work].sequence.sampler for c in carriers]
        if not _plain_streams(carriers) or not all(s.plain or s.draws for s in samplers):
            return None
        streams = _stream_run(p, carriers, rules, pool, target)
    given = token_pass(p)
    works = [p.works[i] for i in p.generating]
    if not all(w.sequence.sampler.plain and w.sequence.params.logprobs is None for w in works):
        sampling = b"".join([work.sequence.sampler.rules for work in p.works])
        wanted = len(given.wanted)
        logits = torch.empty(wanted + (0 if streams is None else streams.rows), target.config.vocab_size)
        p.logits = logits[:wanted]
        given = given._replace(rules=sampling, logits=logits, masks=_masks(p, wanted, target.config.vocab_size))
    taps = None if tapped is None else _room_for(tapped, p, target)
    answers: Sequence[StreamTokens | None] = ()
    late_ms = 0.0
    if streams is None:
        chosen = stack.decide(given, pool, taps)
    else:
        chosen, answers, late_ms = stack.decide_streams(given, streams, pool, taps)
    decide(p, None, chosen)
    if tapped is not None and taps is not None:
        _taken(tapped, taps, target)
    return StreamDrafts(carriers, () if streams is None else streams.carriers, answers, late_ms)


def _masks(p: Pass, wanted: int, vocab_size: int) -> Tensor | None:
    """[wanted, words] of every node's grammar; None: no sequence has one. All bits are set where there is
    none; none is where the grammar's parser failed: compiled code leaves that node to the sampler, which says why."""
    samplers = [p.works[i].sequence.sampler for i in p.generating]
    if all(sampler.matcher is None for sampler in samplers):
        return None
    made, at = torch.full((wanted, (vocab_size + 31) // 32), -1, dtype=torch.int32), 0
    for i, sampler in zip(p.generating, samplers, strict=True):
        b = p.spans[i].tree_index
        paths = p.tree.paths(b) if p.tree is not None and b >= 0 else [[]]
        rows = made[at : at + len(paths)]
        at += len(paths)
        if sampler.matcher is not None:
            try:
                for row, path in zip(rows, paths, strict=True):
                    sampler.matcher.fill([*sampler.output_ids, *path], row)
            except Exception:  # the sampler meets it again, and its request alone ends
                rows.zero_()
    return made


def _room_for(tapped: Tapped, p: Pass, target: Decoder) -> NativeTaps:
    """The rows whose states are taken, as compiled code is asked for them."""
    rows = None if tapped.whole else tapped.rows(p)
    count, width = p.main_rows if rows is None else len(rows), target.config.d_model
    if len(tapped.layers) == 1:  # every tensor that is made takes microseconds
        return NativeTaps((tapped.layers[0] % target.num_layers,), rows, torch.empty(count, width, dtype=target.dtype))
    layers = tuple(sorted({name % target.num_layers for name in tapped.layers}))
    return NativeTaps(layers, rows, torch.empty(len(layers), count, width, dtype=target.dtype))


def _taken(tapped: Tapped, taps: NativeTaps, target: Decoder) -> None:
    """Note where the states are that compiled code has taken."""
    tapped.apart, tapped.ms = taps.rows is not None, taps.ms
    if len(tapped.layers) == 1:
        tapped.source = {tapped.layers[0]: taps.out}
    else:
        states = dict(zip(taps.layers, taps.out, strict=True))
        tapped.source = {name: states[name % target.num_layers] for name in tapped.layers}


def _plain_streams(carriers: Sequence[Carriers]) -> bool:
    """Whether all streams are of one lossless set."""
    return all(c.streams is carriers[0].streams and not c.shared for c in carriers)


def _stream_run(p: Pass, carriers: Sequence[Carriers], rules: StreamRules, pool: KVPool, target: Decoder) -> StreamRun:
    """Who carries streams, as the compiled layers see it."""
    gamma, room = carriers[0].gamma, pool.scratch_slots
    assert target.stack is not None
    open_rows = -p.main_rows % target.stack.free_rows
    prices = (0.0, 0.0) if rules.at == "nodes" else stream_prices(target, carriers[0].streams)
    rows = []
    used = 0
    for c in carriers:
        work, span = p.works[c.work], p.spans[c.work]
        streams = min(gamma, work.budget or gamma)  # no draft is deeper than its budget
        riders = _riders(p, c, rules, streams, open_rows - used, room - used, prices)
        used += streams * len(riders)
        ends = work.sequence.checker.enders
        rows.append(StreamCarrier(c.work, span.root, streams, most_accepted(work), ends, riders))
    scratch = pool.scratch(max(used, gamma * len(carriers)))
    most = min(rules.k, target.config.vocab_size)
    return StreamRun(carriers[0].streams, rows, most, scratch, rules.noisy)


def _riders(
    p: Pass, c: Carriers, rules: StreamRules, streams: int, free: int, room: int, prices: tuple[float, float]
) -> Sequence[int]:
    """The nodes of one sequence that carry streams in the pass."""
    span = p.spans[c.work]
    if rules.at == "nodes":
        return range(span.nodes)
    if p.tree is None or span.tree_index < 0:
        return choose_riders([1.0], streams, free, room, *prices)
    if p.tree.scores is None:
        return ()
    chances = frontier_chances(p.tree.parents[span.tree_index], p.tree.scores[span.tree_index])
    return choose_riders(chances, streams, free, room, *prices)


def count_stream_drafts(p: Pass, said: StreamDrafts, num_layers: int) -> None:
    """Count the streams of a pass."""
    for c, rows, answer in zip(said.carriers, said.rows, said.answers, strict=True):
        late = answer is not None and not answer.rode
        streams = rows.streams * (len(rows.riders) + late)
        count_carrier(p, c, streams, answer is not None, answer is not None and answer.rode, num_layers)


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


def choose_riders(chances: Sequence[float], streams: int, free: int, room: int, first: float, each: float) -> list[int]:
    """The nodes that carry streams, ascending: those that save the most time.

    Args:
        chances: [nodes] that each is the last accepted one.
        streams: of a node.
        free: rows that cost next to nothing.
        room: rows that there may be.
        first, each: what the first row costs, and each beyond the free ones; see `stream_prices`.
    """
    order = sorted(range(len(chances)), key=lambda n: (-chances[n], n))[: room // streams]
    best, saved, kept = 0.0, -first, 0
    for count, node in enumerate(order, start=1):
        beyond = min(streams, max(0, count * streams - free))
        saved += chances[node] - each * beyond
        if saved > best:
            best, kept = saved, count
    return sorted(order[:kept])
