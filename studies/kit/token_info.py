"""Token-info as the formula has it: the reference of `TokenInfo.factors` times `TokenInfo.table`."""

from __future__ import annotations

from torch import Tensor

from paceline.papers.lyanna.token_info import EPS, TokenInfo


def eager(info: TokenInfo, embedded: Tensor) -> Tensor:
    """Return [..., V], the biases, whole rows normed; arguments as of `TokenInfo.factors`."""
    row = embedded @ info.down @ info.up  # [..., V]
    return row * (row.square().mean(-1, keepdim=True) + EPS).rsqrt() * info.gain
