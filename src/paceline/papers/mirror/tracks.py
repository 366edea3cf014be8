"""A draft of tracks: two segments of layers, in each of which G narrow networks compute side by side without traffic.

    embedding    of width G d; a track reads its own d columns
    segment      a track is a decoder of width d with its own heads, MLP and K/V
    merge        one join between the segments: each track reads, by a product of its own, the normed states of all
    segment
    end          one join: all states, side by side, are the row of width G d that final norm and head read
    choice       one join of logits, to which each track gives those of a part of the vocabulary

Tracks are computed one after the other in one process; in several they were slower than a dense draft of their size.
Loaded as one of several `Ranks`, a draft has one track: products are the same, and a gather rounds nothing.

Source: Mirror Speculative Decoding, 3.3 and G.2, where the merge is not described; the rules here are ours. After SPD
(Kim et al. 2025, arXiv 2502.20727), which leaves out joins of a trained model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ...kernels.linear import NativeLinear
from ...model.attention.base import AttentionBackend, Segment
from ...model.base import Batch, ForwardState, KVCache, LayerCache, Taps
from ...model.decoder import Decoder, likeliest
from ...model.families import SEGMENTS, DecoderConfig, linear_shapes
from ...model.layers import Norm
from ...model.linear import Dense, LinearOp, Quant, make_linear, nan_parameter
from ...model.parallel import Ranks, Share
from ...weights.loader import fill_all, memory_for, read_layout
from ...weights.names import Piece
from ...weights.source import Source, parse_device


def track_share(config: DecoderConfig, rank: int) -> Share:
    """Return what a track has as a rank: its part of the vocabulary and its joins."""
    return Share(replace(config, family="llama"), rank, config.tracks)


class Track(nn.Module):
    """One track, and its part of the head; ``options`` are further arguments of `Decoder`."""

    def __init__(self, config: DecoderConfig, number: int, attention: AttentionBackend, **options: Any) -> None:
        super().__init__()
        track_config = config.track
        self.vocabulary = track_share(config, number).vocabulary
        self.body = Decoder(track_config, attention, **options)
        for parameter in (self.body.embedding, *(() if self.body.norm is None else self.body.norm.parameters())):
            parameter.data.zero_()  # ends that nobody reads
        dtype, device = self.body.dtype, self.body.device
        self.merge = Dense(config.d_model, track_config.d_model, False, dtype, device)
        self.merge_norm = Norm(track_config, dtype, device)
        first, last = self.vocabulary
        self.head = Dense(config.d_model, last - first, False, dtype, device)
        self.product: LinearOp  # of the merge
        self.logits: Callable[[Tensor], Tensor]  # [rows, its vocabulary] of normed states

    def finish(self) -> None:
        """Implement `Decoder.finish`."""
        merge, head = self.merge.weight.data, self.head.weight.data
        del self.merge, self.head  # one copy of the weights is enough
        self.body.finish()
        self.merge_norm.finish()
        if self.body.stack is None:
            self.product, self.logits = make_linear(merge, None), make_linear(head, None, quant=self.body.quant)
        else:
            self.product, self.logits = NativeLinear(merge, None), NativeLinear(head, None, self.body.quant).wide


class Tracks(Decoder):
    """A draft of tracks in place of a decoder: all of its tracks or, as a rank, the one of its number.

    Passes go through all layers, without taps or adapters; among ranks each is inside of a `whole_run`. Arguments as of
    `Decoder`.
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
        ranks: Ranks | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.config, self.ranks, self.num_layers = config, ranks, config.num_layers
        self.dtype, self.device, self.exact, self.quant = dtype, torch.device(device), False, quant
        self.lender, self.normed, self.stack = None, False, None
        track_config = config.track
        self.here = range(config.tracks) if ranks is None else range(ranks.share.rank, ranks.share.rank + 1)
        self.local = replace(track_config, num_layers=len(self.here) * track_config.num_layers)
        self.embedding = nan_parameter((config.vocab_size, len(self.here) * track_config.d_model), dtype, self.device)
        self.norm: Norm = Norm(config, dtype, self.device)
        options: dict[str, Any] = {"dtype": dtype, "device": device, "quant": quant, "native": native}
        self.tracks = nn.ModuleDict({str(track): Track(config, track, attention, **options) for track in self.here})
        self._each: list[Any] = [self.tracks[str(track)] for track in self.here]
        self._hot: Tensor | None = None
        self._parts: WeakKeyDictionary[KVCache, list[LayerCache]] = WeakKeyDictionary()

    def cut_of(self, piece: Piece) -> list[Piece]:
        """Return what of a checkpoint's tensor is read here; the table is both ends."""
        kind, _, rest = piece.into.partition(".")
        if kind == "tracks":
            return [piece] if int(rest.partition(".")[0]) in self.here else []
        if kind != "embedding":
            return [piece]
        width = self.config.track.d_model
        columns = slice(self.here[0] * width, (self.here[-1] + 1) * width)
        rows = [(f"tracks.{n}.head.weight", slice(*t.vocabulary)) for n, t in zip(self.here, self._each, strict=True)]
        parts = [replace(piece, into=into, take=(column_part, slice(None))) for into, column_part in rows]
        return [replace(piece, take=(slice(None), columns)), *parts]

    # -- see `Decoder`

    def finish(self, stored: Any = None) -> Tracks:
        """Implement `Decoder`."""
        self.assert_loaded()
        for track in self._each:
            track.finish()
        self.norm.finish()
        return self

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Implement `Decoder`: of the tracks that are here, one's layers after the other's."""
        layers, heads, width = self._each[0].body.cache_shape
        return len(self._each) * layers, heads, width

    @property
    def pass_bytes(self) -> int:
        """Implement `Decoder`: of the tracks that are here, with their merges and their parts of the head."""
        track_config = self.config.track
        layer = sum(inputs * outputs for inputs, outputs in linear_shapes(track_config).values())
        width, head = self.config.d_model, sum(last - first for first, last in (t.vocabulary for t in self._each))
        weights = len(self._each) * (self.num_layers * layer + track_config.d_model * width) + head * width
        return round(self.weight_bytes * weights)

    @property
    def weight_bytes(self) -> float:
        """Implement `Decoder`."""
        stack = self._each[0].body.stack
        return self.dtype.itemsize if self.quant is None or stack is None else float(stack.weight_bytes)

    def plan(self, segments: Sequence[Segment], positions: Tensor) -> Any:
        """Implement `Decoder`: the same for all tracks."""
        return self._each[0].body.plan(segments, positions)

    def embed(self, batch: Batch) -> ForwardState:
        """Implement `Decoder`: the columns of the tracks that are here."""
        hidden = self.embed_tokens(batch.tokens)
        return ForwardState(hidden, batch.positions, batch.slots, batch.attn)

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """Implement `embed`; nothing is joined."""
        return nn.functional.embedding(tokens, self.embedding)

    def run_layers(
        self, state: ForwardState, start: int, stop: int, cache: KVCache, taps: Taps | None = None
    ) -> ForwardState:
        """Implement `Decoder`: of all layers; [rows, G d] of all tracks come out.

        Raises:
            RankLost: another track is gone.
            ValueError: some of the layers alone, taps or adapters.
        """
        if (start, stop) != (0, self.num_layers) or taps is not None or state.adapters:
            raise ValueError("a draft of tracks runs whole, without taps or adapters")
        states = [replace(state, hidden=part.contiguous()) for part in state.hidden.chunk(len(self._each), dim=1)]
        for segment in range(SEGMENTS):
            layers = [(segment + i) * self.num_layers // SEGMENTS for i in (0, 1)]
            if segment:
                pairs = [*zip(self._each, states, strict=True)]
                seen = self._side_by_side([track.merge_norm(track_state.hidden) for track, track_state in pairs])
                for track, track_state in pairs:
                    track_state.hidden = track.product.add(seen, track_state.hidden)
            for track, track_state, part in zip(self._each, states, self._cache(cache), strict=True):
                track_state.hidden = track.body.run_layers(track_state, *layers, part).hidden
        state.hidden = self._side_by_side([track_state.hidden for track_state in states])
        return state

    def _side_by_side(self, parts: Sequence[Tensor]) -> Tensor:
        """Return [rows, G d] of all tracks' [rows, d]."""
        return torch.cat(tuple(parts), dim=1) if self.ranks is None else self.ranks.joins.gather(parts[0].contiguous())

    def _cache(self, cache: KVCache) -> list[LayerCache]:
        """Return the parts of the cache by track, whose layers lie one after the other."""
        if cache not in self._parts:
            n = self.num_layers
            parts = [slice(i * n, (i + 1) * n) for i in range(len(self._each))]
            self._parts[cache] = [LayerCache(cache.k[part], cache.v[part]) for part in parts]
        return self._parts[cache]

    def _read_own(self, hidden: Tensor) -> Tensor:
        x = self.norm(hidden)
        logits = torch.cat([track.logits(x) for track in self._each], dim=1)  # as ranks do: the same bits
        return logits if logits.dtype == torch.float64 else logits.float()

    def best(self, hidden: Tensor) -> Tensor:
        """Implement `Decoder`."""
        return likeliest(self.read(hidden))


def load_tracks(
    source: Source,
    *,
    attention: AttentionBackend,
    device: str | torch.device = "cpu",
    native: bool = False,
    ranks: Ranks | None = None,
) -> Tracks:
    """Load a draft of tracks, or the track of one of several ranks, of which nothing else is read.

    Args, errors: as of `loader.load_model`.
    """
    config, layout, place = source.shape, read_layout(source.folder, source.shape), parse_device(device)
    with memory_for(source.folder, layout, source.dtype, place, {}):
        options: dict[str, Any] = {"device": place, "quant": source.quant, "native": native, "ranks": ranks}
        tracks = Tracks(config, attention, dtype=source.dtype, **options)
        fill_all(tracks, layout.cut(tracks.cut_of))
        return tracks.finish()
