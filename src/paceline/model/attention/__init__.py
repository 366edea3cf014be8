"""Attention over the paged cache: one contract (`base`), a reference (`reference`) and fast backends."""

from __future__ import annotations

import torch

from ...core.errors import ConfigError
from .base import AttentionBackend
from .reference import ReferenceAttention
from .sdpa import SdpaAttention

BACKENDS = ("sdpa", "reference")


def make_backend(name: str, dtype: torch.dtype, exact: bool = False) -> AttentionBackend:
    """Return the backend called ``name``, one of `BACKENDS`, for queries, keys and values of ``dtype``; ``exact``:
    every row's sum is taken over its own keys alone, in plain decoding's order.

    Raises:
        ConfigError: unknown name.
    """
    if name == "sdpa":
        return SdpaAttention(dtype, exact=exact)
    if name == "reference":
        return ReferenceAttention()
    raise ConfigError(f"attention={name!r}", "there is no such attention backend", f"use one of {', '.join(BACKENDS)}")
