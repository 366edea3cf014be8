"""Losses over rows whose logits are never all held: gradients are computed chunk by chunk.

No more than one chunk's [chunk, V] logits exist at a time. Autograd gives the derivative of a chunk's loss by its
logits in the same walk, and the products with ``hidden`` and ``head`` follow there; the backward pass only scales them:
the head is applied once, not once more to recompute. Rows of weight 0 (padding, prompts) are left out before the head
is applied, so they cost nothing, and their inputs and targets may have any content.

Logits, probabilities and sums are float32 (float64 for float64 inputs), under autocast too; the products take 16-bit
factors there: a GPU keeps their float32 sums, a CPU, which has no such product, rounds each logit to 16 bit once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict, Unpack

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_CHUNK_LOGITS = {"cpu": 2**21, "cuda": 2**26}  # elements of a chunk's logits: 8 MiB and 256 MiB in float32
Rows: TypeAlias = "slice | Tensor"  # of a chunk: all in order, or the indices of those that have a weight
# (logits [chunk, V]; the chunk's rows) -> losses [chunk], differentiable by the logits
RowLoss: TypeAlias = "Callable[[Tensor, Rows], Tensor]"


class RowOptions(TypedDict, total=False):
    """How the rows of a loss are visited; every loss takes these by name."""

    # What the weighted sum is divided by; None: the sum of the weights. With gradient accumulation give the sum over
    # all micro-batches, so that their losses add up to that of the whole batch.
    denominator: Tensor | float | None
    chunk_rows: int | None  # rows whose logits exist at once; None: about 8 MiB of logits on a CPU, 256 MiB on a GPU
    frozen: int  # leading columns of the head that are not trained: their gradient is left 0, and not computed


# -- what the target says


@dataclass(frozen=True, slots=True)
class TargetHidden:
    """A soft target given as hidden states after the target's final norm, and the target's head: d times smaller."""

    hidden: Tensor  # [rows, d_target]
    head: Tensor  # [V, d_target]

    def reader(self, dtype: torch.dtype) -> Callable[[Rows], Tensor]:
        """A function from rows to the target's logits [chunk, V] in ``dtype``."""
        hidden, head = self.hidden.detach(), self.head.detach()
        factor = _factor_dtype(hidden, head, dtype)
        transposed = head.to(factor).t()
        return lambda rows: _matmul(hidden[rows].to(factor), transposed, dtype)


