"""Streams as rows of a running pass: which rows carry them, how their rows are added, what each row sees.

Stream rows follow the main rows and have K and V of their own in the pool's scratch slots: main rows of a lossless
set never see those keys, so that they stay what plain decoding computes, bit for bit.

Source: Speculative Streaming, sections 2.1 and 2.2.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ...core.sequence import Sequence
from ...engine.passes import Pass, main_adapters
from ...kv.pool import KVPool
from ...model.adapters import AdapterRange, joined
from ...model.attention.base import Segment, block_visibility, key_positions, slot_indices
from ...model.decoder import Decoder
from .model import StreamSet
from .visibility import main_sees, stream_sees

KEPT_MASK = 256  # streams of a mask that is kept for later passes: 64 KiB


@dataclass(slots=True, eq=False)
class StreamAnchors:
    """The main rows of one sequence that carry streams in one pass, and their streams."""

    work: int  # index of the sequence's work
    streams: StreamSet
    first: int  # of the sequence's main rows, the first that carries streams; all later ones do
    shared: bool  # main rows attend to their streams (eq. 3)
    scratch: Tensor | None = None  # [streams] int64 slots of the streams' own keys, once they are in the pass
    places: Tensor | None = None  # [streams] int64 their positions
    segment: Segment | None = None  # of the streams' rows, once they are planned
    hidden: Tensor | None = None  # [nodes, d_model] at the insertion layer, if the streams run after verification
    pruned: int = 0  # nodes that went

    @property
    def gamma(self) -> int:
        """Streams a row."""
        return self.streams.config.gamma

    @property
    def insertion(self) -> int:
        """The first layer that the streams go through."""
        return self.streams.config.insertion


def choose_carriers(p: Pass, general: abc.Callable[[Sequence], StreamSet | None] | None) -> list[StreamAnchors]:
    """Return the rows that carry streams.

    Every generated row of a shared set, and roots and nodes where drafts are wanted.

    Args:
        p: the pass.
        general: the lossless set of a sequence without streams of its own; None: no more drafts are wanted.
    """
    chosen = []
    for i, (work, span) in enumerate(zip(p.works, p.spans, strict=True)):
        view, cache = work.sequence, work.sequence.cache
        assert cache is not None
        application_streams = view.application.beside if view.application is not None else None
        if application_streams is not None:
            first = max(0, view.prompt_len - 1 - cache.committed)
            if first < span.stop - span.start:
                chosen.append(StreamAnchors(i, application_streams, first, True))
        elif general is not None and work.generates and work.max_depth > 1:
            if work.budget <= 0 and not (work.may_draft and work.rows > 1):  # at the end of a prompt the budget is 0
                continue
            streams = general(view)
            if streams is not None:
                chosen.append(StreamAnchors(i, streams, span.root - span.start, False))
    return chosen


class StreamInsertion:
    """Adds streams to one pass, and plans its rows again as they change.

    Args:
        p: the pass, its state embedded and planned.
        target: the model whose layers it goes through.
        pool: its K/V; the streams' go to scratch slots.
    """

    def __init__(self, p: Pass, target: Decoder, pool: KVPool) -> None:
        self.p, self.target, self.pool = p, target, pool
        self.main: list[Segment] = list(p.state.attn.segments)  # of the main rows alone, one a work
        self.inserted: list[StreamAnchors] = []  # in the order of their streams' rows
        self.used = 0  # scratch slots

    def append(self, carriers: abc.Sequence[StreamAnchors]) -> None:
        """Append the streams of every row that carries them to the rows of the pass, with their states (eq. 4)."""
        state, device = self.p.state, self.target.device
        parts = []
        for c in carriers:
            rows = slice(self.p.spans[c.work].start + c.first, self.p.spans[c.work].stop)
            numbers = torch.arange(1, c.gamma + 1, device=device).expand(rows.stop - rows.start, c.gamma)
            begun = c.streams.begin(state.hidden[rows]).flatten(0, 1)
            parts.append((begun, (state.positions[rows, None] + numbers).flatten()))
        scratch = slot_indices(self.pool.scratch(self.used + sum(len(part[0]) for part in parts)), device)
        state.slots = torch.cat((slot_indices(state.slots, device), scratch[self.used :]))
        for c, part in zip(carriers, parts, strict=True):
            c.scratch, c.places = scratch[self.used : self.used + len(part[0])], part[1]
            self.used += len(part[0])
            self.inserted.append(c)
        joint = [torch.cat(column) for column in zip((state.hidden, state.positions), *parts, strict=True)]
        state.hidden, state.positions = joint

    def drop(self, remaining: abc.Mapping[int, abc.Sequence[int]]) -> list[int]:
        """Forget the streams of main rows that are pruned; those of the pass have still to go.

        Args:
            remaining: work -> rows of its segment that are kept, ascending.

        Returns:
            The stream rows of the pass that stay, ascending.
        """
        rows: list[int] = []
        start = self.p.main_rows
        for c in self.inserted:
            assert c.scratch is not None and c.places is not None
            stop = start + len(c.scratch)
            if c.work in remaining:
                carriers = [row - c.first for row in remaining[c.work] if row >= c.first]
                numbers = [n * c.gamma + j for n in carriers for j in range(c.gamma)]
                index = torch.tensor(numbers, dtype=torch.int64, device=c.scratch.device)
                c.scratch, c.places = c.scratch[index], c.places[index]
                rows += [start + n for n in numbers]
            else:
                rows += range(start, stop)
            start = stop
        return rows

    def _connect(self, c: StreamAnchors) -> Segment:
        """Set the segment of the streams; return that of their main rows, which sees them where they are shared."""
        main, scratch, positions = self.main[c.work], c.scratch, c.places
        assert scratch is not None and positions is not None
        gamma, width = c.gamma, main.stop - main.start
        device = scratch.device
        seen = block_visibility(main, device)  # [width, block]
        keys = torch.cat((slot_indices(main.keys, device), scratch))
        where = torch.cat((key_positions(main, device)[main.prefix :], positions))
        count = main.num_keys + len(scratch)
        seen_rows = seen[c.first :].repeat_interleave(gamma, 0)
        visible = torch.cat((seen_rows, _kept(siblings, width - c.first, gamma, device)), 1)
        c.segment = Segment(0, len(scratch), keys, count, main.prefix, visible, where)
        if not c.shared:
            return main
        scratch_seen = torch.zeros(width, len(scratch), dtype=torch.bool, device=device)
        scratch_seen[c.first :] = _kept(owned, width - c.first, gamma, device)
        return replace(main, keys=keys, num_keys=count, visible=torch.cat((seen, scratch_seen), 1), positions=where)

    def plan(self) -> None:
        """Plan, adapters and stream rules of the rows as they are now."""
        p, state, start = self.p, self.p.state, self.p.main_rows
        main, streams = [*self.main], []
        for c in self.inserted:
            main[c.work] = self._connect(c)
            assert c.segment is not None
            c.segment = replace(c.segment, start=start, stop=start + c.segment.stop)
            start = c.segment.stop
            streams.append(c.segment)
        state.attn = self.target.plan([*main, *streams], state.positions)
        state.adapters = (*main_adapters(p), *stream_adapters(self.inserted, streams))
        state.rope.clear()


def stream_adapters(carriers: abc.Sequence[StreamAnchors], segments: abc.Sequence[Segment]) -> tuple[AdapterRange, ...]:
    """Return the adapters of stream rows; ``segments`` are those of each one's streams."""
    parts = zip(carriers, segments, strict=True)
    return joined([(segment.start, segment.stop, c.streams.adapters) for c, segment in parts])


