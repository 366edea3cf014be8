"""A drafter of states at work: the texts that run, their states, and K/V of the drafter's own for them.

    the K/V of one text    rows of the text's states, the last of them perhaps of drafted ones | rows of nodes
    a text's row           made of the target's state at a position p and of the token at p + 1
    a node's row           made of the state that its parent's row predicts, and of its token

K/V begins at the first state that the drafter was shown and continues without a gap; where one comes (a prefix that was
found in the cache, states that nobody took for a while), it begins again after it. Positions are counted from the first
row on: rotary ones count differences alone, and a published head's do.

Below nodes that are not decided on the drafter reads states of its own. A verdict makes rows of nodes rows of the text;
once the target's states of these tokens are there, the rows are computed again from them, in their place.

Sources: EAGLE (Li et al. 2024), section 4.1; Mirror Speculative Decoding, section 3.4.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.sequence import Sequence
from ...kernels.calls import join, pick
from ...kv.pool import KVPool
from ...model.packing import RowPacker
from ..base import StepFeatures
from ..network_sessions import ObservingDrafter, ObservingSessions
from ..text_sessions import DraftCache, Expansion

if TYPE_CHECKING:
    from ...model.decoder import TargetInfo
    from ..eagle.eagle3 import Eagle3Network
    from .network import HeadNetwork

CATCH_UP_ROWS = 512  # of a text, in one pass


@dataclass(slots=True, kw_only=True, eq=False)
class StateSession(DraftCache):
    """A sequence's text and tree, and the states that are known of both: of a node [d], which its row predicts."""

    start: int = 0  # position of the first row in the text
    unread: list[Tensor] = field(default_factory=list)  # [rows, d] as the network reads them, that have no K/V yet
    waiting: int = 0  # rows of them
    provisional: int = 0  # last rows of the text that drafted states have made: the waiting ones replace them

    @property
    def done(self) -> int:
        """Rows made of the target's states."""
        return int(self.cache.committed) - self.provisional

    @property
    def seen(self) -> int:
        """Position after the last state."""
        return self.start + self.done + self.waiting

    @property
    def pending(self) -> int:
        """Rows that the text's K/V lacks."""
        return self.waiting - self.provisional

    def uncomputed(self, ends: abc.Iterable[int]) -> list[int]:
        """Return the nodes on the way to the wanted ones that have no state, parents first."""
        return sorted({node for end in ends for node in self.path(end) if node not in self.states})

    def take(self, count: int) -> Tensor:
        """Return the first ``count`` waiting states, which wait no more."""
        whole = join(self.unread)
        self.waiting -= count
        self.unread = [whole[count:]] if self.waiting else []
        return whole[:count] if self.waiting else whole

    def lose_rows(self) -> None:
        """Forget what is computed of the nodes."""
        self.cache.rollback()
        self.states = {}
        for node in self.nodes.values():
            node.row = -1


