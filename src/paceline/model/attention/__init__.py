"""Attention over the paged cache: one contract (`base`), a reference (`reference`) and torch's kernel (`sdpa`)."""

from __future__ import annotations

import torch

from .base import AttentionBackend
from .reference import ReferenceAttention
from .sdpa import SdpaAttention


def make_backend(dtype: torch.dtype, exact: bool = False) -> AttentionBackend:
    """Return an attention backend: the reference for float64, else torch's kernel.

    Args:
        dtype: of queries, keys and values.
        exact: every row's sum is taken over its own keys alone, in plain decoding's order.
    """
    return ReferenceAttention() if dtype == torch.float64 else SdpaAttention(dtype, exact=exact)
