"""Main rows that carry further queries, in training: which rows they are, and their attention over shared keys.

A *carrier* is a main row whose next token is generated. Queries of a carrier, such as speculative streams or tokens
drafted after it, attend to the main keys of its document up to it and to a few keys of its own, and never to those of
another carrier. So their attention is done document by document, the main keys once for all queries, and a few keys
more for each carrier. Carriers can be cut into *segments* that are run one after the other, so that memory is bounded
by a segment.

Shapes: B rows, T tokens, R carriers, G queries of a carrier, gamma keys of its own, H heads, D head_dim, d d_model;
"flat" is [B * T], of keys and values [B * T, kv_heads, D].

Source: Speculative Streaming, appendix I (segment attention).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .data import TokenBatch
from .network import KeyValues

# -- carriers: which main rows have streams


# Carriers of one document, as rows of a part's carriers, and the main rows that they may attend to, flat: from the
# document's first token to the block's last carrier.
Block = tuple[slice, slice]


@dataclass(frozen=True, slots=True)
class CarrierRows:
    """Main rows that carry further queries, in order."""

    index: Tensor  # [R] int64 flat
    positions: Tensor  # [R] int64 within the document
    blocks: tuple[Block, ...]

    def __len__(self) -> int:
        return len(self.index)

    def segments(self, size: int | None) -> Iterator[CarrierRows]:
        """Yield the carriers, at most ``size`` at a time; None: all at once."""
        step = max(1, len(self) if size is None else size)
        for start in range(0, len(self), step):
            stop = min(start + step, len(self))
            yield make_carriers(self.index[start:stop], self.positions[start:stop])


def choose_carriers(batch: TokenBatch, fraction: float = 1.0, generator: torch.Generator | None = None) -> CarrierRows:
    """Return the rows whose next token exists and is generated, not part of a prompt, or a ``fraction`` of them."""
    follows = torch.zeros_like(batch.documents, dtype=torch.bool)
    follows[:, :-1] = batch.documents[:, :-1] == batch.documents[:, 1:]
    generated = follows & (batch.documents >= 0) & (batch.positions >= batch.prompts - 1)
    return carriers_of(generated, batch, fraction, generator)


def carriers_of(rows: Tensor, batch: TokenBatch, fraction: float, generator: torch.Generator | None) -> CarrierRows:
    """Return the rows [B, T] bool of a batch, or a random ``fraction`` of them."""
    index = rows.flatten().nonzero()[:, 0]
    if fraction < 1.0:
        count = max(1, round(fraction * len(index)))
        index = index[torch.randperm(len(index), generator=generator)[:count].sort().values.to(index.device)]
    return make_carriers(index, batch.positions.flatten()[index])


def make_carriers(index: Tensor, positions: Tensor) -> CarrierRows:
    """Return carriers at ``index`` [R] flat, ascending, with ``positions`` [R]."""
    if not len(index):
        return CarrierRows(index, positions, ())
    starts = (index - positions).tolist()  # flat index of the document's first token
    last = index.tolist()
    cuts = [i for i in range(1, len(starts)) if starts[i] != starts[i - 1]]
    edges = zip([0, *cuts], [*cuts, len(starts)], strict=True)
    blocks = tuple((slice(a, b), slice(starts[a], last[b - 1] + 1)) for a, b in edges)
    return CarrierRows(index, positions, blocks)


# -- attention of a block


class _GroupAttention(torch.autograd.Function):
    """Attention of P carriers' G queries each over K keys that all share and gamma keys of the carrier's own.

    The scores of a block exist twice at most, in the forward pass and again in the backward pass; retained
    between them are the weights, in the dtype of the queries. Gradients of the shared keys are made only where wanted.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,  # [H, P, G, D]
        k: Tensor,  # [H, K, D]
        v: Tensor,  # [H, K, D]
        own_k: Tensor,  # [H, P, gamma, D]
        own_v: Tensor,  # [H, P, gamma, D]
        hidden_keys: Tensor,  # [P, 1 or G, K] bool: not to be seen
        hidden_own: Tensor,  # [G, gamma] bool
        scale: float,
    ) -> Tensor:  # [H, P, G, D]
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        far = torch.bmm(q.flatten(1, 2), k.mT).to(wide).unflatten(1, q.shape[1:3])
        far = far.mul_(scale).masked_fill_(hidden_keys, -torch.inf)  # [H, P, G, K]
        close = (q @ own_k.mT).to(wide).mul_(scale).masked_fill_(hidden_own, -torch.inf)  # [H, P, G, gamma]
        top = torch.maximum(far.amax(-1, keepdim=True), close.amax(-1, keepdim=True))
        far.sub_(top).exp_()
        close.sub_(top).exp_()
        total = far.sum(-1, keepdim=True) + close.sum(-1, keepdim=True)
        far, close = far.div_(total).to(q.dtype), close.div_(total).to(q.dtype)
        out = torch.bmm(far.flatten(1, 2), v).view_as(q) + close @ own_v
        ctx.save_for_backward(q, k, v, own_k, own_v, far, close, out)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, own_k, own_v, far, close, out = ctx.saved_tensors
        grad = grad.to(q.dtype).contiguous()
        mean = (grad * out).sum(-1, keepdim=True)  # [H, P, G, 1]
        slope = torch.bmm(grad.flatten(1, 2), v.mT).view_as(far)
        slope = slope.sub_(mean).mul_(far).mul_(ctx.scale)  # d loss / d scores
        near = (grad @ own_v.mT).sub_(mean).mul_(close).mul_(ctx.scale)
        by_q = torch.bmm(slope.flatten(1, 2), k).view_as(q) + near @ own_k
        needs = ctx.needs_input_grad
        by_k = torch.bmm(slope.flatten(1, 2).mT, q.flatten(1, 2)) if needs[1] else None
        by_v = torch.bmm(far.flatten(1, 2).mT, grad.flatten(1, 2)) if needs[2] else None
        return by_q, by_k, by_v, near.mT @ q, close.mT @ grad, None, None, None


