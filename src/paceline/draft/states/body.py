"""A drafter of states at work: the texts that run, their states, and K/V of the drafter's own for them.

K/V begins at the first state that the drafter was shown and goes on without a gap; where one comes (a prefix that was
found in the cache, states that nobody took for a while), it begins anew behind it. A row at position p is made of the
target's state there and of the token at p + 1, so that the rows of a text are those of all tokens but the last.

Positions are counted from the first row on: rotary ones count differences alone, and a published head's do.

Rows that are drafted lie behind them and are dropped with the draft: what was accepted is computed again from the
target's own states, which are better than the drafted ones.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.errors import PoolFullError
from ...core.inference import inference
from ...core.sequence import Sequence
from ...kernels.calls import join, pick
from ...kv.pool import KVPool, SequenceCache
from ...model.packing import RowPacker
from ..base import Drafter, StepFeatures

if TYPE_CHECKING:
    from ..eagle.eagle3 import Eagle3Network
    from .network import HeadNetwork

CATCH_UP_ROWS = 512  # of a text, in one pass


@dataclass(slots=True)
class StateText:
    """What is known of one running sequence."""

    cache: SequenceCache
    start: int  # position of the first row in the text
    states: list[Tensor] = field(default_factory=list)  # [rows, d] as the network reads them, that have no K/V yet
    waiting: int = 0  # rows of them

    @property
    def seen(self) -> int:
        """Position behind the last state."""
        return self.start + self.cache.committed + self.waiting

    def take(self, count: int) -> Tensor:
        """The first ``count`` waiting states, which wait no more."""
        whole = join(self.states)
        self.waiting -= count
        self.states = [whole[count:]] if self.waiting else []
        return whole[:count] if self.waiting else whole


class StateBody:
    """Texts with states, and the network that drafts from them.

    Args:
        network: computes rows.
        room: rows of a draft, beyond those of the text.
        past: last states that are kept of a text while nothing is drafted; None: all.
        max_sequences, pool_tokens, device: as for `Drafter.bind`.
    """

    def __init__(
        self,
        network: HeadNetwork | Eagle3Network,
        room: int,
        past: int | None,
        max_sequences: int,
        pool_tokens: int,
        device: torch.device,
    ) -> None:
        self.network, self.room, self.past, self._device = network, room, past, device
        self.fuse, self.stack = network.fuse, network.stack
        tokens = pool_tokens + max_sequences * (room + 32)
        self.pool = KVPool(*network.cache_shape, tokens, network.handle.dtype, device)
        self.texts: dict[int, StateText] = {}

    # -- states of the texts

    def observe(self, step: StepFeatures) -> None:
        """Note the states that a pass showed."""
        if not step.hidden or not len(next(iter(step.hidden.values()))):
            return
        states = self.network.read(step.hidden)
        shown = states.shape[0]
        for view, rows, first in zip(step.sequences, step.hidden_rows, step.first, strict=True):
            count = rows.stop - rows.start
            if count > 0:  # a part is copied, so that it does not keep the others in memory
                self._note(view, first, states if count == shown else pick(states, range(rows.start, rows.stop)), count)

    def _note(self, view: Sequence, first: int, states: Tensor, count: int) -> None:
        text = self.texts.get(view.key)
        if text is None or text.seen != first:
            text = self._begin(view, first)
        text.states.append(states)
        text.waiting += count
        if self.past is not None and text.waiting > max(2 * self.past, CATCH_UP_ROWS):
            last = pick(
                join(text.states), range(text.waiting - self.past, text.waiting)
            )  # nothing was drafted for long
            text = self._begin(view, text.seen - len(last))
            text.states, text.waiting = [last], len(last)

    def _begin(self, view: Sequence, first: int) -> StateText:
        """A text of which nothing before ``first`` is known."""
        self.drop([view.key])
        expected = None if view.max_len is None else view.max_len - first + self.room
        text = self.texts[view.key] = StateText(self.pool.open(expected=expected), first)
        return text

    def drop(self, keys: abc.Sequence[int]) -> None:
        """Forget sequences."""
        for key in keys:
            text = self.texts.pop(key, None)
            if text is not None:
                text.cache.release()
        if not self.texts and not self.pool.idle:  # a draft ended in its middle
            self.pool.reset()

    def ready(self, view: Sequence) -> bool:
        """Whether a draft can start: the state in front of the root is known, and there is room."""
        text = self.texts.get(view.key)
        if text is None or text.seen != len(view.tokens) - 1 or text.seen == text.start:
            return False
        if not text.waiting:  # proposed and not verified: the state in front of the root is needed once more
            return False
        try:
            text.cache.reserve(text.waiting + self.room)
        except PoolFullError:
            return False
        return True

    # -- passes

    def catch_up(self, views: abc.Sequence[Sequence]) -> Tensor:
        """[B, d] what the head makes of the last state and the root of each text; `ready` was asked for it."""
        for view in views:
            self.shorten(view)
        return self._forward_waiting(views, CATCH_UP_ROWS)

    def shorten(self, view: Sequence) -> None:
        """Leave at most `CATCH_UP_ROWS` states waiting."""
        while self.texts[view.key].waiting > CATCH_UP_ROWS:
            self._forward_waiting([view], CATCH_UP_ROWS)

    def take(self, view: Sequence) -> tuple[StateText, list[int], Tensor]:
        """A text, for a compiled call: its waiting states [rows, d] and the tokens behind them; see `settle`."""
        self.shorten(view)
        text = self.texts[view.key]
        first, count = text.start + text.cache.committed, text.waiting
        return text, view.tokens[first + 1 : first + count + 1], text.take(count)

    def settle(self, views: abc.Sequence[Sequence], counts: abc.Sequence[int]) -> None:
        """So many reserved rows of each are part of its text now; what is left stays reserved."""
        caches = [self.texts[view.key].cache for view in views]
        room = [cache.reserved for cache in caches]
        self.pool.commit([(cache, range(count)) for cache, count in zip(caches, counts, strict=True)])
        for cache, reserved, count in zip(caches, room, counts, strict=True):
            cache.reserve(reserved - count)

    def _forward_waiting(self, views: abc.Sequence[Sequence], most: int) -> Tensor:
        """One pass over the first waiting states of each; [B, d] its last rows."""
        packer, states, ends = self.packer(), [], []
        for view in views:
            text = self.texts[view.key]
            count, done = min(text.waiting, most), text.cache.committed
            first = text.start + done
            states.append(text.take(count))
            stop = done + count
            packer.add(
                view.tokens[first + 1 : first + count + 1],
                range(done, stop),
                slots=text.cache.slots(done, stop),
                keys=text.cache.slots(0, stop),
                num_keys=stop,
                prefix=done,
            )
            ends.append(packer.rows - 1)
        found = self.run(packer, self.network.final(torch.cat(states)), self.network.reads_tokens)
        self.settle(views, [*map(len, states)])
        return found if len(ends) == len(found) else found[ends]

    def packer(self) -> RowPacker:
        """Collects the rows of a pass; their tokens are those that the states are fused with."""
        return RowPacker(self.network, self._device)

    def run(self, packer: RowPacker, states: Tensor, tokens: bool = True) -> Tensor:
        """One pass.

        Args:
            packer: its rows.
            states: [rows, d] true or drafted.
            tokens: whether they are fused with the rows' tokens.

        Returns:
            [rows, d] the states that come next.
        """
        return self.network.run(packer.batch(), states, tokens, self.pool)

    def extend(self, views: abc.Sequence[Sequence], states: Tensor, step: int) -> Tensor:
        """Row ``step`` (from 1 on) of a chain behind each text, fused with no token: [B, d] from ``states`` [B, d]."""
        packer = self.packer()
        for view in views:
            text = self.texts[view.key]
            cache, at = text.cache, text.cache.committed + step - 1
            packer.add([0], [at], cache.slots(at, at + 1), cache.slots(0, at + 1), at + 1, at)
        return self.run(packer, states, tokens=False)


class StateDrafter(Drafter):
    """Base of drafters that run one layer over the target's states: they add `spec`, `bind`, which sets `body`, and
    `draft`."""

    trusted = True
    body: StateBody  # the layer at work
    witness: Callable[[StepFeatures], None] | None = None  # told of what the drafter is shown

    @inference
    def observe(self, step: StepFeatures) -> None:
        """Note the states that a pass showed."""
        self.body.observe(step)
        if self.witness is not None:
            self.witness(step)

    def release(self, keys: abc.Sequence[int]) -> None:
        """Drop the state of ended or preempted sequences."""
        self.body.drop(keys)
