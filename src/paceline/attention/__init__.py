"""Attention over the paged cache: one contract (`base`), a reference (`reference`) and fast backends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..core.errors import ConfigError

if TYPE_CHECKING:
    from .base import AttentionBackend

BACKENDS = ("sdpa", "reference")


def make_backend(name: str, dtype: torch.dtype, exact: bool = False) -> AttentionBackend:
    """The backend called ``name``.

    Args:
        name: one of `BACKENDS`.
        dtype: of queries, keys and values.
        exact: every row's sum is taken over its own keys alone, in plain decoding's order.

    Raises:
        ConfigError: unknown name.
    """
    if name == "sdpa":
        from .sdpa import SdpaAttention

        return SdpaAttention(dtype, exact=exact)
    if name == "reference":
        from .reference import ReferenceAttention

        return ReferenceAttention()
    raise ConfigError(f"attention={name!r}", "there is no such attention backend", f"use one of {', '.join(BACKENDS)}")
