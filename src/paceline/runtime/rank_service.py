"""A rank in a process of its own: the messages, and who serves them.

Run        a pass, or a part of one; has no answer but what the ranks join
Adapter    adapters that later runs name
Clear      another epoch begins; the rank replies with the same
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.errors import RankLost
from ..core.inference import inference
from ..kv.store import KVStore
from ..model.adapters import AdapterConfig, AdapterRange, LowRank
from ..model.base import ForwardState, KVCache
from ..model.decoder import Decoder
from ..model.families import linear_shapes
from ..model.parallel import BEST, LOGITS, NORMED, Run
from .handshake import Facts
from .serving import Service


@dataclass(frozen=True, slots=True)
class Adapter:
    """Whole adapters, of which each rank takes its part."""

    number: int
    rank: int
    alpha: float
    layers: list[int]
    linears: list[str]
    values: Tensor  # all of them, in the order of `LowRank.pairs`

    @staticmethod
    def of(number: int, adapter: LowRank) -> Adapter:
        """Return adapters as a message."""
        c = adapter.config
        values = torch.cat([part.data.reshape(-1) for _, _, *pair in adapter.pairs() for part in pair])
        return Adapter(number, c.rank, c.alpha, [*c.layers], [*c.linears], values)

    def build(self, decoder: Decoder) -> LowRank:
        """Return the adapters."""
        config = AdapterConfig(rank=self.rank, alpha=self.alpha, layers=tuple(self.layers), linears=tuple(self.linears))
        adapters, at = LowRank(config, linear_shapes(decoder.config), dtype=self.values.dtype), 0
        for _, _, *pair in adapters.pairs():
            for part in pair:
                part.data.copy_(self.values[at : at + part.numel()].view(part.shape))
                at += part.numel()
        return adapters


@dataclass(frozen=True, slots=True)
class Clear:
    """Nothing that was sent before counts, nor what K and V hold."""

    epoch: int


KINDS = Run, Adapter, Clear


class RankService(Service):
    """A rank that a line serves.

    Args:
        decoder: its share of the target.
        layout: layers, heads and width of its K and V.
        kind: their dtype.
        facts: about the target.
    """

    kinds = KINDS

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
            perform(self.decoder, run, self._cache(run), adapters)
        except RankLost:  # rank 0 sees to it
            return

    def _cache(self, run: Run) -> KVStore | None:
        if run.cache < 0:
            return None
        if run.cache not in self._caches:
            self._caches[run.cache] = KVStore(*self._layout, run.slots, self._kind, self.decoder.device)
        return self._caches[run.cache]


def perform(decoder: Decoder, run: Run, cache: KVCache | None, adapters: Sequence[AdapterRange]) -> None:
    """Do the part of a run that belongs to another rank than 0."""
    tokens, positions, slots, _, _, choice_rows = run.lists()
    hidden = decoder.embed_tokens(tokens) if run.embeds else run.hidden
    if run.start < run.stop:
        assert cache is not None, "layers without K and V"
        state = ForwardState(hidden, positions, slots, decoder.plan(run.segments(), positions))
        state.adapters = adapters
        hidden = decoder.run_layers(state, run.start, run.stop, cache).hidden
    if run.read:
        rows = hidden[choice_rows] if len(choice_rows) else hidden
        {BEST: decoder.best, LOGITS: decoder.read, NORMED: decoder.read_normed}[run.read](rows)
