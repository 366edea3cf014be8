"""Losses over rows whose logits are never all held: gradients are computed chunk by chunk.

No more than one chunk's [chunk, V] logits exist at a time. Autograd gives the derivative of a chunk's loss by its
logits in the same walk, and the products with ``hidden`` and ``head`` follow there; the backward pass only scales them:
the head is applied once, not once more to recompute. Rows of weight 0 (padding, prompts) are left out before the head
is applied, so they cost nothing, and their inputs and targets may have any content.

Logits, probabilities and sums are float32 (float64 for float64 inputs), under autocast too; the products take 16-bit
factors there: a GPU keeps their float32 sums, a CPU, which has no such product, rounds each logit to 16 bit once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_CHUNK_LOGITS = {"cpu": 2**21, "cuda": 2**26}  # elements of a chunk's logits: 8 MiB and 256 MiB in float32
# (logits [chunk, V]; the chunk's rows [chunk]) -> losses [chunk], differentiable by the logits, and parts for reports
RowLoss: TypeAlias = "Callable[[Tensor, Tensor], tuple[Tensor, ...]]"


# -- outputs of the target


@dataclass(frozen=True, slots=True)
class TargetHidden:
    """A soft target given as hidden states after the target's final norm, and the target's head: d times smaller."""

    hidden: Tensor  # [rows, d_target]
    head: Tensor  # [V, d_target]

    def reader(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """Return a function from rows to the target's logits [chunk, V] in ``dtype``."""
        hidden, head = self.hidden.detach(), self.head.detach()
        factor = _factor_dtype(hidden, head, dtype)
        transposed = head.to(factor).t()
        return lambda rows: _matmul(hidden[rows].to(factor), transposed, dtype)


