"""Losses of which the target's k likeliest tokens are known: k + 1 outcomes, the last of them all other tokens.

A loss between p and q over the outcomes is known in closed form with its slope by each of them (`losses`). The slope by
the logit of one of the others is that of their outcome, shared out as q is: log sum_y e^l_y has the slope q_x / q_rest
by l_x.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from .chunked import RowLoss, Rows, TargetTop

# (log p, log q, whether a slope is wanted) -> losses [chunk], and their slope by the logits of q
SoftRows: TypeAlias = "Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]"


@dataclass(frozen=True, slots=True)
class Outcomes:
    """q of some rows by outcome."""

    ids: Tensor  # [chunk, k]
    q: Tensor  # [chunk, V], 0 at ``ids``
    log_sum: Tensor  # [chunk, 1] log sum e^l
    shares: Tensor  # [chunk, k + 1] q of each outcome
    log_shares: Tensor  # [chunk, k + 1]

    @staticmethod
    def of(logits: Tensor, ids: Tensor) -> Outcomes:
        """Those of ``logits`` [chunk, V]."""
        q = logits.softmax(-1)
        log_sum = logits.amax(-1, keepdim=True) - q.amax(-1, keepdim=True).log()  # cheaper than logsumexp
        held = q.gather(1, ids)
        rest = q.scatter_(1, ids, 0.0).sum(-1, keepdim=True)  # not 1 - sum: it may be very small
        rest = rest.clamp_min_(torch.finfo(q.dtype).tiny)
        log_shares = torch.cat((logits.gather(1, ids) - log_sum, rest.log()), -1)
        return Outcomes(ids, q, log_sum, torch.cat((held, rest), -1), log_shares)

    def spread(self, slope: Tensor) -> Tensor:
        """[chunk, V] the slope by logits from that by outcomes [chunk, k + 1]. Takes ``q``."""
        by_rest = slope[:, -1:] / self.shares[:, -1:]
        return self.q.mul_(by_rest).scatter_(1, self.ids, slope[:, :-1])


def outcome_rows(target: TargetTop, closed: SoftRows, dtype: torch.dtype) -> RowLoss:
    """A loss between p and q over the outcomes.

    Args:
        target: the likeliest tokens and their p.
        closed: the loss of any distributions, in closed form.
        dtype: of the logits.
    """

    def rows_loss(logits: Tensor, rows: Rows, derive: bool) -> tuple[Tensor, Tensor | None]:
        ids, log_p = target.of(rows, dtype)
        outcomes = Outcomes.of(logits, ids)
        loss, slope = closed(log_p, outcomes.log_shares, derive)
        return loss, None if slope is None else outcomes.spread(slope)

    return rows_loss


def text_rows(
    target: TargetTop, closed: SoftRows, dtype: torch.dtype, tokens: Tensor, share: float, parts: list[Tensor]
) -> RowLoss:
    """``w (D + [y is one of the others] (-log q(y | others))) + (1 - w) (-log q(y))`` in one pass over the logits.

    Args:
        target, closed, dtype: as `outcome_rows`; D.
        tokens: [rows] y.
        share: w.
        parts: is given D and -log q(y) [2, chunk] of every chunk.
    """

    def rows_loss(logits: Tensor, rows: Rows, derive: bool) -> tuple[Tensor, Tensor | None]:
        wanted = tokens[rows][:, None]
        said = logits.gather(1, wanted)
        ids, log_p = target.of(rows, dtype)
        outcomes = Outcomes.of(logits, ids)
        entropy, log_rest = outcomes.log_sum - said, outcomes.log_shares[:, -1:].clone()  # [chunk, 1]
        other = share * (ids != wanted).all(-1, keepdim=True).to(dtype)  # w where y is one of the others
        loss, slope = closed(log_p, outcomes.log_shares, derive)
        parts.append(torch.stack((loss, entropy[:, 0])))
        loss = share * loss + ((1 - share) * entropy + other * (entropy + log_rest))[:, 0]
        if slope is None:
            return loss, None
        slope = slope.mul_(share).add_(outcomes.shares, alpha=1 - share)
        slope[:, -1:] += other
        return loss, outcomes.spread(slope).scatter_add_(1, wanted, share - 1 - other)

    return rows_loss
