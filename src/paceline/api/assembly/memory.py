"""The target's K/V pool: the shape of its rows, and for how many tokens there is memory."""

from __future__ import annotations

import torch

from ...core.errors import CapabilityError, ConfigError
from ...kv.pool import KVPool
from ...model.families import DecoderConfig
from ...model.padding import cache_shape, packed_shape
from ...weights.files import free_bytes
from ...weights.source import parse_device
from ..config import LLMConfig, parse_bytes
from .models import LoadedModel, compiled_layers, stage_devices

DEFAULT_KV_BYTES = 512 * 2**20


def kv_layout(config: LLMConfig, shape: DecoderConfig, dtype: torch.dtype) -> tuple[tuple[int, int, int], torch.dtype]:
    """Return layers, K/V heads and width of a row of the target's K/V, and the type of its numbers.

    Raises:
        CapabilityError: K/V in int8 under layers that torch runs.
    """
    compiled = compiled_layers(config, shape, dtype)
    layout = cache_shape(shape, compiled)
    if config.kv_cache_dtype == "auto":
        return layout, dtype
    if not compiled:
        wrong = "torch's layers read keys and values as the activations are"
        raise CapabilityError(
            "kv_cache_dtype='int8'", wrong, "leave it out, or use the compiled layers (kernels='native')"
        )
    return packed_shape(layout), torch.int8


def model_length(config: LLMConfig, shape: DecoderConfig) -> int:
    """Return the most tokens of prompt and output."""
    context = shape.max_position
    length = config.max_model_len or context
    if length > context:
        note = f" ({shape.max_position_note})" if shape.max_position_note else ""
        raise ConfigError(
            f"max_model_len={length}", f"{config.model} has {context} positions{note}", f"give {context} or less"
        )
    return length


def pool_tokens(
    config: LLMConfig, layout: tuple[int, int, int], dtype: torch.dtype, max_model_len: int, scratch: int = 0
) -> int:
    """Return the tokens that a K/V pool of this shape will hold; check that there is memory for them."""
    per_token = KVPool.bytes_per_token(*layout, dtype)
    # One sequence alone must always fit, with its last token's row.
    least = max_model_len + 1
    if config.kv_memory is None:
        most = (max_model_len + 1) * config.max_sequences
        tokens = max(least, min(most, DEFAULT_KV_BYTES // per_token))
    else:
        tokens = parse_bytes(config.kv_memory) // per_token
        if tokens < least:
            raise ConfigError(
                f"kv_memory={config.kv_memory}",
                f"it holds {tokens} tokens of {per_token} bytes, and one request may have {max_model_len}",
                f"give {least * per_token} bytes or more, or a smaller max_model_len",
            )
    needed_bytes, free = (tokens + scratch) * per_token, free_bytes(parse_device(stage_devices(config)[-1]))
    if free is not None and needed_bytes > free:
        raise _too_little_memory(config, max_model_len, per_token, needed_bytes, f"{free / 2**30:.1f} GiB are free")
    return tokens


def make_pool(config: LLMConfig, target: LoadedModel, max_model_len: int, scratch: int) -> KVPool:
    """Make the target's K/V pool, with ``scratch`` slots, for as many tokens as memory for all layers holds.

    Raises:
        ConfigError: too little memory.
    """
    decoder = target.decoder
    dims, kind = kv_layout(config, decoder.local, decoder.dtype)
    whole, _ = kv_layout(config, decoder.config, decoder.dtype)
    all_layers = target.source.shape.num_layers, *whole[1:]
    tokens = pool_tokens(config, all_layers, kind, max_model_len, scratch)
    try:
        pool = KVPool(*dims, tokens, kind, decoder.device, scratch_slots=scratch)
        if decoder.ranks is not None and decoder.ranks.line is not None:
            decoder.ranks.line.follow(pool)
        return pool
    except (MemoryError, RuntimeError) as error:  # torch's allocators raise RuntimeError, or its OutOfMemoryError
        per_token = KVPool.bytes_per_token(*dims, kind)
        needed = (tokens + scratch) * per_token
        raise _too_little_memory(config, max_model_len, per_token, needed, "there is not so much to give") from error


def _too_little_memory(config: LLMConfig, max_model_len: int, per_token: int, needed: int, why: str) -> ConfigError:
    what = f"kv_memory={config.kv_memory}" if config.kv_memory is not None else "the default kv_memory"
    return ConfigError(
        f"{what} on {config.device}",
        f"K/V of {needed // per_token:,} tokens takes {needed / 2**30:.1f} GiB, and {why}",
        f"give max_model_len (now {max_model_len:,}; one request of 4,096 tokens takes "
        f"{4096 * per_token / 2**30:.2f} GiB) or a smaller kv_memory",
    )