@dataclass(frozen=True, slots=True)
class TargetTop:
    """A soft target of which the k likeliest tokens are known; all others together are one outcome."""

    ids: Tensor  # [rows, k] int64, distinct
    log_probs: Tensor  # [rows, k + 1] of each at temperature 1; the last: of all other tokens together

    def of(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the tokens [chunk, k] of some rows, and log p [chunk, k + 1], whose sum is 1 up to rounding of
        ``dtype``.
        """
        return self.ids[rows], self.log_probs[rows].detach().to(dtype).log_softmax(-1)

    def at(self, rows: Tensor) -> TargetTop:
        """Return the same of some ``rows`` [R]."""
        return TargetTop(self.ids[rows], self.log_probs[rows])

    def within(self, places: Tensor) -> TargetTop:
        """Return the same over a part of the vocabulary, of H tokens: those outside have no chance.

        Args:
            places: [V] int64 of each token in that part; H of those outside. Row H of a head is their stand-in: it is
                among the ids of every row, with no chance.
        """
        ids = places[self.ids]
        outside = int(places.max())
        log_probs = self.log_probs.clone()
        log_probs[:, :-1].masked_fill_(ids == outside, -torch.inf)
        none, stand_in = log_probs.new_full((len(ids), 1), -torch.inf), ids.new_full((len(ids), 1), outside)
        return TargetTop(torch.cat((stand_in, ids), 1), torch.cat((none, log_probs), 1))


SoftTarget: TypeAlias = "TargetHidden | TargetTop"


# -- a loss over a walk


def chunked_loss(
    hidden: Tensor,
    head: Tensor,
    loss: RowLoss,
    weights: Tensor | None = None,
    *,
    denominator: Tensor | float | None = None,
    chunk_rows: int | None = None,
    frozen: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the weighted mean of a loss over rows, differentiable, and what it is made of.

    Args:
        hidden: [rows, d].
        head: [V, d].
        loss: of some rows, from their logits.
        weights: [rows] at least 0, or a mask; None: 1 each.
        denominator: what the weighted sum is divided by; None: the sum of the weights. Of a part of a batch give that
            of the whole, so that the parts' losses add up to its loss.
        chunk_rows: rows whose logits exist at once; None: about 8 MiB of logits on a CPU, 256 MiB on a GPU.
        frozen: leading columns of the head that are not trained: their gradient is left 0, and not computed.

    Returns:
        A scalar, float32 or wider, 0 where no row has a weight; and [1 + parts, rows] each row's loss and its parts
        without gradient, 0 for rows without weight.
    """
    dtype, device = wide(hidden, head), hidden.device
    weights = hidden.new_ones(len(hidden), dtype=dtype) if weights is None else weights.detach().to(dtype)
    rows = weights.nonzero()[:, 0]
    scaled = weights[rows] * inverse(weights.sum() if denominator is None else denominator, hidden, dtype)
    chunk = chunk_rows or max(1, _CHUNK_LOGITS.get(device.type, _CHUNK_LOGITS["cuda"]) // head.shape[0])
    derive = torch.is_grad_enabled()
    grads = [torch.zeros_like(x, dtype=dtype) if derive and x.requires_grad else None for x in (hidden, head)]
    factor = head.detach().to(_factor_dtype(hidden, head, dtype))
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        pieces = zip(rows.split(chunk), scaled.split(chunk), strict=True)
        rows_values = torch.cat([_visit(hidden, factor, loss, *piece, grads, frozen) for piece in pieces], 1)
    value: Tensor = KnownGradients.apply((rows_values[0] * scaled).sum(), grads, hidden, head)
    return value, rows_values.new_zeros(len(rows_values), len(hidden)).index_copy_(1, rows, rows_values)


def _visit(
    hidden: Tensor,
    head: Tensor,
    row_loss: RowLoss,
    rows: Tensor,
    weights: Tensor,
    grads: Sequence[Tensor | None],
    frozen: int,
) -> Tensor:
    """Return [1 + parts, chunk] of a chunk.

    The gradients of its weighted sum are added to ``grads``, where there are any.
    """
    inputs, dtype = hidden[rows].to(head.dtype), weights.dtype  # [chunk, d]
    (by_hidden, by_head), needed = grads, any(grad is not None for grad in grads)
    logits = _matmul(inputs, head.t(), dtype).requires_grad_(needed)
    with torch.set_grad_enabled(needed):
        values = row_loss(logits, rows)
    if needed:
        slope = torch.autograd.grad(values[0], logits, weights)[0].to(head.dtype)
    if by_hidden is not None:
        by_hidden[rows] = _matmul(slope, head, dtype)
    if by_head is not None:
        _add_product(by_head[:, frozen:], slope.t(), inputs[:, frozen:])
    return torch.stack(values).detach()


class KnownGradients(torch.autograd.Function):
    """(value [], gradients, inputs) -> the value, as a function of the inputs: its backward pass only scales them.

    An input whose gradient is None gets none.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, grads: Sequence[Tensor | None], *inputs: Tensor) -> Tensor:
        ctx.dtypes = [None if grad is None else x.dtype for x, grad in zip(inputs, grads, strict=True)]
        ctx.save_for_backward(*[grad for grad in grads if grad is not None])
        return value.clone()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        held = iter(ctx.saved_tensors)
        return None, None, *[None if dtype is None else (next(held) * grad).to(dtype) for dtype in ctx.dtypes]


# -- dtypes and products


def wide(*tensors: Tensor) -> torch.dtype:
    """Return the dtype of logits and sums: float64 where an input is, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def inverse(denominator: Tensor | float, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 1 / denominator, on the device of ``like``; 0 for 0, where there is nothing to average."""
    value = torch.as_tensor(denominator, dtype=dtype, device=like.device)
    return torch.where(value > 0, 1 / value, 0.0)


def _factor_dtype(hidden: Tensor, head: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return what the factors of a product are cast to: under autocast its dtype, else 16 bit only on a GPU."""
    kind = hidden.device.type
    if torch.version.hip is not None or dtype != torch.float32:
        return dtype
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return hidden.dtype if kind == "cuda" and hidden.dtype == head.dtype else dtype


def _matmul(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product in ``dtype``, also of 16-bit factors.

    A GPU then keeps its float32 sums, a CPU rounds them once.
    """
    if left.dtype == dtype:
        return left @ right
    return torch.mm(left, right, out_dtype=dtype) if left.is_cuda else (left @ right).to(dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left right, in place."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total.add_(_matmul(left, right, total.dtype))
