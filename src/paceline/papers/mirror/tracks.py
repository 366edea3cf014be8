"""A draft of tracks: two segments of layers, in each of which G narrow networks compute side by side without traffic.

    embedding    of width G d; a track reads its own d columns
    segment      a track is a decoder of width d with its own heads, MLP and K/V
    merge        one join between the segments: each track reads, by a product of its own, the normed states of all
    segment
    end          one join: all states, side by side, are the row of width G d that final norm and head read

Tracks are computed one after the other in one process; in several they were slower than a dense draft of their size.

Source: Mirror Speculative Decoding, 3.3 and G.2, where the merge is not described; the rules here are ours. After SPD
(Kim et al. 2025, arXiv 2502.20727), which leaves out joins of a trained model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ...kernels.linear import NativeLinear
from ...model.attention.base import AttentionBackend, Segment
from ...model.base import Batch, ForwardState, KVCache, LayerCache, Taps
from ...model.decoder import Decoder
from ...model.families import SEGMENTS, DecoderConfig, linear_shapes
from ...model.layers import Norm
from ...model.linear import Dense, LinearOp, Quant, make_linear, nan_parameter


class Track(nn.Module):
    """One track; ``options`` are further arguments of `Decoder`."""

    def __init__(self, config: DecoderConfig, attention: AttentionBackend, **options: Any) -> None:
        super().__init__()
        self.body = Decoder(config.track, attention, **options)
        for parameter in (self.body.embedding, *(() if self.body.norm is None else self.body.norm.parameters())):
            parameter.data.zero_()  # ends that nobody reads
        dtype, device = self.body.dtype, self.body.device
        self.merge = Dense(config.d_model, config.track.d_model, False, dtype, device)
        self.merge_norm = Norm(config.track, dtype, device)
        self.product: LinearOp  # of the merge

    def finish(self) -> None:
        """Implement `Decoder.finish`."""
        merge = self.merge.weight.data
        del self.merge  # one copy of the weights is enough
        self.body.finish()
        self.merge_norm.finish()
        self.product = make_linear(merge, None) if self.body.stack is None else NativeLinear(merge, None)


class Tracks(Decoder):
    """A draft of tracks in place of a decoder; arguments as of `Decoder`.

    Passes go through all layers, without taps or adapters.
    """

    def __init__(
        self,
        config: DecoderConfig,
        attention: AttentionBackend,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        quant: Quant | None = None,
        native: bool = False,
        **others: Any,
    ) -> None:
        nn.Module.__init__(self)
        self.config, self.num_layers = config, config.num_layers
        self.local = replace(config.track, num_layers=config.tracks * config.num_layers)
        self.dtype, self.device, self.exact, self.quant = dtype, torch.device(device), False, quant
        self.ranks, self.lender, self.normed, self.stack, self._native = None, None, False, None, native
        self.embedding = nan_parameter((config.vocab_size, config.d_model), dtype, self.device)
        self.norm: Norm = Norm(config, dtype, self.device)
        options: dict[str, Any] = {"dtype": dtype, "device": device, "quant": quant, "native": native}
        self.tracks = nn.ModuleList(Track(config, attention, **options) for _ in range(config.tracks))
        self._each: list[Any] = [*self.tracks]
        self._hot: Tensor | None = None
        self._parts: WeakKeyDictionary[KVCache, list[LayerCache]] = WeakKeyDictionary()

    # -- see `Decoder`

    def finish(self, stored: Any = None) -> Tracks:
        """Implement `Decoder`."""
        self.assert_loaded()
        for track in self._each:
            track.finish()
        self.norm.finish()
        table = self.embedding.data
        self._head = (
            NativeLinear(table, None, self.quant) if self._native else make_linear(table, None, quant=self.quant)
        )
        return self

    @property
    def pass_bytes(self) -> int:
        """Implement `Decoder`: with the merges."""
        layer = sum(inputs * outputs for inputs, outputs in linear_shapes(self.local).values())
        ends = (self.config.d_model + self.config.vocab_size) * self.config.d_model
        return round(self.weight_bytes * (self.local.num_layers * layer + ends))

    def plan(self, segments: Sequence[Segment], positions: Tensor) -> Any:
        """Implement `Decoder`: the same for all tracks."""
        return self._each[0].body.plan(segments, positions)

    def embed(self, batch: Batch) -> ForwardState:
        """Implement `Decoder`."""
        return ForwardState(self.embed_tokens(batch.tokens), batch.positions, batch.slots, batch.attn)

    def run_layers(
        self, state: ForwardState, start: int, stop: int, cache: KVCache, taps: Taps | None = None
    ) -> ForwardState:
        """Implement `Decoder`: of all layers; [rows, G d] of all tracks come out.

        Raises:
            ValueError: some of the layers alone, taps or adapters.
        """
        if (start, stop) != (0, self.num_layers) or taps is not None or state.adapters:
            raise ValueError("a draft of tracks runs whole, without taps or adapters")
        states = [replace(state, hidden=part.contiguous()) for part in state.hidden.chunk(len(self._each), dim=1)]
        for segment in range(SEGMENTS):
            layers = [(segment + i) * self.num_layers // SEGMENTS for i in (0, 1)]
            if segment:
                pairs = [*zip(self._each, states, strict=True)]
                seen = torch.cat([track.merge_norm(track_state.hidden) for track, track_state in pairs], dim=1)
                for track, track_state in pairs:
                    track_state.hidden = track.product.add(seen, track_state.hidden)
            for track, track_state, part in zip(self._each, states, self._cache(cache), strict=True):
                track_state.hidden = track.body.run_layers(track_state, *layers, part).hidden
        state.hidden = torch.cat([track_state.hidden for track_state in states], dim=1)
        return state

    def _cache(self, cache: KVCache) -> list[LayerCache]:
        """Return the parts of the cache by track, whose layers lie one after the other."""
        if cache not in self._parts:
            n = self.num_layers
            parts = [slice(i * n, (i + 1) * n) for i in range(len(self._each))]
            self._parts[cache] = [LayerCache(cache.k[part], cache.v[part]) for part in parts]
        return self._parts[cache]

    def _read_own(self, hidden: Tensor) -> Tensor:
        return self.head_product.wide(self.norm(hidden)) if self._native else super()._read_own(hidden)
