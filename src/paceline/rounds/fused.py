"""The fused round: one pass of the target checks the last draft and brings forth the next.

propose -> embed -> layers 0 .. N - Ns - 1 -> prune the trees -> insert streams -> layers N - Ns .. N - 1
-> verify -> emit -> commit K/V -> read the streams of the last accepted node -> observe

Streams are rows of the pass with K and V of their own in the pool's scratch slots: main rows of a lossless
set never see those keys, so that they stay what plain decoding computes, bit for bit. Nodes that are pruned
keep the K/V that the lower layers wrote until the sequence's region is committed (lazy trimming).

Source: Speculative Streaming, sections 2.1 to 2.3 and appendix G.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from time import perf_counter

import torch
from torch import Tensor

from ..attention.base import Segment, block_visibility, key_positions
from ..core.errors import CapabilityError, ConfigError
from ..core.tree import TokenTree
from ..drafters.base import Drafter, StreamingDrafter, StreamRules
from ..kv.pool import KVPool
from ..target.adapters import AdapterRange, joined
from ..target.applications import adapter_ranges
from ..target.base import ForwardState
from ..target.decoder import Decoder
from ..target.streams import StreamLimit, StreamRows, StreamSet
from .base import StepResult, Work
from .serial import SerialRound, Span, _layout, _said
from .verification import DEFAULT_VERIFIER

KEPT_MASK = 256  # streams of a mask that is kept for later passes: 64 KiB


@dataclass(slots=True, eq=False)
class Rider:
    """The streams of one sequence in one pass."""

    work: int  # index of the sequence's work
    streams: StreamSet
    first: int  # of the sequence's main rows, the first that carries streams; all later ones do
    shared: bool  # main rows attend to their streams (eq. 3)
    start: int = -1  # packed row of the first stream, once they are in the pass
    hidden: Tensor | None = None  # [nodes, d_model] at the insertion layer, where the streams come after the verdict

    @property
    def gamma(self) -> int:
        """Streams a row."""
        return self.streams.config.gamma

    @property
    def insertion(self) -> int:
        """The first layer that the streams go through."""
        return self.streams.config.insertion


@dataclass(frozen=True, slots=True, eq=False)
class NewStreams:
    """Rows that join a pass: the streams of one sequence, node by node."""

    hidden: Tensor  # [rows, d_model]
    positions: Tensor  # [rows] int64
    sequence: Tensor  # [rows] int64
    node: Tensor  # [rows] int64
    stream: Tensor  # [rows] int64


@dataclass(slots=True, eq=False)
class FusedPass:
    """One pass while it runs. Main rows come first, sequence after sequence; stream rows follow."""

    works: Sequence[Work]
    spans: list[Span]  # main rows of each work
    tree: TokenTree | None
    state: ForwardState
    segments: list[Segment]  # of the main rows, one a work
    riders: list[Rider]
    riding: list[tuple[Rider, Segment]] = field(default_factory=list)  # streams in the pass, in the order of their rows
    limits: list[StreamLimit] = field(default_factory=list)  # like `riding`, where attention is limited
    kept: dict[int, list[int]] = field(default_factory=dict)  # work -> the proposed index of each node left
    pruned: dict[int, int] = field(default_factory=dict)  # work -> nodes that went

    @property
    def main_rows(self) -> int:
        """Rows that are no streams."""
        return self.spans[-1].stop if self.spans else 0

    def proposed(self, work: int, nodes: Sequence[int]) -> list[int]:
        """Nodes by their index before the pruning, which is where their K/V lies."""
        kept = self.kept.get(work)
        return list(nodes) if kept is None else [kept[n] for n in nodes]


class FusedRound(SerialRound):
    """Verification and speculation in one pass, by streams on the target's own rows.

    Args:
        target: the model whose word counts.
        pool: its K/V, with scratch slots for the streams of the widest pass.
        drafter: one that drafts with streams.
        verifier: name of the verifier.

    Raises:
        ConfigError: no drafter, or one that does not run in this round.
        CapabilityError: rules that these layers cannot follow.
    """

    name = "fused"

    def __init__(
        self, target: Decoder, pool: KVPool, drafter: Drafter | None, verifier: str = DEFAULT_VERIFIER
    ) -> None:
        super().__init__(target, pool, drafter, verifier)
        if drafter is None or drafter.spec.streams is None:
            who = "no drafter" if drafter is None else f"drafter {drafter.spec.name!r}"
            raise ConfigError(
                f"round={self.name!r} with {who}",
                "it drafts with streams",
                "use drafter='streams:FOLDER', or round='serial'",
            )
        self.rules: StreamRules = drafter.spec.streams
        self.streaming: StreamingDrafter = drafter  # type: ignore[assignment]  # its spec says so
        if target.stack is not None and self.rules.rotates:
            raise _needs_torch("streams that rotate values", "they rotate no values")
        if target.stack is not None and self.rules.attention_limit is not None:
            raise _needs_torch(f"attention_limit={self.rules.attention_limit}", "they do not show attention weights")
        self._make_room(self.rules.gamma)

    def admit(self, streams: StreamSet) -> None:
        """Check that an application's set can run by the drafter's rules.

        Raises:
            CapabilityError: it has fewer streams than are wanted, cannot be pruned, or rotates values in layers that
                cannot.
        """
        wanted, trained = self.rules.wanted, streams.config.gamma
        if wanted is not None and trained < wanted:
            raise CapabilityError(
                f"gamma={wanted} with the streams of an application",
                f"it is more than the {trained} streams that were trained",
                f"leave gamma out, give {trained} or less, or train the application with gamma={wanted}",
            )
        if self.rules.prunes and streams.prune_map is None:
            raise CapabilityError(
                "pruning with a set that has no early-exit map",
                "it was trained with prune_rank=0",
                "leave prune_threshold and prune_count out, or train it with prune_rank=8",
            )
        if streams.config.value_rotation is not None and self.target.stack is not None:
            raise _needs_torch("a set that rotates values", "they rotate no values")
        self._make_room(trained)

    def _make_room(self, gamma: int) -> None:
        """Rows of the context's last positions carry streams, too: stream j of position t has position t + j."""
        self.target.expect(self.target.config.max_position - 1 + gamma)

    @torch.inference_mode()
    def step(self, works: Sequence[Work]) -> StepResult:
        """One round: at most one proposal, one target pass, and the reading of the next draft's distributions."""
        began = perf_counter()
        drafting = [w for w in works if w.budget > 0 and w.generates]
        tree = self._propose(drafting) if drafting else None
        drafted = perf_counter()
        spans = _layout(works, drafting if tree is not None else (), tree)
        fused = self._run(works, spans, tree)
        generating = [i for i, w in enumerate(works) if w.generates]
        logits = self._logits(works, fused.spans, fused.state)
        tokens, paths = self._verdicts(works, fused.spans, generating, fused.tree, logits)
        checked = perf_counter()
        emitted = self._emit(works, fused.spans, generating, fused.tree, logits, tokens, paths)
        self._keep(works, {i: fused.proposed(i, path) for i, path in paths.items()})
        kept = perf_counter()
        stream_logits = self._stream_logits(fused, paths, emitted)
        read = perf_counter()
        self._observe(works, fused.spans, emitted, paths, None, stream_logits)
        ended = perf_counter()
        draft, verify = drafted - began + read - kept, checked - drafted
        times = (draft * 1e3, verify * 1e3, (ended - began - draft - verify) * 1e3)
        return StepResult(_said(works, emitted), *times)

    # -- the pass

    def _run(self, works: Sequence[Work], spans: list[Span], tree: TokenTree | None) -> FusedPass:
        """All layers, with pruning and insertion where each set wants them."""
        state = self.target.embed(self._pack(works, spans, tree))
        state.adapters = _main_ranges(works, spans)
        fused = FusedPass(works, spans, tree, state, list(state.attn.segments), self._riders(works, spans))
        done = 0
        for layer in sorted({rider.insertion for rider in fused.riders}):
            self.target.run_layers(fused.state, done, layer, self.pool)
            done = layer
            self._insert(fused, [rider for rider in fused.riders if rider.insertion == layer])
        self.target.run_layers(fused.state, done, self.target.num_layers, self.pool)
        return fused

    def _riders(self, works: Sequence[Work], spans: Sequence[Span]) -> list[Rider]:
        """Who carries streams: every generated row of a shared set, and roots and nodes where drafts are wanted."""
        riders = []
        for i, (work, span) in enumerate(zip(works, spans, strict=True)):
            view, cache = work.sequence.view, work.sequence.cache
            assert cache is not None
            own = view.application.streams if view.application is not None else None
            if own is not None:
                first = max(0, view.prompt_len - 1 - cache.committed)
                if first < span.stop - span.start:
                    riders.append(Rider(i, own, first, True))
            elif self.failure is None and _wants_streams(work):
                general = self.streaming.stream_set(view)
                if general is not None:
                    riders.append(Rider(i, general, span.root - span.start, False))
        return riders

    def _insert(self, fused: FusedPass, riders: Sequence[Rider]) -> None:
        """Prune the riders' trees, then add their streams, or keep what they will start from."""
        pruned = self._prune(fused, riders) if fused.tree is not None and self.rules.prunes else False
        now = [r for r in riders if r.shared or self.rules.at == "nodes"]
        if now:
            self._append(fused, now)
        if now or pruned:
            self._plan(fused)
        for rider in riders:
            if not (rider.shared or self.rules.at == "nodes"):
                span = fused.spans[rider.work]
                rider.hidden = fused.state.hidden[span.root : span.stop]

    def _plan(self, fused: FusedPass) -> None:
        """Plan, adapters and stream rules of the rows as they are now."""
        state = fused.state
        start = fused.main_rows
        for index, (rider, segment) in enumerate(fused.riding):
            rider.start, stop = start, start + segment.stop - segment.start
            fused.riding[index] = (rider, replace(segment, start=start, stop=stop))
            start = stop
        streams = [segment for _, segment in fused.riding]
        state.attn = self.target.plan([*fused.segments, *streams], state.positions)
        state.adapters = (
            *_main_ranges(fused.works, fused.spans),
            *joined([(g.start, g.stop, rider.streams.adapters) for rider, g in fused.riding]),
        )
        state.rope.clear()
        state.special = self._special(fused)

    def _special(self, fused: FusedPass) -> StreamRows | None:
        """Value rotation and limited attention of this pass, where there is any."""
        start, stream = fused.main_rows, fused.state.stream
        turn = None if stream is None else _turn(fused.riding, stream[start:], fused.state.hidden)
        if turn is None and self.rules.attention_limit is None:
            return None
        limits = [self._limit(fused, i, rider, g) for i, (rider, g) in enumerate(fused.riding)]
        return StreamRows(start, turn, tuple(limit for limit in limits if limit is not None))

    def _limit(self, fused: FusedPass, index: int, rider: Rider, segment: Segment) -> StreamLimit | None:
        """The limited attention of one rider, in the rows of the coming layers."""
        if self.rules.attention_limit is None:
            return None
        span = fused.spans[rider.work]
        rows = torch.arange(span.start + rider.first, span.stop, device=self.target.device)
        return replace(fused.limits[index], rows=rows, streams=slice(segment.start, segment.stop))

    # -- pruning

    def _prune(self, fused: FusedPass, riders: Sequence[Rider]) -> bool:
        """Drop unlikely nodes by the early exit's transition probabilities. Returns whether any went.

        Source: Speculative Streaming, section 2.3 (threshold) and appendix G.1 (fixed size).
        """
        assert fused.tree is not None
        treed = [r for r in riders if fused.spans[r.work].stop - fused.spans[r.work].root > 1]
        scores = self._transitions(fused, treed)
        parents = fused.tree.parents.tolist()
        keep = fused.tree.real()
        for rider, transitions in zip(treed, scores, strict=True):
            b = fused.spans[rider.work].tree_index
            kept = surviving(parents[b], transitions, self.rules.prune_threshold, self.rules.prune_count)
            if len(kept) < len(transitions):
                keep[b] = False
                keep[b, kept] = True
                fused.kept[rider.work] = kept
                fused.pruned[rider.work] = len(transitions) - len(kept)
        if any(rider.work in fused.kept for rider in treed):
            fused.tree = fused.tree.prune(keep)
            self._drop(fused, {r.work for r in treed})
            return True
        return False

    def _transitions(self, fused: FusedPass, riders: Sequence[Rider]) -> list[list[float]]:
        """log p of every node given its parent, by the early exit; 0 for the root.

        Source: Speculative Streaming, section 2.3: z = H(o_theta(M)), with M before the streams' first layer.
        """
        tree, hidden = fused.tree, fused.state.hidden
        if not riders or tree is None:
            return []
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        mapped, rows, columns, base = [], [], [], 0
        for rider in riders:
            span = fused.spans[rider.work]
            count, b = span.stop - span.root, span.tree_index
            inner = sorted({*parents[b][1:count]})
            place = {node: base + i for i, node in enumerate(inner)}
            base += len(inner)
            assert rider.streams.prune_map is not None
            mapped.append(rider.streams.prune_map(hidden[[span.root + node for node in inner]]))
            rows += [place[parent] for parent in parents[b][1:count]]
            columns += tokens[b][1:count]
        z = self.target.read(torch.cat(mapped))
        values = (z[rows, columns] - z.logsumexp(dim=-1)[rows]).tolist()
        ends = [*accumulate(fused.spans[r.work].stop - fused.spans[r.work].root - 1 for r in riders)]
        return [[0.0, *values[begin:end]] for begin, end in zip([0, *ends], ends, strict=False)]

    def _drop(self, fused: FusedPass, works: set[int]) -> None:
        """Take pruned nodes out of the rows; the others keep their slots."""
        rows: list[int] = []
        spans = []
        for i, span in enumerate(fused.spans):
            left = [*range(span.root - span.start)]  # rows of the segment that stay
            nodes = fused.kept.get(i) if i in works else None
            left += [span.root - span.start + n for n in (range(span.stop - span.root) if nodes is None else nodes)]
            if len(left) < span.stop - span.start:
                fused.segments[i] = _thinned(fused.segments[i], left, self.target.device)
            start = len(rows)
            rows += [span.start + row for row in left]
            spans.append(Span(start, len(rows), start + span.root - span.start, span.tree_index))
            fused.segments[i] = replace(fused.segments[i], start=start, stop=len(rows))
        rows += range(fused.main_rows, fused.state.hidden.shape[0])  # streams that are in the pass already
        fused.state = fused.state.keep(torch.tensor(rows, device=self.target.device), None)
        fused.spans = spans

    # -- streams in the pass

    def _append(self, fused: FusedPass, riders: Sequence[Rider]) -> None:
        """Put the streams of every row that carries them behind the rows of the pass."""
        state, device = fused.state, self.target.device
        used = sum(segment.stop - segment.start for _, segment in fused.riding)
        before = len(state.hidden)
        new = [self._begin(fused, rider) for rider in riders]
        end = used + sum(len(part.hidden) for part in new)
        scratch = _indices(self.pool.scratch(end), device)
        state.slots = torch.cat((_indices(state.slots, device), scratch[used:]))
        for rider, part in zip(riders, new, strict=True):
            self._seat(fused, rider, scratch[used : used + len(part.hidden)], part.positions)
            used += len(part.hidden)
        old = torch.zeros(before, dtype=torch.int64, device=device) if state.stream is None else state.stream
        state.hidden = torch.cat((state.hidden, *(part.hidden for part in new)))
        state.positions = torch.cat((state.positions, *(part.positions for part in new)))
        state.sequence = torch.cat((state.sequence, *(part.sequence for part in new)))
        state.node = torch.cat((state.node, *(part.node for part in new)))
        state.stream = torch.cat((old, *(part.stream for part in new)))

    def _begin(self, fused: FusedPass, rider: Rider) -> NewStreams:
        """The streams of every row of one sequence that carries them, as they start (eq. 4)."""
        state, span, gamma = fused.state, fused.spans[rider.work], rider.gamma
        rows = slice(span.start + rider.first, span.stop)
        numbers = torch.arange(1, gamma + 1, device=self.target.device).expand(rows.stop - rows.start, gamma)
        return NewStreams(
            hidden=rider.streams.begin(state.hidden[rows]).flatten(0, 1),
            positions=(state.positions[rows, None] + numbers).flatten(),
            sequence=state.sequence[rows].repeat_interleave(gamma),
            node=state.node[rows].repeat_interleave(gamma),
            stream=numbers.flatten(),
        )

    def _seat(self, fused: FusedPass, rider: Rider, scratch: Tensor, positions: Tensor) -> None:
        """Segments of a rider's streams and, where they are shared, of its main rows."""
        main = fused.segments[rider.work]
        gamma, width = rider.gamma, main.stop - main.start
        device = scratch.device
        seen = block_visibility(main, device)  # [width, block]
        keys = torch.cat((_indices(main.keys, device), scratch))
        where = torch.cat((key_positions(main, device)[main.prefix :], positions))
        count = main.num_keys + len(scratch)
        left = seen[rider.first :].repeat_interleave(gamma, 0)
        visible = torch.cat((left, _siblings(width - rider.first, gamma, device)), 1)
        segment = Segment(0, len(scratch), keys, count, main.prefix, visible, where)
        if self.rules.attention_limit is not None:
            fused.limits.append(self._limited(main, rider, seen, scratch, self.rules.attention_limit))
        fused.riding.append((rider, segment))
        if rider.shared:
            own = torch.zeros(width, len(scratch), dtype=torch.bool, device=device)
            own[rider.first :] = _owned(width - rider.first, gamma, device)
            fused.segments[rider.work] = replace(
                main, keys=keys, num_keys=count, visible=torch.cat((seen, own), 1), positions=where
            )

    @staticmethod
    def _limited(main: Segment, rider: Rider, seen: Tensor, scratch: Tensor, most: int) -> StreamLimit:
        """Limited attention of one rider; its rows are known once the pass is planned."""
        device = scratch.device
        carriers = torch.arange(rider.first, main.stop - main.start, device=device)
        before = torch.ones(len(carriers), main.prefix, dtype=torch.bool, device=device)
        places = key_positions(main, device)
        own = main.num_keys - (main.stop - main.start) + carriers  # the segment's rows are the last of its keys
        return StreamLimit(
            most=most,
            rows=carriers,
            streams=slice(0, 0),
            keys=_indices(main.keys, device),
            key_positions=places,
            visible=torch.cat((before, seen[rider.first :]), 1),
            own=own,
            positions=places[own],
            scratch=scratch,
            shared=rider.shared,
        )

    # -- what the streams say

    def _stream_logits(
        self, fused: FusedPass, paths: dict[int, list[int]], emitted: Sequence[int]
    ) -> list[Tensor | None]:
        """[B] logits [gamma, V] of the streams of each sequence's last accepted node; all others are never read."""
        found: list[Tensor | None] = [None] * len(fused.works)
        alive = [r for r in fused.riders if emitted[r.work] and not fused.works[r.work].sequence.finished]
        self._count_streams(fused)
        late = self._late(fused, [r for r in alive if r.hidden is not None], paths)
        wanted = []
        rows: list[int] = []
        for rider in (r for r in alive if r.hidden is None):
            span, path = fused.spans[rider.work], paths[rider.work]
            carrier = span.root - span.start - rider.first + (path[-1] if path else 0)
            begin = rider.start + carrier * rider.gamma
            rows += range(begin, begin + rider.gamma)
            wanted.append(rider)
        hidden = [fused.state.hidden[rows]] if rows else []
        hidden += [h for _, h in late]
        if hidden:
            logits = self.target.read(torch.cat(hidden))
            riders = [*wanted, *(r for group, _ in late for r in group)]
            for rider, part in zip(riders, logits.split([r.gamma for r in riders]), strict=True):
                found[rider.work] = part
        return found

    def _late(
        self, fused: FusedPass, riders: Sequence[Rider], paths: dict[int, list[int]]
    ) -> list[tuple[list[Rider], Tensor]]:
        """Streams of the last accepted nodes alone, run after the verdict; [sum of gamma, d_model] a group.

        An addition of ours. A lossless set's main rows never see streams, so that those of the other nodes can
        be left out: the keys are the same, and so are the results.
        """
        groups = []
        for layer in sorted({rider.insertion for rider in riders}):
            group = [rider for rider in riders if rider.insertion == layer]
            groups.append((group, self._run_late(fused, group, paths, layer)))
        return groups

    def _run_late(self, fused: FusedPass, riders: Sequence[Rider], paths: dict[int, list[int]], layer: int) -> Tensor:
        """[sum of gamma, d_model] the streams of each rider's last accepted node, after the last layer."""
        begun = [self._begun(rider, paths[rider.work]) for rider in riders]
        scratch = self.pool.scratch(sum(rider.gamma for rider in riders))
        segments = self._late_segments(fused, riders, scratch)
        places = [p for g in segments for p in range(g.prefix, g.num_keys)]  # the streams follow all that is committed
        numbers = [j for rider in riders for j in range(1, rider.gamma + 1)]
        positions, stream = torch.tensor([places, numbers], device=self.target.device).unbind(0)
        zeros = torch.zeros_like(positions)
        plan = self.target.plan(segments, positions)
        state = ForwardState(torch.cat(begun), positions, zeros, zeros, scratch, plan, stream=stream)
        parts = [*zip(riders, segments, strict=True)]
        state.adapters = joined([(g.start, g.stop, rider.streams.adapters) for rider, g in parts])
        turn = _turn(parts, stream, state.hidden)
        state.special = None if turn is None else StreamRows(0, turn)
        return self.target.run_layers(state, layer, self.target.num_layers, self.pool).hidden

    @staticmethod
    def _begun(rider: Rider, path: Sequence[int]) -> Tensor:
        """[gamma, d_model] the streams of the last accepted node, as they start."""
        assert rider.hidden is not None
        return rider.streams.begin(rider.hidden[path[-1] if path else 0])

    def _late_segments(self, fused: FusedPass, riders: Sequence[Rider], scratch: slice) -> list[Segment]:
        """Each rider's streams as a chain behind its committed keys, the last accepted node's among them."""
        device, segments, start = self.target.device, [], 0
        for rider in riders:
            cache = fused.works[rider.work].sequence.cache
            assert cache is not None
            stop, prefix = start + rider.gamma, cache.committed
            slots = torch.arange(scratch.start + start, scratch.start + stop, device=device)
            keys = torch.cat((_indices(cache.slots(0, prefix), device), slots))
            segments.append(Segment(start, stop, keys, prefix + rider.gamma, prefix, None, None))
            start = stop
        return segments

    def _count_streams(self, fused: FusedPass) -> None:
        """Row-layers of streams and of pruned nodes, and the nodes that were pruned."""
        for rider in fused.riders:
            work, span = fused.works[rider.work], fused.spans[rider.work]
            if not work.generates:
                continue
            nodes, pruned = span.stop - span.root, fused.pruned.get(rider.work, 0)
            streams = rider.gamma * (1 if rider.hidden is not None else nodes)
            upper = self.target.num_layers - rider.insertion
            stats = work.sequence.state.stats
            stats.row_layers += pruned * rider.insertion + streams * upper
            stats.upper_row_layers += (nodes + streams) * upper
            stats.pruned += pruned


