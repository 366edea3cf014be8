"""Widths of heads and feed-forward layers that the compiled layers pad: zeros, which add exactly 0 to every sum."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .families import DecoderConfig

STEP = 16  # of the compiled layers
SCALE_ROOM = 16  # bytes after a packed row


def cache_shape(config: DecoderConfig, compiled: bool) -> tuple[int, int, int]:
    """Return layers, K/V heads and a head's width of a network's cache; compiled layers keep heads padded."""
    width = padded(config.head_dim) if compiled else config.head_dim
    return config.num_layers, config.num_kv_heads, width


def packed_shape(shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return the shape of a cache whose rows are bytes and, after them, their scale.

    See kernels/cpp/kernels/attention/packed.h.
    """
    return shape[0], shape[1], shape[2] + SCALE_ROOM


def padded(width: int) -> int:
    """Return the next multiple of `STEP`."""
    return -(-width // STEP) * STEP


def groups_of(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """Return for each linear the group of inputs, and of outputs, that is padded together; 0: none."""
    head, ff = config.head_dim, config.d_ff
    return {"qkv": (0, head), "out": (head, 0), "up": (0, ff), "down": (ff, 0)}


def widened(x: Tensor, dim: int, group: int) -> Tensor:
    """Return ``x`` with zeros after every ``group`` of entries along a dimension: a multiple of `STEP`."""
    missing = padded(group) - group
    if not missing:
        return x
    apart = x.movedim(dim, -1).unflatten(-1, (-1, group))
    return F.pad(apart, (0, missing)).flatten(-2).movedim(-1, dim)
