"""Truncations of a distribution: top-k, top-p and min-p. Each masks logits in place, row by row.

Axis letters: n rows, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .errors import CapabilityError

_WEIGHT_BITS = 40  # a token's weight relative to the likeliest, as an integer
_ID_BITS = 22  # ids below 4 million; a key is weight and id together, 62 bits
_FEW = 256  # the nucleus is looked for among so many tokens first


def keep_top_k(logits: Tensor, k: int) -> None:
    """Mask all but the k largest of each row [n, V]; ties with the k-th stay."""
    kth = logits.topk(min(k, logits.shape[-1]), dim=-1).values[:, -1:]  # [n, 1]
    logits.masked_fill_(logits < kth, -math.inf)


def keep_top_p(logits: Tensor, top_p: float) -> None:
    """Mask all but the smallest set of likeliest tokens whose probability reaches top_p, in each row [n, V].

    Among equals the lower id comes first. Weights are summed as integers: such a sum does not depend on
    its order, so a row's cut is the same alone and in a batch, and on every device.

    Source: Holtzman et al. 2020, section 3.1 (nucleus sampling).
    """
    vocab_size = logits.shape[-1]
    if vocab_size > 1 << _ID_BITS:
        subject = f"top_p with a vocabulary of {vocab_size}"
        raise CapabilityError(subject, f"ids above {1 << _ID_BITS} do not fit the sort key", "use top_k or min_p")
    relative = (logits - logits.amax(dim=-1, keepdim=True)).double().exp_()
    weights = relative.mul_(2.0**_WEIGHT_BITS).round_().to(torch.int64)  # [n, V]
    limit = weights.sum(dim=-1, keepdim=True).double() * top_p  # [n, 1]
    ids_down = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    keys = (weights << _ID_BITS) + ids_down  # all different
    cut = _nucleus_cut(keys, limit)
    logits.masked_fill_(keys < cut, -math.inf)


def _nucleus_cut(keys: Tensor, limit: Tensor) -> Tensor:
    """Return [n, 1] int64: the smallest key [n, V] of each row's nucleus."""
    few = min(_FEW, keys.shape[-1])
    if keys.device.type == "cpu":  # elsewhere the test below would wait for the device
        top = keys.topk(few, dim=-1).values
        if bool(((top >> _ID_BITS).sum(dim=-1, keepdim=True) >= limit).all()):
            return _last_needed(top, limit)
    return _last_needed(keys.sort(dim=-1, descending=True).values, limit)


def _last_needed(ordered: Tensor, limit: Tensor) -> Tensor:
    """Return the last of the descending keys [n, K] before which the weights have not yet reached the limit."""
    weights = ordered >> _ID_BITS
    before = weights.cumsum(dim=-1) - weights
    count = (before < limit).sum(dim=-1, keepdim=True).clamp_(min=1)  # [n, 1]
    return ordered.gather(-1, count - 1)


def keep_min_p(logits: Tensor, min_p: float) -> None:
    """Mask tokens of each row [n, V] whose probability is below min_p times the largest (Nguyen et al. 2024)."""
    floor = logits.amax(dim=-1, keepdim=True) + math.log(min_p)
    logits.masked_fill_(logits < floor, -math.inf)
