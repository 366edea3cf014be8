"""Token-info as the formula has it: the reference of `TokenInfo.factors` times `TokenInfo.table`."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.papers.lyanna.token_info import EPS, TokenInfo


def eager(info: TokenInfo, embedded: Tensor, tokens: Tensor | None = None) -> Tensor:
    """[..., V] the biases, whole rows normed; arguments as of `TokenInfo.factors`."""
    row = embedded @ info.down @ info.up  # [..., columns]
    row = row * (row.square().mean(-1, keepdim=True) + EPS).rsqrt() * info.gain
    if info.hot is None:
        return row
    assert tokens is not None
    kept = row[..., info.hot] if row.shape[-1] == info.vocab else row
    whole = row.new_zeros(*row.shape[:-1], info.vocab).index_copy(-1, info.hot, kept)
    return whole * torch.isin(tokens, info.hot)[..., None]