def surviving(
    parents: Sequence[int], transitions: Sequence[float], threshold: float | None, count: int | None
) -> list[int]:
    """Nodes of one tree that stay, ascending, the root among them.

    Args:
        parents: of each node, -1 for the root; those after the last of ``transitions`` are not read.
        transitions: log p of each node given its parent; the root's is not read.
        threshold: a node whose transition probability is below it goes with its subtree.
        count: so many drafted nodes stay, those with the best cumulative score; of equals the earlier ones.

    Source: Speculative Streaming, section 2.3 and appendix G.1.
    """
    floor = -math.inf if threshold is None else math.log(threshold)
    scores = [0.0] * len(transitions)
    alive = []
    gone = set()
    for node in range(1, len(transitions)):
        parent = parents[node]
        scores[node] = scores[parent] + transitions[node]
        if parent in gone or transitions[node] < floor:
            gone.add(node)
        else:
            alive.append(node)
    if count is not None and len(alive) > count:
        # A score is never above its parent's, and parents come first: what stays is a tree.
        alive = sorted(sorted(alive, key=lambda n: (-scores[n], n))[:count])
    return [0, *alive]


def _wants_streams(work: Work) -> bool:
    """Whether a lossless sequence needs a draft for its next step. At the end of a prompt the budget is always 0."""
    drafts = work.budget > 0 or (work.may_draft and work.rows > 1)
    return work.generates and drafts and work.max_depth > 1


