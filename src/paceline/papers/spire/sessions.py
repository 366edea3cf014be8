"""Draft sessions of SPIRe's draft: memory of each text in its ring, and of nodes that are not decided on next to it.

    slots of a text    sinks | window, and the root | one for each node
    a row sees         memory of earlier tokens of the text, of the root, and of its ancestors; never its own

Source: SPIRe, sections 3.1 and 3.3; Mirror Speculative Decoding, section 3.4.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.sequence import Sequence
from ...draft.base import StepFeatures
from ...draft.network_sessions import ObservingSessions
from ...draft.text_sessions import DraftCache, Expansion
from ...kv.pool import KVPool
from ...kv.ring import RingCache
from ...model.applications import adapter_ranges
from ...model.base import Taps
from ...model.packing import RowPacker
from .network import SpireNetwork

if TYPE_CHECKING:
    from ...model.decoder import TargetInfo


@dataclass(slots=True, kw_only=True, eq=False)
class RingSession(DraftCache):
    """A sequence's text and tree, and the memory that is held.

    Of positions ``start`` .. ``seen`` - 1, of ``sunk`` sinks, and of the root and nodes in the slots that ``states``
    names.
    """

    ring: int
    more: list[int]  # rings for nodes
    slots: list[int]  # of these
    start: int = 0
    seen: int = -1
    sunk: int = 0

    def uncomputed(self, ends: abc.Iterable[int]) -> list[int]:
        """Return the nodes to run for the logits of the wanted ones, parents first."""
        rows = {n for end in ends for n in (self.root, *self.path(end)) if n == end or n not in self.states}
        return sorted(rows)


class SpireSessions(ObservingSessions):
    """Sessions over the texts whose activations a draft is shown.

    Args:
        network: the draft.
        ring: its memory.
        more: rings of a text beyond its own, whose slots its nodes have.
        target: makes memory of sinks that no pass has shown.
        taps: layers of the target whose activations are memory.
        coupled: as of `NetworkSessions`.
    """

    def __init__(
        self,
        network: SpireNetwork,
        ring: RingCache,
        more: int,
        target: TargetInfo,
        taps: abc.Sequence[int],
        coupled: bool,
    ) -> None:
        super().__init__(target.vocab_size, target.eos_ids, coupled)
        self.network, self.ring, self._more, self._target, self._taps = network, ring, more, target.decoder, taps
        sinks = ring.view.sinks  # the target's K/V of a text's sinks, while they are computed
        self._scratch = KVPool(*self._target.cache_shape, max(1, sinks), target.dtype, self._target.device)

    def _begin(self, view: Sequence) -> RingSession:
        ring, *more = (self.ring.open() for _ in range(1 + self._more))
        slots = [slot for other in more for slot in range(other * self.ring.size, (other + 1) * self.ring.size)]
        return RingSession(view=view, ring=ring, more=more, slots=slots)

    def _free(self, session: RingSession) -> None:
        for ring in (session.ring, *session.more):
            self.ring.close(ring)

    @staticmethod
    def _reserve(session: RingSession, rows: int) -> bool:
        return True

    def observe(self, step: StepFeatures) -> None:
        """Write the memory of verified tokens from the target's activations."""
        if not step.hidden:
            return
        rows: list[int] = []
        places: list[int] = []
        slots: list[int] = []
        for view, span, first in zip(step.sequences, step.hidden_rows, step.first, strict=True):
            stop = first + span.stop - span.start
            positions = self._note(view, first, stop)
            rows += [span.start + position - first for position in positions]
            places += positions
            slots += self.ring.slots(self._open[view.key].ring, positions) if positions else []
        if rows:
            self.network.write(self.ring, [step.hidden[tap] for tap in self._taps], rows, places, slots)

    def _note(self, view: Sequence, first: int, stop: int) -> list[int]:
        """Return the positions whose memory is kept, of first .. stop - 1 of a text, which are verified."""
        if stop <= first:
            return []
        sinks, window = self.ring.view.sinks, self.ring.view.window
        begin = max(first, stop - window)
        session: RingSession = self._open.get(view.key) or self.follow(view)
        if session.seen != first:  # a gap
            session.start, session.sunk = begin, 0
        if begin > first:  # rows before the window are not written
            session.start = begin
        if first <= session.sunk < sinks:
            session.sunk = min(sinks, stop)
        session.seen = stop
        return [*range(first, min(sinks, stop)), *range(max(begin, sinks), stop)]

    def ready(self, view: Sequence) -> bool:
        """Return whether a draft can start: memory of all that the root sees is there, or made now."""
        root, session = len(view.tokens) - 1, self._open.get(view.key)
        if root < 1 or session is None or session.seen != root:  # of nothing before the root there is no memory
            return False
        sinks = min(self.ring.view.sinks, root)
        if session.sunk < sinks:
            self._compute_sinks(view, session, sinks)
        return True

    def _compute_sinks(self, view: Sequence, session: RingSession, count: int) -> None:
        """Write memory of a text's first tokens, which no pass has shown.

        The target runs once more over these alone, whose activations depend on nothing after them.
        """
        target, packer, places = self._target, RowPacker(self._target, self._target.device), [*range(count)]
        packer.add(view.tokens[:count], places, slice(0, count), slice(0, count), count, 0)
        state, taps = target.embed(packer.batch()), Taps(tuple(sorted({*self._taps})))
        state.adapters = adapter_ranges([view.application], [(0, count)])
        target.run_layers(state, 0, target.num_layers, self._scratch, taps)
        slots = self.ring.slots(session.ring, places)
        self.network.write(self.ring, [taps.hidden[tap] for tap in self._taps], places, places, slots)
        session.sunk = count

    def _prepare(self, session: RingSession, nodes: abc.Sequence[int]) -> Expansion | None:
        room = self.network.decoder.config.max_position - len(session.view.tokens)
        expandable = [node for node in nodes if len(session.path(node)) <= room]
        computed = session.uncomputed(expandable)
        fits = len({*computed, *session.states} - {session.root}) < len(
            session.slots
        )  # the root may hold a node's slot
        able = expandable and fits and self._asked(session) and self.ready(session.view)
        return Expansion(session, expandable, computed) if able else None

    def _compute(self, parts: abc.Sequence[Expansion]) -> Tensor:
        """Run a pass for each level of nodes without memory."""
        logits: dict[tuple[int, int], Tensor] = {}
        unfinished = [(one.session, node) for one in parts for node in one.computed]
        while unfinished:
            level = [(s, n) for s, n in unfinished if n == s.root or s.nodes[n].parent in s.states]
            packer, places, slots = RowPacker(self.network.decoder, self.network.decoder.device), [], []
            for session, node in level:
                places.append(session.nodes[node].place)
                self._pack_row(packer, session, node, places[-1])
            logits_of, memory = self.network.run(packer, self.ring)
            for (session, node), row in zip(level, logits_of, strict=True):
                slots.append(self._slot(session, node))
                session.states[node] = slots[-1]
                logits[session.view.key, node] = row
            self.network.write(self.ring, [*memory], range(len(level)), places, slots)
            unfinished = [pair for pair in unfinished if pair not in level]
        return torch.stack([logits[one.session.view.key, node] for one in parts for node in one.parents])

    def _slot(self, session: RingSession, node: int) -> int:
        """Return the slot that a node's memory has or gets."""
        if node in session.states:
            return int(session.states[node])
        if node == session.root:
            return self.ring.slot(session.ring, len(session.view.tokens) - 1)
        in_use = {*session.states.values()}
        return next(slot for slot in session.slots if slot not in in_use)

    def _pack_row(self, packer: RowPacker, session: RingSession, node: int, position: int) -> None:
        """Append a node's row, which sees sinks, and a window of strictly earlier tokens."""
        ring, device = self.ring, self.network.decoder.device
        path = [session.root, *session.path(node)][:-1]
        drafted = {len(session.view.tokens) - 1 + depth: session.states[above] for depth, above in enumerate(path)}
        sinks = min(ring.view.sinks, position)
        seen = [*range(sinks), *range(max(sinks, session.start, position - ring.view.window), position)]
        slots = [drafted[j] if j in drafted else ring.slot(session.ring, j) for j in seen]
        token = session.nodes[node].token
        where, keys = (torch.tensor(x, device=device) for x in ([ring.unseen(session.ring)], slots))
        packer.add([token], [position], where, keys, len(slots), len(slots))
