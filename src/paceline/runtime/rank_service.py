"""A rank in a process of its own: the messages, and who serves them.

Run        a pass, or a part of one; has no answer but what the ranks join
Adapter    adapters that later runs name
Clear      of `messages`: another epoch begins
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..core.errors import RankLost
from ..core.inference import inference
from ..kv.store import KVStore
from ..model.adapters import AdapterConfig, AdapterRange, LowRank
from ..model.base import ForwardState
from ..model.decoder import Decoder
from ..model.families import linear_shapes
from ..model.fields import Values
from ..model.parallel import BEST, LOGITS, NORMED, Run
from .handshake import Facts
from .messages import Clear
from .serving import Service


@dataclass(frozen=True, slots=True)
class Adapter:
    """Whole adapters, of which each rank takes its part."""

    number: int
    config: AdapterConfig
    values: list[Values]  # of `LowRank.parameters`

    def build(self, decoder: Decoder) -> LowRank:
        """Return the adapters."""
        adapters = LowRank(self.config, linear_shapes(decoder.config), dtype=self.values[0].dtype)
        for part, value in zip(adapters.parameters(), self.values, strict=True):
            part.data.copy_(value)
        return adapters


class RankService(Service):
    """A rank that a line serves.

    Args:
        decoder: its share of the target.
        layout: layers, heads and width of its K and V.
        kind: their dtype.
        facts: about the target.
    """

    def __init__(self, decoder: Decoder, layout: tuple[int, int, int], kind: torch.dtype, facts: Facts) -> None:
        assert decoder.ranks is not None
        self.decoder, self.ranks, self.facts = decoder, decoder.ranks, facts
        self._layout, self._kind = layout, kind
        self._epoch = -1
        self._caches: dict[int, KVStore] = {}
        self._adapters: dict[int, LowRank] = {}

    @inference
    def handle(self, message: Any) -> Iterable[Any]:
        """Do what a message states."""
        if isinstance(message, Clear):
            self._epoch = message.epoch
            self._caches.clear()
            self._adapters.clear()
            self.ranks.joins.begin()
            return [message]
        if isinstance(message, Adapter):
            self._adapters[message.number] = message.build(self.decoder)
        elif message.epoch == self._epoch:
            self._run(message)
        return ()

    def _run(self, run: Run) -> None:
        for number in run.dropped:
            self._caches.pop(number, None)
        for number, sources, targets in run.moves:
            if number in self._caches:  # else nothing was written there
                self._caches[number].copy_slots(sources, targets)
        adapters = [AdapterRange(start, stop, self._adapters[number]) for number, start, stop in run.adapters]
        try:
            decoder = self.decoder
            hidden = run.hidden if run.tokens is None else decoder.embed_tokens(run.tokens)
            if run.layers is not None:
                state = ForwardState(hidden, run.positions, run.slots, decoder.plan(run.segments, run.positions))
                state.adapters = adapters
                hidden = decoder.run_layers(state, *run.layers, self._cache(run)).hidden
            if run.read:
                rows = hidden[[*run.choice_rows]] if run.choice_rows else hidden
                {BEST: decoder.best, LOGITS: decoder.read, NORMED: decoder.read_normed}[run.read](rows)
        except RankLost:  # rank 0 sees to it
            return

    def _cache(self, run: Run) -> KVStore:
        if run.cache not in self._caches:
            self._caches[run.cache] = KVStore(*self._layout, run.pool_slots, self._kind, self.decoder.device)
        return self._caches[run.cache]