def _main_ranges(works: Sequence[Work], spans: Sequence[Span]) -> tuple[AdapterRange, ...]:
    return adapter_ranges([w.sequence.application for w in works], [(s.start, s.stop) for s in spans])


def _thinned(segment: Segment, rows: Sequence[int], device: torch.device) -> Segment:
    """The segment of the rows (and their keys) that are left; the rows are its whole block."""
    prefix, left = segment.prefix, len(rows)
    if rows[-1] == left - 1:  # the first ones
        index: Tensor | slice = slice(0, left)
        keys = _head(segment.keys, prefix + left)
    else:
        index = torch.tensor(rows, device=device)
        slots = _indices(segment.keys, device)
        keys = torch.cat((slots[:prefix], slots[prefix:][index]))
    visible = None if segment.visible is None else segment.visible[index][:, index]
    positions = None if segment.positions is None else segment.positions[index]
    return replace(segment, keys=keys, num_keys=prefix + left, visible=visible, positions=positions)


def _head(keys: slice | Tensor, count: int) -> slice | Tensor:
    return slice(keys.start, keys.start + count) if isinstance(keys, slice) else keys[:count]


def _indices(slots: slice | Tensor, device: torch.device) -> Tensor:
    return torch.arange(slots.start, slots.stop, device=device) if isinstance(slots, slice) else slots


