"""What the frozen target says after the tokens of a batch: its whole distribution, or its likeliest tokens alone."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .data import TokenBatch
from .losses import SoftTarget, TargetHidden, TargetTop
from .network import Network

_CHUNK_LOGITS = 2**23  # elements held at a time


class Features(Protocol):
    """Where a recipe learns what the target says."""

    def said(self, batch: TokenBatch) -> SoftTarget:
        """The target's distributions after the tokens of ``batch`` that carry weight, row by row."""
        ...


class OnlineFeatures:
    """Runs the frozen target on every batch.

    Args:
        target: the network.
        top: likeliest tokens that are looked at; 0: the whole distribution.
    """

    def __init__(self, target: Network, top: int = 0) -> None:
        self.target, self.top = target, top

    @torch.no_grad()
    def said(self, batch: TokenBatch) -> SoftTarget:
        """As `Features.said`."""
        hidden = self.target(batch)[batch.weights > 0]
        return likeliest(self.target, hidden, self.top) if self.top else TargetHidden(hidden, self.target.head_weight)


@torch.no_grad()
def likeliest(target: Network, hidden: Tensor, top: int) -> TargetTop:
    """The ``top`` likeliest tokens after each of ``hidden`` [rows, d_model], which went through the final norm.

    Log-probabilities are rounded to float16, as a cache keeps them.
    """
    ids, log_probs = [hidden.new_zeros(0, top, dtype=torch.int64)], [hidden.new_zeros(0, top + 1, dtype=torch.float32)]
    for part in hidden.split(max(1, _CHUNK_LOGITS // target.head_weight.shape[0])):
        found, places = target.logits(part).float().log_softmax(-1).topk(top)
        others = 1 - found.double().exp().sum(-1, keepdim=True)
        ids.append(places)
        log_probs.append(torch.cat((found, others.clamp_min(1e-7).log().float()), -1).half().float())
    return TargetTop(torch.cat(ids), torch.cat(log_probs))
