"""Where each tensor of a checkpoint goes: the names of every family's files, as data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ..model.families import DecoderConfig, linear_biases, linear_shapes


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One checkpoint tensor, and the rows of a parameter that it fills."""

    source: str  # the checkpoint's name, without the leading "model."
    into: str  # the decoder's parameter
    shape: tuple[int, ...]  # of the checkpoint's tensor
    at: int = 0  # first row of the parameter
    rows: int | None = None  # how many of its rows; None: all
    offset: float = 0.0  # the parameter is what is stored, and this more
    take: tuple[slice, ...] = ()  # the part of the checkpoint's tensor that is read; none: all

    @property
    def of_layer(self) -> bool:
        """Return whether it belongs to a layer, and not to the embedding or the head."""
        return self.into.startswith("layers.")

    @property
    def numel(self) -> int:
        """Return the number of elements that are read."""
        lengths = [len(range(n)[part]) for n, part in zip(self.shape, self.take, strict=False)]
        return math.prod((*lengths, *self.shape[len(lengths) :]))


# A layer's part -> the checkpoint's tensors that fill it, one after the other.
_LLAMA_LAYER = {
    "attention_norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
_LAYERS = {
    "gemma3_text": _LLAMA_LAYER
    | {
        "attention_post_norm": ("post_attention_layernorm",),
        "mlp_norm": ("pre_feedforward_layernorm",),
        "mlp_post_norm": ("post_feedforward_layernorm",),
    },
    "phi3": _LLAMA_LAYER | {"qkv": ("self_attn.qkv_proj",), "up": ("mlp.gate_up_proj",)},
}


def weight_map(config: DecoderConfig) -> list[Piece]:
    """Return every checkpoint tensor that the decoder reads, and its parameter."""
    c = config
    if c.tracks > 1:
        return _of_tracks(c)
    table = (c.vocab_size, c.d_model)
    pieces = [Piece(source="embed_tokens.weight", into="embedding", shape=table), _norm(c, "norm", "norm")]
    if not c.tied:
        pieces.append(Piece(source="lm_head.weight", into="head.weight", shape=table))
    for index in range(c.num_layers):
        pieces += _layer(c, f"layers.{index}", f"layers.{index}")
    return pieces


def _of_tracks(c: DecoderConfig) -> list[Piece]:
    """Return one table for both ends, and of every track its layers and what it reads of the others."""
    track_shape, table = c.track, (c.vocab_size, c.d_model)
    pieces = [Piece(source="embed_tokens.weight", into="embedding", shape=table), _norm(c, "norm", "norm")]
    for track in range(c.tracks):
        source = into = f"tracks.{track}"
        for index in range(c.num_layers):
            pieces += _layer(track_shape, f"{source}.layers.{index}", f"{into}.body.layers.{index}")
        pieces.append(_norm(track_shape, f"{source}.merge_norm", f"{into}.merge_norm"))
        merge: dict[str, Any] = {"source": f"{source}.merge.weight", "into": f"{into}.merge.weight"}
        pieces.append(Piece(**merge, shape=(track_shape.d_model, c.d_model)))
    return pieces


def _layer(c: DecoderConfig, source: str, into: str) -> Iterator[Piece]:
    shapes, biases = linear_shapes(c), linear_biases(c)
    heads = c.num_kv_heads * c.head_dim
    for part, names in _LAYERS.get(c.family, _LLAMA_LAYER).items():
        if part not in shapes:
            yield _norm(c, f"{source}.{names[0]}", f"{into}.{part}")
            continue
        inputs, outputs = shapes[part]
        split = {1: [outputs], 2: [c.d_ff, c.d_ff], 3: [c.num_heads * c.head_dim, heads, heads]}[len(names)]
        for name, rows, at in zip(names, split, accumulate([0, *split]), strict=False):
            place: dict[str, Any] = {} if len(names) == 1 else {"at": at, "rows": rows}
            for kind, shape in (("weight", (rows, inputs)), ("bias", (rows,)))[: 1 + biases[part]]:
                yield Piece(source=f"{source}.{name}.{kind}", into=f"{into}.{part}.{kind}", shape=shape, **place)
    for name in ("q_norm", "k_norm") if c.qk_norm else ():
        place = {"source": f"{source}.self_attn.{name}.weight", "into": f"{into}.{name}", "offset": c.norm_offset}
        yield Piece(shape=(c.head_dim,), **place)


def _norm(c: DecoderConfig, source: str, into: str) -> Piece:
    return Piece(source=f"{source}.weight", into=f"{into}.weight", shape=(c.d_model,), offset=c.norm_offset)