def group_attention(
    q: Tensor,  # [R, G, H, D]
    main: KeyValues,
    stream_keys: KeyValues,  # [R, gamma, kv_heads, D]
    carriers: CarrierRows,
    steps: Tensor,  # [G] 0 the carrier itself, j the query j places after it
    window: int | None,
) -> Tensor:  # [R, G, H * D]
    """Attend to all main keys that the carriers see, and of a carrier's own keys to 1 .. j as step j, to all as step
    0."""
    sizes = [rows.stop - rows.start for rows, _ in carriers.blocks]
    parts = zip(*(_heads(x, q.shape[2]).split(sizes, 1) for x in (q, *stream_keys)), strict=True)
    shared = zip(*(_pieces(_heads(x, q.shape[2]), carriers.blocks) for x in main), strict=True)
    order = torch.arange(1, stream_keys[0].shape[1] + 1, device=q.device)
    hidden = (steps[:, None] > 0) & (order > steps[:, None])
    outputs = []
    for (rows, _), (queries, own_k, own_v), (k, v) in zip(carriers.blocks, parts, shared, strict=True):
        unseen = _unseen(carriers.positions[rows], steps, k.shape[1], window)
        outputs.append(_GroupAttention.apply(queries, k, v, own_k, own_v, unseen, hidden, q.shape[3] ** -0.5))
    return torch.cat(outputs, 1).permute(1, 2, 0, 3).flatten(2)


def _pieces(x: Tensor, blocks: Sequence[Block]) -> Sequence[Tensor]:
    """Return the keys of each block [H, K, D] of all keys [H, flat, D]: cut at once, so that gradients are joined at
    once.
    """
    edges = [edge for _, keys in blocks for edge in (keys.start, keys.stop)]
    sizes = [b - a for a, b in zip([0, *edges], [*edges, x.shape[1]], strict=True)]
    return x.split(sizes, 1)[1::2]


def _unseen(positions: Tensor, steps: Tensor, keys: int, window: int | None) -> Tensor:
    """Return [P, 1 or G, keys] bool: keys after the carrier, or outside of the window of the query's own position."""
    places = torch.arange(keys, device=positions.device)
    later = (places > positions[:, None])[:, None]
    if window is None:
        return later
    return later | (places <= (positions[:, None] + steps - window)[..., None])


def _heads(x: Tensor, heads: int) -> Tensor:
    """Return heads first, each key head as often as it is used: [..., kv_heads, D] -> [heads, ..., D]."""
    first = x.movedim(-2, 0)
    repeat = heads // first.shape[0]
    return (first if repeat == 1 else first.repeat_interleave(repeat, 0)).contiguous()