# -- masks of the streams' own keys


MakeMask = abc.Callable[[int, int, torch.device], Tensor]


def siblings(carriers: int, gamma: int, device: torch.device) -> Tensor:
    """[carriers * gamma, same] bool: which streams each stream sees (eq. 2), carrier by carrier."""
    owner = torch.arange(carriers, device=device).repeat_interleave(gamma)
    number = torch.arange(gamma, device=device).repeat(carriers)
    return stream_sees(owner, number, owner, number)


def owned(carriers: int, gamma: int, device: torch.device) -> Tensor:
    """[carriers, carriers * gamma] bool: which streams each carrier sees in shared mode (eq. 3)."""
    rows = torch.arange(carriers, device=device)
    return main_sees(rows, rows.repeat_interleave(gamma))


def _kept(make: MakeMask, carriers: int, gamma: int, device: torch.device) -> Tensor:
    """Return a mask from a small cache: steps need the same few; those of long prompts would fill the memory."""
    if carriers * gamma > KEPT_MASK:
        return make(carriers, gamma, device)
    return _kept_mask(make, carriers, gamma, device)


@lru_cache(maxsize=256)
def _kept_mask(make: MakeMask, carriers: int, gamma: int, device: torch.device) -> Tensor:
    return make(carriers, gamma, device)