def _siblings(carriers: int, gamma: int, device: torch.device) -> Tensor:
    """[carriers * gamma, same] bool: stream j of a row sees streams 1 .. j of the same row (eq. 2)."""
    return _mask(_make_siblings, carriers, gamma, device)


def _owned(carriers: int, gamma: int, device: torch.device) -> Tensor:
    """[carriers, carriers * gamma] bool: a main row's own streams (eq. 3)."""
    return _mask(_make_owned, carriers, gamma, device)


MakeMask = Callable[[int, int, torch.device], Tensor]


def _mask(make: MakeMask, carriers: int, gamma: int, device: torch.device) -> Tensor:
    """Steps ask for the same few small masks again and again; those of long prompts would fill the memory."""
    if carriers * gamma > KEPT_MASK:
        return make(carriers, gamma, device)
    return _kept_mask(make, carriers, gamma, device)


@lru_cache(maxsize=256)
def _kept_mask(make: MakeMask, carriers: int, gamma: int, device: torch.device) -> Tensor:
    return make(carriers, gamma, device)


def _make_siblings(carriers: int, gamma: int, device: torch.device) -> Tensor:
    lower = torch.ones(gamma, gamma, dtype=torch.bool, device=device).tril()
    return torch.block_diag(*[lower] * carriers)


def _make_owned(carriers: int, gamma: int, device: torch.device) -> Tensor:
    return torch.eye(carriers, dtype=torch.bool, device=device).repeat_interleave(gamma, 1)


def _turn(parts: Sequence[tuple[Rider, Segment]], stream: Tensor, like: Tensor) -> tuple[Tensor, Tensor] | None:
    """cos and sin [rows, 1, 1] of j * epsilon for rows of streams j; None where no set rotates (appendix E.4)."""
    epsilons = [(rider.streams.config.value_rotation, g.stop - g.start) for rider, g in parts]
    if all(epsilon is None for epsilon, _ in epsilons):
        return None
    each = torch.tensor([epsilon or 0.0 for epsilon, rows in epsilons for _ in range(rows)], dtype=torch.float64)
    angle = (stream * each.to(stream.device))[:, None, None]
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    return angle.cos().to(wide), angle.sin().to(wide)


def _needs_torch(asked: str, why: str) -> CapabilityError:
    return CapabilityError(f"{asked} with the compiled layers", why, "use kernels='torch'")
