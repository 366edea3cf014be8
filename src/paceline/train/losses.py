"""Training losses, each as a formula over rows.

Notation: ``hidden`` [rows, d] after the final norm, ``head`` [V, d], logits l = head hidden, q = softmax(l) is the
model in training (the draft), p = softmax(L) the target. Every loss is a weighted mean over rows,
``sum_i w_i loss_i / sum_i w_i``; a row of weight 0 costs nothing and may have any content.

The logits of all rows are never held: `chunked` applies a formula to some rows at a time and differentiates it there.
To measure rather than train, call the losses outside of autocast, which rounds products. Limits of options are
checked where a recipe reads them, and the trainer stops at a loss that is not finite.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor
from torch.autograd.function import once_differentiable

from .chunked import RowLoss, SoftTarget, TargetHidden, TargetTop, chunked_loss, wide

__all__ = ["SoftTarget", "TargetHidden", "TargetTop", "cross_entropy", "distilled", "mixed"]

Compared: TypeAlias = "tuple[Tensor, Tensor, Tensor]"
NONE = -1e9  # a logit without a chance, whose product with a chance of 0 is 0


# -- cross-entropy with tokens


def cross_entropy(
    hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor | None = None, **options: Any
) -> Tensor:
    """Return cross-entropy with the tokens that follow: ``-log q(y)``, weighted mean over rows.

    Args:
        hidden: [rows, d] after the final norm.
        head: [V, d].
        targets: [rows] int64 tokens; rows of weight 0 may hold anything.
        weights: [rows] at least 0, or a mask; None: 1 each.
        options: ``denominator``, ``chunk_rows`` and ``frozen`` of `chunked_loss`.

    Returns:
        A scalar, float32 or wider; 0 where no row has a weight.
    """
    return chunked_loss(hidden, head, _text(targets), weights, **options)[0]


def _text(targets: Tensor) -> RowLoss:
    """-log q(y): of two outcomes, the token and all others."""

    def of_rows(logits: Tensor, rows: Tensor) -> tuple[Tensor]:
        tokens = targets[rows]
        outcomes, log_true = _Outcomes.apply(logits, tokens[:, None], tokens)
        return (outcomes.logsumexp(-1) - log_true,)

    return of_rows


# -- losses between the target's distribution and the draft's


def _comparison(target: SoftTarget, dtype: torch.dtype) -> Callable[[Tensor, Tensor, Tensor | None], Compared]:
    """Return a function of logits in ``dtype``, their rows, and the text's tokens there, if they matter.

    It gives log p and log q: [chunk, V] of a `TargetHidden`, [chunk, k + 1] of a `TargetTop`; and [chunk] log q(y).
    """
    if isinstance(target, TargetTop):
        return partial(_of_outcomes, target)
    return partial(_of_tokens, target.reader(dtype))


def _of_tokens(read: Callable[[Tensor], Tensor], logits: Tensor, rows: Tensor, tokens: Tensor | None) -> Compared:
    log_q = F.log_softmax(logits, dim=-1)
    log_true = log_q[:, 0] if tokens is None else log_q.gather(1, tokens[:, None])[:, 0]
    return F.log_softmax(read(rows), dim=-1), log_q, log_true


def _of_outcomes(target: TargetTop, logits: Tensor, rows: Tensor, tokens: Tensor | None) -> Compared:
    ids, log_p = target.of(rows, logits.dtype)
    outcomes, log_true = _Outcomes.apply(logits, ids, ids[:, 0] if tokens is None else tokens)
    outcomes = outcomes.masked_fill(log_p == -torch.inf, NONE)  # outside of the draft's vocabulary
    return log_p, outcomes.log_softmax(-1), log_true - outcomes.logsumexp(-1)


class _Outcomes(torch.autograd.Function):
    """(logits [rows, V], ids [rows, k], tokens [rows]) -> logits [rows, k + 1] of ``ids`` and of all others as one,
    log sum e^l; and the logits [rows] of ``tokens``.

    By hand, because autograd takes 1.3 times as long here. The slope by the logit of one of the others is that of their
    outcome times q_x / q_others.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        q = logits.softmax(-1)
        log_sum = logits.amax(-1, keepdim=True) - q.amax(-1, keepdim=True).log()  # cheaper than logsumexp
        rest = q.scatter_(1, ids, 0.0).sum(-1, keepdim=True)  # not 1 - sum: it may be very small
        rest = rest.clamp_min_(torch.finfo(q.dtype).tiny)
        ctx.ids, ctx.tokens, ctx.q, ctx.rest = ids, tokens[:, None], q, rest
        return torch.cat((logits.gather(1, ids), log_sum + rest.log()), -1), logits.gather(1, tokens[:, None])[:, 0]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, by_outcome: Tensor, by_token: Tensor) -> tuple[Tensor, None, None]:
        slope = ctx.q.mul_(by_outcome[:, -1:] / ctx.rest).scatter_(1, ctx.ids, by_outcome[:, :-1])
        return slope.scatter_add_(1, ctx.tokens, by_token[:, None]), None, None


