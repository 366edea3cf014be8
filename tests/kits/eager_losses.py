"""The losses of training as dense formulas over all rows, differentiated by autograd: what the chunked ones equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor

from paceline.train.chunked import SoftTarget, TargetTop, wide


@dataclass(frozen=True)
class TargetLogits:
    """A soft target given as logits, which training has no use for: it stands where `TargetHidden` does."""

    logits: Tensor  # [rows, V]

    def reader(self, dtype: torch.dtype) -> Callable[[Any], Tensor]:
        """As that of `TargetHidden`."""
        return lambda rows: self.logits.detach()[rows].to(dtype)


def eager_cross_entropy(hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """``-log q(y)``. Reference of `cross_entropy`."""
    log_q = F.log_softmax(_dense(hidden, head), dim=-1)  # [rows, V]
    valid = targets.clamp(0, log_q.shape[1] - 1)  # a row of weight 0 may hold anything
    return _mean(-log_q.gather(1, valid[:, None])[:, 0], weights)


def eager_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """``sum_x p (log p - log q)``."""
    return F.kl_div(log_q, log_p.exp(), reduction="none").sum(-1)


def eager_formula(log_p: Tensor, log_q: Tensor, omega: float = 0.5) -> Tensor:
    """``omega (-sum_x p log q) - (1 - omega) sum_x min(p, q)``."""
    alpha = torch.minimum(log_p.exp(), log_q.exp()).sum(-1)
    return -omega * (log_p.exp() * log_q).sum(-1) - (1 - omega) * alpha


def eager_soft(
    formula: Callable[..., Tensor],
    hidden: Tensor,
    head: Tensor,
    target: SoftTarget | TargetLogits,
    weights: Tensor | None = None,
    **factors: float,
) -> Tensor:
    """The mean of a formula of log p and log q."""
    logits = _dense(hidden, head)
    if isinstance(target, TargetTop):
        log_p = target.log_probs.detach().to(logits.dtype).log_softmax(-1)
        log_q = _folded(F.log_softmax(logits, dim=-1), target.ids)
        return _mean(formula(log_p, log_q, **factors), weights)
    wanted = target.logits if isinstance(target, TargetLogits) else _dense(target.hidden, target.head)
    log_p = F.log_softmax(wanted.detach().to(logits.dtype), dim=-1)
    return _mean(formula(log_p, F.log_softmax(logits, dim=-1), **factors), weights)


eager_mixed = partial(eager_soft, eager_formula)  # reference of `mixed`


def _folded(log_q: Tensor, ids: Tensor) -> Tensor:
    """[rows, k + 1] of log q [rows, V]: of the tokens ``ids`` [rows, k], and of all others together."""
    others = log_q.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat((log_q.gather(1, ids), others), -1)


def _among_others(log_q: Tensor, ids: Tensor, tokens: Tensor) -> Tensor:
    """[rows] -log q(y | others) where y is none of ``ids`` [rows, k], else 0."""
    wanted = tokens.clamp(0, log_q.shape[1] - 1)[:, None]
    lost = _folded(log_q, ids)[:, -1] - log_q.gather(1, wanted)[:, 0]
    return torch.where((ids != wanted).all(-1), lost, 0.0)


def eager_distilled(
    hidden: Tensor,
    head: Tensor,
    target: SoftTarget | None,
    tokens: Tensor,
    weights: Tensor | None = None,
    share: float = 0.5,
) -> Tensor:
    """``w KL(p || q) + (1 - w) (-log q(y))``. Reference of `distilled`."""
    if target is None:
        return eager_cross_entropy(hidden, head, tokens, weights)
    soft = eager_soft(eager_kl, hidden, head, target, weights)
    if isinstance(target, TargetTop):
        soft = soft + _mean(_among_others(F.log_softmax(_dense(hidden, head), dim=-1), target.ids, tokens), weights)
    return share * soft + (1 - share) * eager_cross_entropy(hidden, head, tokens, weights)


def eager_mse_cross_entropy(
    state: Tensor,
    target_state: Tensor,
    hidden: Tensor,
    head: Tensor,
    target: SoftTarget,
    weights: Tensor | None = None,
    alpha: float = 1.0,
) -> Tensor:
    """``alpha mean_d (h - H)^2 + (-sum_x p log q)``. Reference of a step of `HeadRecipe`."""
    squared = _mean(((state - target_state) ** 2).mean(-1), weights)
    return alpha * squared + eager_mixed(hidden, head, target, weights, omega=1.0)


def _dense(hidden: Tensor, head: Tensor) -> Tensor:
    """[rows, V] logits of all rows at once."""
    dtype = wide(hidden, head)
    return hidden.to(dtype) @ head.to(dtype).t()


def _mean(losses: Tensor, weights: Tensor | None) -> Tensor:
    """Weighted mean over rows; 0 where no row has a weight."""
    if weights is None:
        return losses.sum() / max(len(losses), 1)
    weights = weights.to(losses.dtype)
    total = weights.sum()
    summed = torch.where(weights > 0, losses * weights, 0.0).sum()
    return summed / torch.where(total > 0, total, 1.0)