@dataclass(frozen=True, slots=True)
class TargetTop:
    """A soft target of which the k likeliest tokens are known; all others together are one outcome."""

    ids: Tensor  # [rows, k] int64, distinct
    log_probs: Tensor  # [rows, k + 1] of each at temperature 1; the last: of all other tokens together

    def of(self, rows: Rows, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The tokens [chunk, k] of some rows, and log p [chunk, k + 1], whose sum is 1 up to rounding of ``dtype``."""
        return self.ids[rows], self.log_probs[rows].detach().to(dtype).log_softmax(-1)

    def within(self, places: Tensor) -> TargetTop:
        """The same over a part of the vocabulary, of H tokens: those outside have no chance.

        Args:
            places: [V] int64 of each token in that part; H of those outside. Row H of a head is their stand-in: it is
                among the ids of every row, with no chance.
        """
        ids = places[self.ids]
        outside = int(places.max())
        found = self.log_probs.clone()
        found[:, :-1].masked_fill_(ids == outside, -torch.inf)
        none, stand_in = found.new_full((len(ids), 1), -torch.inf), ids.new_full((len(ids), 1), outside)
        return TargetTop(torch.cat((stand_in, ids), 1), torch.cat((none, found), 1))


SoftTarget: TypeAlias = "TargetHidden | TargetTop"


# -- a loss over a walk


@dataclass(frozen=True, slots=True)
class Walk:
    """Which rows a loss visits, and in what portions."""

    rows: Tensor | None  # [kept] indices of the rows that have a weight; None: all
    weights: Tensor | None  # [kept]; None: 1
    scale: Tensor  # scalar, 1 / denominator
    chunk: int  # rows
    frozen: int = 0  # leading columns of the head without gradient

    @staticmethod
    def of(hidden: Tensor, head: Tensor, weights: Tensor | None, **options: Unpack[RowOptions]) -> Walk:
        """The walk of a loss."""
        denominator, chunk, frozen = options.get("denominator"), options.get("chunk_rows"), options.get("frozen", 0)
        dtype = wide(hidden, head)
        chunk = chunk or max(1, _CHUNK_LOGITS.get(hidden.device.type, _CHUNK_LOGITS["cuda"]) // head.shape[0])
        if weights is None:
            scale = inverse(len(hidden) if denominator is None else denominator, hidden, dtype)
            return Walk(None, None, scale, chunk, frozen)
        weights = weights.detach().to(dtype)
        rows = weights.nonzero()[:, 0]
        scale = inverse(weights.sum() if denominator is None else denominator, hidden, dtype)
        return Walk(rows, weights[rows], scale, chunk, frozen)

    def chunks(self, count: int) -> Iterator[tuple[Rows, slice]]:
        """Rows of each chunk, and their places among the rows kept."""
        kept = count if self.rows is None else len(self.rows)
        for start in range(0, kept, self.chunk):
            places = slice(start, min(start + self.chunk, kept))
            yield places if self.rows is None else self.rows[places], places


def chunked_loss(hidden: Tensor, head: Tensor, loss: RowLoss, walk: Walk) -> tuple[Tensor, Tensor]:
    """The weighted mean of a loss over a walk, differentiable, and the losses of the rows kept.

    Args:
        hidden: [rows, d].
        head: [V, d].
        loss: of some rows, from their logits.
        walk: which rows, see `Walk.of`.
    """
    mean, losses = _ChunkedLoss.apply(hidden, head, loss, walk, torch.is_grad_enabled())
    return mean, losses


class _ChunkedLoss(torch.autograd.Function):
    """(hidden, head) -> (loss, losses of the rows kept); gradients are made in the forward walk."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, loss: RowLoss, walk: Walk, derive: bool
    ) -> tuple[Tensor, Tensor]:
        needs = (derive and ctx.needs_input_grad[0], derive and ctx.needs_input_grad[1])
        dtype = wide(hidden, head)
        factor = _factor_dtype(hidden, head, dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            losses, grads = _visit(hidden, head.to(factor), loss, walk, dtype, needs)
        ctx.dtypes, ctx.scale = (hidden.dtype, head.dtype), walk.scale
        ctx.save_for_backward(*grads)
        weighted = losses if walk.weights is None else losses * walk.weights
        ctx.mark_non_differentiable(losses)
        return weighted.sum() * walk.scale, losses

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        factor = grad * ctx.scale
        by_hidden, by_head = (
            None if made is None else (made * factor).to(dtype)
            for made, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return by_hidden, by_head, None, None, None


def _visit(
    hidden: Tensor, head: Tensor, row_loss: RowLoss, walk: Walk, dtype: torch.dtype, needs: tuple[bool, bool]
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    """Losses [kept], and the gradients of their weighted sum by hidden [rows, d] and head [V, d], where needed."""
    by_hidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device) if needs[0] else None
    by_head = torch.zeros(head.shape, dtype=dtype, device=head.device) if needs[1] else None
    losses = [hidden.new_zeros(0, dtype=dtype)]
    for rows, places in walk.chunks(len(hidden)):
        inputs = hidden[rows].to(head.dtype)  # [chunk, d]
        logits = _matmul(inputs, head.t(), dtype).requires_grad_(any(needs))
        with torch.set_grad_enabled(any(needs)):
            loss = row_loss(logits, rows)
        losses.append(loss.detach())
        if not any(needs):
            continue
        weights = torch.ones_like(loss) if walk.weights is None else walk.weights[places]
        slope = torch.autograd.grad(loss, logits, weights)[0].to(head.dtype)
        if by_hidden is not None:
            by_hidden[rows] = _matmul(slope, head, dtype)
        if by_head is not None:
            _add_product(by_head[:, walk.frozen :], slope.t(), inputs[:, walk.frozen :])
    return torch.cat(losses), (by_hidden, by_head)


# -- dtypes and products


def wide(*tensors: Tensor) -> torch.dtype:
    """The dtype of logits and sums: float64 where an input is, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def inverse(denominator: Tensor | float, like: Tensor, dtype: torch.dtype) -> Tensor:
    """1 / denominator, on the device of ``like``; 0 for 0, where there is nothing to average."""
    value = torch.as_tensor(denominator, dtype=dtype, device=like.device)
    return torch.where(value > 0, 1 / value, 0.0)


def _factor_dtype(hidden: Tensor, head: Tensor, dtype: torch.dtype) -> torch.dtype:
    """What the factors of a product are cast to: under autocast what it says, else 16 bit only on a GPU."""
    kind = hidden.device.type
    if torch.version.hip is not None or dtype != torch.float32:
        return dtype
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return hidden.dtype if kind == "cuda" and hidden.dtype == head.dtype else dtype


def _matmul(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """The product in ``dtype``, also of 16-bit factors; a GPU then keeps its float32 sums, a CPU rounds them once."""
    if left.dtype == dtype:
        return left @ right
    return torch.mm(left, right, out_dtype=dtype) if left.is_cuda else (left @ right).to(dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left right, in place."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total.add_(_matmul(left, right, total.dtype))