class StateSessions(ObservingSessions):
    """Sessions of a drafter of states, over the texts whose states it is shown.

    Args:
        drafter: its `logits`, and what it was bound to.
        network: computes rows.
        room: rows of a draft, beyond those of the text.
        past: last states that are kept of a text while nothing is drafted; None: all.
        max_sequences, pool_tokens, device: as for `Drafter.bind`.
    """

    def __init__(
        self,
        drafter: StateDrafter,
        network: HeadNetwork | Eagle3Network,
        room: int,
        past: int | None,
        max_sequences: int,
        pool_tokens: int,
        device: torch.device,
    ) -> None:
        tokens, target = pool_tokens + max_sequences * (room + 32), drafter.target
        super().__init__(target.vocab_size, target.eos_ids, drafter.spec.proposes == "coupled")
        layers, heads, width = network.cache_shape
        self.pool = KVPool(layers, heads, width, tokens, network.handle.dtype, device)
        self.drafter, self.network, self.room, self.past = drafter, network, room, past
        self.sizes = max_sequences, pool_tokens, device
        self.fuse, self.stack = network.fuse, network.stack

    def _begin(self, view: Sequence) -> StateSession:
        session = StateSession(view=view)
        self._restart(session, 0)
        return session

    # -- states of the texts

    def observe(self, step: StepFeatures) -> None:
        """Note the states that a pass showed."""
        if not step.hidden or not len(next(iter(step.hidden.values()))):
            return
        states = self.network.read(step.hidden)
        total = states.shape[0]
        for view, rows, first in zip(step.sequences, step.hidden_rows, step.first, strict=True):
            count = rows.stop - rows.start
            if count > 0:  # a part is copied, so that it does not keep the others in memory
                self._note(view, first, states if count == total else pick(states, range(rows.start, rows.stop)), count)

    def _note(self, view: Sequence, first: int, states: Tensor, count: int) -> None:
        session: StateSession = self._open.get(view.key) or self.follow(view)
        if session.seen != first:
            self._restart(session, first)
        session.unread.append(states)
        session.waiting += count
        if self.past is not None and session.waiting > max(
            2 * self.past, CATCH_UP_ROWS
        ):  # nothing was drafted for long
            last = pick(join(session.unread), range(session.waiting - self.past, session.waiting))
            self._restart(session, session.seen - len(last))
            session.unread, session.waiting = [last], len(last)

    def _restart(self, session: StateSession, first: int) -> None:
        """Begin a text's K/V again at a position."""
        if session.cache is not None:
            session.cache.release()
        most = session.view.max_len
        session.cache = self.pool.open(expected=None if most is None else most - first + self.room)
        session.start, session.unread, session.waiting, session.provisional = first, [], 0, 0
        session.lose_rows()

    def ready(self, view: Sequence) -> bool:
        """Return whether a draft can start: the state before the root is there and unused, and there is room."""
        session: StateSession | None = self._open.get(view.key)
        able = session is not None and session.waiting > 0 and self._knows_root(session, view)
        return able and self._reserve(session, self.room)

    @staticmethod
    def _knows_root(session: StateSession, view: Sequence) -> bool:
        return session.start < session.seen == len(view.tokens) - 1

    # -- trees

    def _clear(self, tree: StateSession, tokens: abc.Sequence[int]) -> None:
        super()._clear(tree, tokens)
        self._keep(tree, (), 0)

    def _keep(self, tree: StateSession, rows: abc.Sequence[int], done: int) -> None:
        self.pool.settle([(tree.cache, rows, done)])
        tree.provisional += done

    def _prepare(self, session: StateSession, nodes: abc.Sequence[int]) -> Expansion | None:
        if session.pending > 0 and session.cache.ahead:  # rows of nodes are in the way of the text's
            session.lose_rows()
        if not self._asked(session) or not (session.waiting or session.states):
            return None
        computed = session.uncomputed(nodes)
        if not self._knows_root(session, session.view) or not self._reserve(session, len(computed)):
            return None
        return Expansion(session, [*nodes], computed)

    def _compute(self, parts: abc.Sequence[Expansion]) -> Tensor:
        """Catch up with the texts, then run a pass for each level of nodes without a state."""
        late = [one.session for one in parts if one.session.waiting]
        if late:
            for session, state in zip(late, self.catch_up([s.view for s in late]), strict=True):
                session.states[session.root] = state
        unfinished = [*parts]
        while unfinished := [one for one in unfinished if not one.session.states.keys() >= {*one.computed}]:
            packer, level = RowPacker(self.network, self.pool.device), list[tuple[StateSession, int]]()
            for one in unfinished:
                session, states = one.session, one.session.states
                nodes = [n for n in one.computed if n not in states and session.nodes[n].parent in states]
                session.cache.reserve(len(nodes))
                self._pack(packer, session, 0, nodes)
                self._entered(session, nodes)
                level += [(session, node) for node in nodes]
            fed = torch.stack([s.states[s.nodes[node].parent] for s, node in level])
            predicted = self.network.run(packer.batch(), fed, self.network.reads_tokens, self.pool)
            for (session, node), state in zip(level, predicted, strict=True):
                session.states[node] = state
        pairs = [(one.session, node) for one in parts for node in one.parents]
        tokens = [s.nodes[node].token for s, node in pairs]
        return self.drafter.logits(torch.stack([s.states[node] for s, node in pairs]), tokens)

    # -- passes over texts

    def catch_up(self, views: abc.Sequence[Sequence]) -> Tensor:
        """Return [B, d] what the head makes of the last state and the root of each text, where `ready`."""
        for view in views:
            self._shorten(self._open[view.key])
        return self._forward_waiting(views)

    def _shorten(self, session: StateSession) -> None:
        """Leave at most `CATCH_UP_ROWS` states waiting."""
        while session.waiting > CATCH_UP_ROWS:
            self._forward_waiting([session.view])

    def take(self, view: Sequence) -> tuple[StateSession, list[int], Tensor]:
        """Return a text, for a compiled call: its waiting states [rows, d] and the tokens after them; see `settle`."""
        session: StateSession = self._open[view.key]
        self._shorten(session)
        first, count = session.start + session.done, session.waiting
        return session, view.tokens[first + 1 : first + count + 1], session.take(count)

    def settle(self, views: abc.Sequence[Sequence], counts: abc.Sequence[int]) -> None:
        """Note that so many rows of each are computed.

        They replace provisional ones, and reserved ones are part of its text now; the rest stays reserved.
        """
        for view, count in zip(views, counts, strict=True):
            session: StateSession = self._open[view.key]
            replaced = min(session.provisional, count)
            session.provisional -= replaced
            if fresh := count - replaced:
                rest = session.cache.reserved - fresh
                session.cache.advance(fresh)
                session.cache.reserve(rest)

    def _forward_waiting(self, views: abc.Sequence[Sequence]) -> Tensor:
        """Compute one pass over the first waiting states of each; return [B, d] its last rows."""
        packer, states, ends = RowPacker(self.network, self.pool.device), [], []
        for view in views:
            session: StateSession = self._open[view.key]
            count, done = min(session.waiting, CATCH_UP_ROWS), session.done
            first = session.start + done
            states.append(session.take(count))
            stop = done + count
            packer.add(
                view.tokens[first + 1 : first + count + 1],
                range(done, stop),
                slots=session.cache.slots(done, stop),
                keys=session.cache.slots(0, stop),
                num_keys=stop,
                prefix=done,
            )
            ends.append(packer.rows - 1)
        fed = self.network.final(torch.cat(states))
        outputs = self.network.run(packer.batch(), fed, self.network.reads_tokens, self.pool)
        self.settle(views, [*map(len, states)])
        return outputs if len(ends) == len(outputs) else outputs[ends]

    def extend(self, views: abc.Sequence[Sequence], states: Tensor, step: int) -> Tensor:
        """Return [B, d] row ``step`` (from 1 on) of a chain after each text, from ``states`` [B, d] without tokens."""
        packer = RowPacker(self.network, self.pool.device)
        for view in views:
            cache = self._open[view.key].cache
            at = cache.committed + step - 1
            packer.add([0], [at], cache.slots(at, at + 1), cache.slots(0, at + 1), at + 1, at)
        return self.network.run(packer.batch(), states, False, self.pool)


class StateDrafter(ObservingDrafter):
    """Base of drafters that run one layer over the target's states.

    They add `spec`, `bind`, which sets `target` and `body`, and `draft`.
    """

    target: TargetInfo
    body: StateSessions  # the layer at work

    def logits(self, states: Tensor, tokens: abc.Sequence[int]) -> Tensor:
        """Return [nodes, V] of nodes, from the states [nodes, d] that they predict and their tokens."""
        return self.body.network.logits(states)

    def sessions(self, rows: int) -> StateSessions:
        self.body = StateSessions(self, self.body.network, rows, self.body.past, *self.body.sizes)
        return self.body
