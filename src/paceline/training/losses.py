"""Training losses, each as a formula over rows.

Notation: ``hidden`` [rows, d] after the final norm, ``head`` [V, d], logits l = head hidden, q = softmax(l / T) is
the model in training (the draft), p = softmax(L / T) the target. Every loss is a weighted mean over rows,
``sum_i w_i loss_i / sum_i w_i``; a row of weight 0 costs nothing and may have any content.

The logits of all rows are never held: `chunked` applies a formula to some rows at a time and differentiates it there.
To measure rather than train, call the losses outside of autocast, which rounds products. What options may hold is
checked where a recipe reads them, and the trainer stops at a loss that is not finite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor
from torch.autograd.function import once_differentiable

from .chunked import (
    RowLoss,
    RowOptions,
    Rows,
    SoftTarget,
    TargetHidden,
    TargetTop,
    Walk,
    chunked_loss,
    inverse,
    wide,
)

__all__ = [
    "TargetHidden",
    "TargetTop",
    "cross_entropy",
    "distilled",
    "kl",
    "mixed",
    "mse_cross_entropy",
    "ngram",
    "reverse_kl",
]


NONE = -1e9  # a logit without a chance, whose product with a chance of 0 is 0


# -- cross-entropy with tokens


def cross_entropy(
    hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor | None = None, **options: Unpack[RowOptions]
) -> Tensor:
    """Cross-entropy with the tokens that follow: ``-log q(y)``, weighted mean over rows.

    Args:
        hidden: [rows, d] after the final norm.
        head: [V, d].
        targets: [rows] int64 tokens; rows of weight 0 may hold anything.
        weights: [rows] at least 0, or a mask; None: 1 each.
        options: see `RowOptions`.

    Returns:
        A scalar, float32 or wider; 0 where no row has a weight.
    """
    return chunked_loss(hidden, head, _token_losses(targets), Walk.of(hidden, head, weights, **options))[0]


def _token_losses(targets: Tensor) -> RowLoss:
    return lambda logits, rows: F.cross_entropy(logits, targets[rows], reduction="none")


# -- losses between the target's distribution and the draft's


class SoftLoss:
    """A loss between p and q: T^2 times a divergence, so that gradients keep their size as T changes.

    (Hinton et al. 2015, section 2.)

    Args:
        formula: (log p, log q, T^2, and factors of its own by name) -> losses [rows].
    """

    def __init__(self, formula: Callable[..., Tensor]) -> None:
        self.formula = formula
        self.__doc__ = formula.__doc__

    def __call__(
        self,
        hidden: Tensor,
        head: Tensor,
        target: SoftTarget,
        weights: Tensor | None = None,
        *,
        temperature: float = 1.0,
        denominator: Tensor | float | None = None,
        chunk_rows: int | None = None,
        frozen: int = 0,
        **factors: float,
    ) -> Tensor:
        """The weighted mean over rows.

        Args:
            target: `TargetHidden`, or `TargetTop`, of which the loss is taken over its tokens and all others as one
                outcome; no gradient flows into it.
            temperature: T above 0, of both distributions; of a `TargetTop` 1.
            hidden, head, weights: as `cross_entropy`.
            denominator, chunk_rows, frozen: see `RowOptions`.
            factors: those of the formula.
        """
        walk = Walk.of(hidden, head, weights, denominator=denominator, chunk_rows=chunk_rows, frozen=frozen)
        return chunked_loss(hidden, head, self.row_loss(target, wide(hidden, head), temperature, **factors), walk)[0]

    def row_loss(self, target: SoftTarget, dtype: torch.dtype, temperature: float = 1.0, **factors: float) -> RowLoss:
        """The loss of some rows by their logits in ``dtype``; arguments as `__call__`."""
        if isinstance(target, TargetTop):

            def of_outcomes(logits: Tensor, rows: Rows) -> Tensor:
                ids, log_p = target.of(rows, dtype)
                outcomes, _ = _Outcomes.apply(logits, ids, ids[:, 0])
                outcomes = outcomes.masked_fill(log_p == -torch.inf, NONE)  # outside of the draft's vocabulary
                return self.formula(log_p, outcomes.log_softmax(-1), 1.0, **factors)

            return of_outcomes
        read = target.reader(dtype)

        def of_tokens(logits: Tensor, rows: Rows) -> Tensor:
            log_p = F.log_softmax(read(rows) / temperature, dim=-1)
            return self.formula(log_p, F.log_softmax(logits / temperature, dim=-1), temperature**2, **factors)

        return of_tokens


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


def _kl(log_p: Tensor, log_q: Tensor, scale: float) -> Tensor:
    """Forward KL, distillation: ``T^2 KL(p || q) = T^2 sum_x p (log p - log q)`` (Hinton et al. 2015, section 2)."""
    p = log_p.exp()
    return scale * (p * (log_p.masked_fill(p == 0, 0.0) - log_q)).sum(-1)  # 0 log 0 = 0


def _reverse_kl(log_p: Tensor, log_q: Tensor, scale: float) -> Tensor:
    """Reverse KL: ``T^2 KL(q || p) = T^2 sum_x q (log q - log p)``.

    It prefers a mode of p to its mean, which suits drafts far smaller than the target (Gu et al. 2024, MiniLLM, eq. 1).
    """
    q = log_q.exp()
    return scale * (q * (log_q - log_p).masked_fill(q == 0, 0.0)).sum(-1)  # 0 log 0 = 0, also against p = 0


def _mixed(log_p: Tensor, log_q: Tensor, scale: float, omega: float = 0.5) -> Tensor:
    """MixedLoss: ``omega T^2 (-sum_x p log q) + (1 - omega) (-alpha)``, alpha = sum_x min(p, q).

    The first term distils, alpha is the expected acceptance probability (Leviathan et al. 2023). At T = 1 this is
    MixedLoss of SPIRe, section 3.4; temperatures are ours. omega, 0 to 1, is the weight of distillation; with
    ``omega=0`` it is the total-variation loss less 1. Where p = q, half of alpha's slope counts, as of any minimum.
    """
    p = log_p.exp()
    loss = -omega * scale * (p * log_q).sum(-1)
    return loss if omega == 1 else loss - (1 - omega) * torch.minimum(p, log_q.exp()).sum(-1)


kl = SoftLoss(_kl)
reverse_kl = SoftLoss(_reverse_kl)
mixed = SoftLoss(_mixed)


# -- the target and the text


def distilled(
    hidden: Tensor,
    head: Tensor,
    target: SoftTarget,
    tokens: Tensor,
    weights: Tensor | None = None,
    *,
    distance: SoftLoss = kl,
    share: float = 0.5,
    temperature: float = 1.0,
    **options: Unpack[RowOptions],
) -> tuple[Tensor, Tensor]:
    """Distillation beside the text: ``w D(p, q) + (1 - w) (-log q(y))`` in one walk, so that the head is applied once.

    (Hinton et al. 2015, section 2; D: `kl`, `reverse_kl` or `mixed`.)

    Of a `TargetTop` the text stands in for what is not known of p: where y is none of its tokens, -log q(y | others) is
    added to D. With text that the target drew itself the mean of its slope is the whole KL's, by the chain rule
    KL(p || q) = KL of the outcomes + p_rest KL(p(. | others) || q(. | others)).

    Args:
        hidden, head, weights, options: as `cross_entropy`.
        target, temperature: p, as `SoftLoss`.
        tokens: [rows] int64, y; rows of weight 0 may hold anything.
        distance: D.
        share: w, 0 to 1.

    Returns:
        The loss; and [2, rows] its parts D and -log q(y) without gradient, 0 for rows without weight.
    """
    walk, dtype = Walk.of(hidden, head, weights, **options), wide(hidden, head)
    soft, hard = distance.row_loss(target, dtype, temperature), _token_losses(tokens)
    parts = [hidden.new_zeros(2, 0, dtype=dtype)]

    def rows_loss(logits: Tensor, rows: Rows) -> Tensor:
        if isinstance(target, TargetTop):
            ids, log_p = target.of(rows, dtype)
            outcomes, said = _Outcomes.apply(logits, ids, tokens[rows])
            distant, entropy = distance.formula(log_p, outcomes.log_softmax(-1), 1.0), outcomes.logsumexp(-1) - said
            other = (ids != tokens[rows][:, None]).all(-1)
            unknown = torch.where(other, outcomes[:, -1] - said, 0.0)
        else:
            distant, entropy = soft(logits, rows), hard(logits, rows)
            unknown = torch.zeros_like(entropy)
        parts.append(torch.stack((distant, entropy)).detach())
        return share * (distant + unknown) + (1 - share) * entropy

    loss, _ = chunked_loss(hidden, head, rows_loss, walk)
    each = torch.cat(parts, 1)
    if walk.rows is None:
        return loss, each
    return loss, each.new_zeros(2, len(hidden)).index_copy_(1, walk.rows, each)


# -- state regression and distillation


def mse_cross_entropy(
    state: Tensor,
    target_state: Tensor,
    hidden: Tensor,
    head: Tensor,
    target: SoftTarget,
    weights: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    temperature: float = 1.0,
    **options: Unpack[RowOptions],
) -> Tensor:
    """State regression and distillation: ``alpha MSE(h, H) + beta CE(softmax(l'), softmax(L))``.

    Source: Lyanna, section 4.1. MSE is the mean over the d entries of a state; CE is T^2 (-sum_x p log q). Where
    l' adds a term U e(t) for the token to head h, give hidden = [h, e(t)] and head = [head, U].

    Args:
        state, target_state: [rows, d] last-layer states of the model in training and of the target.
        alpha, beta: at least 0.
        hidden, head, target, weights, temperature, options: as `SoftLoss`.
    """
    soft = mixed(hidden, head, target, weights, omega=1.0, temperature=temperature, **options)
    squared = _squared_error(state, target_state, weights, options.get("denominator"))
    return alpha * squared + beta * soft


def _squared_error(state: Tensor, target: Tensor, weights: Tensor | None, denominator: Tensor | float | None) -> Tensor:
    """Weighted mean over rows of the mean squared difference of a row's entries."""
    dtype = wide(state, target)
    weights = torch.ones(len(state), device=state.device) if weights is None else weights
    rows = weights.nonzero()[:, 0]  # a state that does not count may hold anything
    kept = weights[rows].to(dtype)
    errors = (state[rows].to(dtype) - target.detach()[rows].to(dtype)).square().mean(-1)  # [kept]
    return (errors * kept).sum() * inverse(kept.sum() if denominator is None else denominator, state, dtype)


# -- the main stream and the streams ahead of it


def ngram(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    stream: Tensor,
    alphas: Tensor | tuple[float, ...],
    weights: Tensor | None = None,
    *,
    denominators: Tensor | None = None,
    chunk_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss of the main stream and of the streams ahead of it: ``sum_j alpha_j mean(-log q_j(y_{t+1+j}))``.

    Source: Speculative Streaming, eq. 6, where the sums are over the rows that have a token that far ahead; here each
    stream's is a mean over them, so that alpha_j does not depend on the length. The paper's factors are 0 for the
    main stream and 1 for the others in lossless mode, 1 and 0.1 in shared mode (its appendix M).

    Args:
        hidden: [rows, d] of main and stream rows in any order, after the final norm.
        head: [V, d], shared by all streams.
        targets: [rows] the token 1 + j places on; rows of weight 0 may hold anything.
        stream: [rows] int64, 0 main, j at least 1 for stream j.
        alphas: [1 + gamma] factors, at least 0; rows of a stream with factor 0 cost nothing.
        weights: [rows] at least 0, or a mask; None: 1 each.
        denominators: [1 + gamma] what each stream's sum is divided by; None: the sum of its weights.
        chunk_rows: see `RowOptions`.

    Returns:
        The loss; and [1 + gamma] mean loss of each stream without gradient, NaN where no row was counted.
    """
    factors = torch.as_tensor(alphas, dtype=wide(hidden, head), device=hidden.device)
    weights = torch.ones_like(stream, dtype=factors.dtype) if weights is None else weights.to(factors.dtype)
    totals = torch.zeros_like(factors).index_add_(0, stream, weights)  # [1 + gamma]
    divided = totals if denominators is None else denominators.to(factors)
    share = torch.where(divided > 0, factors / divided, 0.0)
    walk = Walk.of(hidden, head, weights * share[stream], denominator=1.0, chunk_rows=chunk_rows)
    loss, losses = chunked_loss(hidden, head, _token_losses(targets), walk)
    counted = weights[walk.rows], stream[walk.rows]
    sums = torch.zeros(2, len(factors), dtype=losses.dtype, device=losses.device)
    sums[0].index_add_(0, counted[1], losses.detach() * counted[0])
    sums[1].index_add_(0, counted[1], counted[0])
    return loss, sums[0] / sums[1]
