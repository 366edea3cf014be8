"""What the frozen target computes from the tokens of a batch: its distributions, or its likeliest tokens alone, and for
drafters that read states its last hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor, nn

from .data import TokenBatch
from .losses import TargetTop
from .network import Network

TOP = 32  # likeliest tokens of the target that are learned, all others as one outcome
_CHUNK_LOGITS = 2**23  # elements held at a time
EVALUATED_LOGITS = 2**24  # elements held at a time by evaluations: a head is read once for all rows of them


class Features(Protocol):
    """Describe where a recipe learns what the target emits."""

    def targets(self, batch: TokenBatch) -> TargetTop:
        """Return the target's likeliest tokens after those of ``batch`` that carry weight, row by row."""
        ...

    def states(self, batch: TokenBatch) -> Tensor:
        """Return [B, T, d_model] float32, the target's last states, before the final norm.

        Only `needed_states` are given.
        """
        ...


class OnlineFeatures:
    """Runs the frozen target on every batch, for its ``top`` likeliest tokens."""

    def __init__(self, target: Network, top: int = TOP) -> None:
        self.target, self.top = target, top
        self._last: tuple[TokenBatch, Tensor] | None = None  # one pass a batch serves both questions

    @torch.no_grad()
    def targets(self, batch: TokenBatch) -> TargetTop:
        """Override `Features.targets`."""
        hidden = self.target.final(self.states(batch)[batch.weights > 0])
        return likeliest(self.target, hidden, self.top)

    @torch.no_grad()
    def states(self, batch: TokenBatch) -> Tensor:
        """Override `Features.states`."""
        if self._last is None or self._last[0] is not batch:
            self._last = batch, last_states(self.target, batch)
        return self._last[1]


def last_states(target: Network, batch: TokenBatch) -> Tensor:
    """Return [B, T, d_model] after the last layer, before the final norm."""
    return target.run(target.embed(batch.tokens), 0, target.config.num_layers, batch)[0]


def needed_states(batch: TokenBatch) -> Tensor:
    """Return [B, T] bool: a token that carries weight, or has one after it in its document."""
    weighted = (batch.weights > 0).flip(1)
    documents = batch.documents.flip(1)
    count = weighted.long().cumsum(1)
    first = torch.ones_like(weighted)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]  # of a document, from the end
    before = torch.where(first, count - weighted.long(), 0).cummax(1).values
    return ((count > before) & (documents >= 0)).flip(1)


@torch.no_grad()
def likeliest(target: Network, hidden: Tensor, top: int) -> TargetTop:
    """Return the ``top`` likeliest tokens after each of ``hidden`` [rows, d_model], which went through the final norm.

    Log-probabilities are rounded to float16, as a cache keeps them.
    """
    parts = hidden.split(max(1, _CHUNK_LOGITS // target.head_weight.shape[0]))
    return joined([top_of(target.logits(part).float(), top) for part in parts])


def joined(parts: Sequence[TargetTop]) -> TargetTop:
    """Return all rows of one or more parts."""
    return TargetTop(torch.cat([part.ids for part in parts]), torch.cat([part.log_probs for part in parts]))


def top_of(logits: Tensor, top: int) -> TargetTop:
    """Return the ``top`` likeliest tokens of each row of logits [rows, V] float32, their log-probabilities and the
    others'.
    """
    values, places = logits.topk(top)
    values = values - logits.logsumexp(-1, keepdim=True)
    others = 1 - values.double().exp().sum(-1, keepdim=True)
    return TargetTop(places, torch.cat((values, others.clamp_min(1e-7).log().float()), -1).half().float())


def argmax(final: Tensor, head: Tensor) -> Tensor:
    """[rows] likeliest tokens."""
    step = max(1, EVALUATED_LOGITS // head.shape[0])
    return torch.cat([F.linear(part.to(head.dtype), head).argmax(-1) for part in final.split(step)])


def no_loss(module: nn.Module) -> Tensor:
    """Return the loss of a batch without anything to learn: a zero that every trained parameter is part of."""
    return sum((p.sum() * 0.0 for p in module.parameters() if p.requires_grad), start=torch.zeros(()))