def mixed(
    hidden: Tensor,
    head: Tensor,
    target: SoftTarget,
    weights: Tensor | None = None,
    *,
    omega: float = 0.5,
    **options: Any,
) -> Tensor:
    """Return MixedLoss: ``omega (-sum_x p log q) + (1 - omega) (-alpha)``, alpha = sum_x min(p, q).

    The first term distils, alpha is the expected acceptance probability (Leviathan et al. 2023). Source: SPIRe, section
    3.4. With ``omega=0`` it is the total-variation loss less 1. Where p = q, half of alpha's slope counts, as of any
    minimum.

    Args:
        target: `TargetHidden`, or `TargetTop`, of which the loss is taken over its tokens and all others as one
            outcome; no gradient flows into it.
        omega: weight of distillation, 0 to 1.
        hidden, head, weights, options: as `cross_entropy`.
    """
    compare = _comparison(target, wide(hidden, head))

    def of_rows(logits: Tensor, rows: Tensor) -> tuple[Tensor]:
        log_p, log_q, _ = compare(logits, rows, None)
        p = log_p.exp()
        loss = -omega * torch.linalg.vecdot(p, log_q)
        return (loss if omega == 1 else loss - (1 - omega) * torch.minimum(p, log_q.exp()).sum(-1),)

    return chunked_loss(hidden, head, of_rows, weights, **options)[0]


# -- the target and the text


def distilled(
    hidden: Tensor,
    head: Tensor,
    target: SoftTarget | None,
    tokens: Tensor,
    weights: Tensor | None = None,
    *,
    share: float = 0.5,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return distillation next to the text: ``w KL(p || q) + (1 - w) (-log q(y))`` in one walk, with the head applied
    once.

    Source: Hinton et al. 2015, section 2.

    Of a `TargetTop` the text stands in for what is not known of p: where y is none of its tokens, -log q(y | others) is
    added to KL. With text that the target drew itself the mean of its slope is the whole KL's, by the chain rule
    KL(p || q) = KL of the outcomes + p_rest KL(p(. | others) || q(. | others)).

    Args:
        hidden, head, weights, options: as `cross_entropy`.
        target: p, as in `mixed`; None: the text alone, with ``share=0``.
        tokens: [rows] int64, y; rows of weight 0 may hold anything.
        share: w, 0 to 1.

    Returns:
        The loss; and [2, rows] its parts KL and -log q(y) without gradient, 0 for rows without weight.
    """
    if target is None:
        loss, each = chunked_loss(hidden, head, _text(tokens), weights, **options)
        return loss, torch.cat((torch.zeros_like(each), each))
    compare = _comparison(target, wide(hidden, head))

    def of_rows(logits: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        log_p, log_q, log_true = compare(logits, rows, tokens[rows])
        p = log_p.exp()  # the entropy of p has no slope, so that one product has; 0 log 0 = 0
        distance, entropy = torch.linalg.vecdot(p, log_p.clamp_min(NONE)) - torch.linalg.vecdot(p, log_q), -log_true
        taught = distance
        if isinstance(target, TargetTop):
            other = (target.ids[rows] != tokens[rows][:, None]).all(-1)
            taught = distance + torch.where(other, log_q[:, -1] - log_true, 0.0)
        return share * taught + (1 - share) * entropy, distance, entropy

    loss, each = chunked_loss(hidden, head, of_rows, weights, **options)
    return loss, each[1:]
