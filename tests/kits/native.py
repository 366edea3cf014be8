"""Small decoders of odd shapes on the compiled layers, and texts whose K and V grow pass by pass."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from kits.tiny import _draw, tiny_config
from paceline import kernels
from paceline.kv.pool import KVPool, SequenceCache
from paceline.model.attention.reference import ReferenceAttention
from paceline.model.decoder import Decoder
from paceline.model.linear import QUANTS
from paceline.model.packing import RowPacker
from paceline.model.rope import RopeConfig
from paceline.model.rotations import scaled

MISSING = kernels.unavailable()
# Where there is a compiler, kernels that it refuses are a failure: the tests run, and fail.
_WANTED = os.environ.get(kernels.SWITCH) != "0" and shutil.which(os.environ.get("CXX", "c++")) is not None
needs_kernels = pytest.mark.skipif(MISSING is not None and not _WANTED, reason=f"no compiled kernels: {MISSING}")
LENGTH = 90  # tokens of a text whose bits are compared
KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.bfloat16, "q4_0": torch.bfloat16}

YARN = scaled(
    "yarn",
    {"factor": 4.0, "original_max_position_embeddings": 48, "attention_factor": 1.14},
    RopeConfig(dim=32, theta=100.0),
)
LINEAR = scaled("linear", {"factor": 4.0}, RopeConfig(dim=32))
BASE = {  # grouped queries, one sliding layer, no width a multiple of 32
    "vocab_size": 203,
    "d_model": 72,
    "d_ff": 112,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "windows": (None, 24),
    "eos_ids": (),
}
QWEN3 = {"qk_norm": True, "tied": True, "rope": YARN}
GEMMA3 = {  # norms behind both halves, and a rotation of its own in the layer that slides
    **{"qk_norm": True, "post_norms": True, "wide_norms": True, "tied": True, "activation": "gelu_tanh"},
    **{"query_scalar": 20.0, "embedding_scale": 72**0.5, "rope": LINEAR},
    "ropes": (LINEAR, RopeConfig(dim=32, theta=50.0)),
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": QWEN3,
    "gemma3": GEMMA3,
    "a layer that rotates nothing": {"ropes": (None, RopeConfig(dim=32, theta=100.0))},
    "heads of 16": {"head_dim": 16, "num_heads": 5, "num_kv_heads": 1},
    "heads of 48": {"head_dim": 48, "num_heads": 3, "num_kv_heads": 3},
    "heads of 64": {"head_dim": 64, "num_heads": 2, "num_kv_heads": 1, "vocab_size": 16},
    "heads of 80": {"head_dim": 80, "num_heads": 2, "num_kv_heads": 2, "d_ff": 688},
    "heads of 96": {"head_dim": 96, "num_heads": 3, "num_kv_heads": 1, "d_model": 33},
    "heads of 128": {"head_dim": 128, "num_heads": 2, "num_kv_heads": 1, "d_ff": 16},
    "heads of 256": {"head_dim": 256, "num_heads": 1, "num_kv_heads": 1, "vocab_size": 1},
    "every bias": {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
    "partial rotation": {"rope": RopeConfig(dim=20, theta=100.0)},
    "windows shorter than a tree": {"windows": (1, 4)},
    # Widths that are padded: heads, gate and up, each of its own.
    "heads of 8": {"head_dim": 8, "d_model": 64, "num_heads": 8, "num_kv_heads": 4, "d_ff": 172},
    "heads of 24 with norms and biases": {
        **QWEN3,
        "head_dim": 24,
        "d_ff": 43,
        "rope": RopeConfig(dim=24, theta=100.0),
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True),
    },
    "heads of 20, turned in part": {"head_dim": 20, "d_ff": 5, "rope": RopeConfig(dim=6, theta=100.0)},
}


def make(
    changes: dict[str, Any] | None = None,
    kind: str = "float32",
    *,
    compiled: bool = True,
    change: Callable[[Decoder], None] | None = None,
) -> Decoder:
    """A finished decoder of `BASE` with random weights, which are the same whatever runs them.

    Args:
        changes: of the shape.
        change: called with the decoder while its weights are plain.
    """
    values = BASE | (changes or {})
    values.setdefault("rope", RopeConfig(dim=values["head_dim"], theta=100.0))
    config, dtype = tiny_config(**values), KINDS[kind]
    quant = kind if kind in QUANTS else None
    decoder = Decoder(config, ReferenceAttention(), dtype=dtype, quant=quant, native=compiled)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(5)
    for name, parameter in decoder.named_parameters():
        parameter.data.copy_(_draw(name, parameter.shape, generator))
    if change is not None:
        change(decoder)
    return decoder.finish()


@cache
def decoder_of(name: str, kind: str) -> Decoder:
    """One of `SHAPES` (or `BASE`), compiled, made once."""
    return make(SHAPES.get(name), kind)


def tokens_of(decoder: Decoder, count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, decoder.config.vocab_size, (count,), generator=generator).tolist()


class Text:
    """One text whose K and V grow pass by pass. Slots that nothing was written to hold NaN."""

    def __init__(self, decoder: Decoder, tokens: Sequence[int], *, scattered: bool = False, pool: Any = None) -> None:
        c = decoder.config
        self.decoder, self.tokens = decoder, list(tokens)
        self.pool = pool or blank_pool(decoder)
        self.cache: SequenceCache = self.pool.open()
        if scattered:  # taken while only every second block is free
            others = [self.pool.open() for _ in range(self.pool.allocator.num_free)]
            for other in others:
                other.reserve(1)
            for other in others:
                if other.blocks[0] % 2:
                    other.release()
            self.cache.reserve(LENGTH + 32)
            self.cache.rollback()
            for other in list(self.pool.sequences):
                if other in others:
                    other.release()
            assert not isinstance(self.cache.slots(0, LENGTH), slice)
        assert c.max_position >= len(self.tokens)

    def pack(self, packer: RowPacker, rows: int) -> None:
        """The next ``rows`` tokens as a chain."""
        first = self.cache.committed
        self.cache.reserve(rows)
        stop = first + rows
        packer.add(
            self.tokens[first:stop],
            range(first, stop),
            slots=self.cache.slots(first, stop),
            keys=self.cache.slots(0, stop),
            num_keys=stop,
            prefix=first,
        )

    def advance(self, rows: int) -> Tensor:
        """[rows, V] logits of the next tokens, in a pass of their own."""
        packer = RowPacker(self.decoder, self.decoder.device)
        self.pack(packer, rows)
        logits = forward(self.decoder, packer, self.pool)
        self.pool.commit([(self.cache, range(rows))])
        return logits

    def rewind(self, length: int) -> None:
        """Forget all K and V after the first ``length`` tokens."""
        self.cache.committed = self.cache.front = length

    def in_passes_of(self, width: int) -> Tensor:
        """[tokens left, V] logits of all that is left."""
        parts = []
        while self.cache.committed < len(self.tokens):
            parts.append(self.advance(min(width, len(self.tokens) - self.cache.committed)))
        return torch.cat(parts)


def blank_pool(decoder: Decoder) -> KVPool:
    pool = KVPool(*decoder.cache_shape, 512, decoder.dtype, decoder.device)
    if decoder.stack is not None:
        for part in (*pool.k, *pool.v):
            part.fill_(torch.nan)
    return pool


@torch.inference_mode()
def forward(decoder: Decoder, packer: RowPacker, pool: KVPool) -> Tensor:
    return decoder.logits(decoder.run_layers(decoder.embed(packer.batch()), 0, decoder.num_layers, pool))


@torch.inference_mode()
def read_in_passes(decoder: Decoder, ends: Sequence[int]) -> list[Tensor]:
    """Logits of a prompt of eleven tokens, in passes that end at these, and the likeliest tokens by ranks alike."""
    pool, ids, found = KVPool(*decoder.cache_shape, 64, decoder.dtype, decoder.device), [*range(7, 40, 3)], []
    for first, last in pairwise([0, *ends]):
        packer, places = RowPacker(decoder, decoder.device), (slice(first, last), slice(0, last))
        packer.add(ids[first:last], range(first, last), *places, num_keys=last, prefix=first)
        state = decoder.run_layers(decoder.embed(packer.batch()), 0, decoder.num_layers, pool)
        found.append(decoder.read(state.hidden))
        assert torch.equal(decoder.best(state.hidden), found[-1].max(-1).indices)
    return found


def whole(decoder: Decoder, tokens: Sequence[int], width: int = 10**6) -> Tensor:
    """[tokens, V] logits of a text, ``width`` tokens a pass."""
    return Text(decoder, tokens).in_passes_of(width)


def error(logits: Tensor, oracle: Tensor) -> float:
    """Root mean square of the difference, as a share of the oracle's spread."""
    return float((logits - oracle).pow(2).mean().sqrt() / oracle.std())
