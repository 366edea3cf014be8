"""Attention through torch's scaled_dot_product_attention, one call a sequence, straight from the pool.

The usual way. A sequence whose slots are contiguous is read as a slice, without a gather. One row that
sees all keys needs no mask; a fresh prompt is causal; all else carries a mask, built once a pass and
shared by all layers.

Exact. A row's bits must not depend on the other rows of the pass, so every row becomes a batch entry of
its own: one query against its own keys, in plain decoding's order, padded with masked keys to a
multiple of `BUCKET`. The kernel computes batch entries separately, and the shape of an entry depends on the
row's position alone. Keys after the row's own are multiplied by zero. On CPUs entries are
float32: in 16 bits the kernel rearranges the keys of each entry, which takes most of its time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .base import PADDING_SLOTS, AttentionPlan, Segment, key_mask, key_positions, slot_indices

BUCKET = 64  # keys; exact rows are padded to a multiple of it
# What a gather of one exact group of tree rows may hold, in keys over all rows (memory, not speed).
MAX_GATHERED_KEYS = 1 << 15

assert BUCKET <= PADDING_SLOTS, "exact attention reads up to one bucket past a sequence's last slot"


@dataclass(slots=True)
class Call:
    """One kernel call: some rows, the keys they share, and what they may see of them."""

    rows: slice
    keys: slice | Tensor  # shared keys: slice or [keys]; a row's own: [rows, keys]
    mask: Tensor | None  # additive, broadcastable to [rows, keys]; None: every row sees every key
    causal: bool  # rows are the last keys, each sees those up to its own
    grouped: Tensor | None = None  # the mask once for each query head of a K/V head; made by the first layer


class SdpaAttention:
    """The default backend on CPU and GPU, for queries, keys and masks of ``dtype``.

    ``exact``: ids must not depend on the width, batch or chunking of a pass.
    """

    def __init__(self, dtype: torch.dtype, exact: bool = False) -> None:
        self.dtype = dtype
        self.exact = exact

    def plan(self, segments: Sequence[Segment], positions: Tensor, windows: frozenset[int | None]) -> AttentionPlan:
        """Return by window the kernel calls with their masks."""
        make = _exact_calls if self.exact else _calls
        wide = self.exact and self.dtype.itemsize == 2 and positions.device.type == "cpu"
        dtype = torch.float32 if wide else self.dtype
        calls = {w: [c for s in segments for c in make(s, positions, w, dtype)] for w in windows}
        return AttentionPlan(segments, calls)

    def attend(
        self,
        plan: AttentionPlan,
        query: Tensor,  # [rows, heads, head_dim]
        k_cache: Tensor,  # [kv_heads, slots, head_dim]
        v_cache: Tensor,  # [kv_heads, slots, head_dim]
        scale: float,
        window: int | None,
    ) -> Tensor:  # [rows, heads * head_dim]
        """Return attention of every row over the keys of its own segment."""
        kernel: Callable[..., Tensor] = _attend_each if self.exact else _attend_together
        calls = plan.prepared[window]
        if len(calls) == 1:
            return kernel(calls[0], query, k_cache, v_cache, scale)
        return torch.cat([kernel(call, query[call.rows], k_cache, v_cache, scale) for call in calls])


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [rows, keys]: 0 where visible, -inf where not."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def _calls(segment: Segment, positions: Tensor, window: int | None, dtype: torch.dtype) -> list[Call]:
    """Return one call a segment, with as little mask as its shape allows."""
    rows = slice(segment.start, segment.stop)
    width = segment.stop - segment.start
    fits = window is None or segment.num_keys <= window
    if segment.visible is None and fits:
        if width == 1:
            return [Call(rows, segment.keys, None, False)]
        if width == segment.num_keys:
            return [Call(rows, segment.keys, None, True)]
    mask = key_mask(segment, positions[rows], window)
    return [Call(rows, segment.keys, _additive(mask, dtype), False)]


def _attend_together(call: Call, query: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
    """Return all rows of one sequence in one kernel call."""
    rows, heads, dim = query.shape
    k = _rows_of(k_cache, call.keys)[None]  # [1, kv_heads, keys, head_dim]
    v = _rows_of(v_cache, call.keys)[None]
    groups = heads // k.shape[1]
    mask = call.mask
    if groups > 1 and not call.causal:
        # Query heads that share a K/V head become more query rows of it: no key is copied.
        q = query.view(rows, -1, groups, dim).permute(1, 2, 0, 3).reshape(1, -1, groups * rows, dim)
        if mask is not None:
            if call.grouped is None:
                call.grouped = mask.repeat(groups, 1)
            mask = call.grouped
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        return out.view(-1, groups, rows, dim).permute(2, 0, 1, 3).reshape(rows, heads * dim)
    q = query.transpose(0, 1)[None]  # [1, heads, rows, head_dim]
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=call.causal, scale=scale, enable_gqa=groups > 1
    )
    return out[0].transpose(0, 1).reshape(rows, heads * dim)


def _rows_of(cache: Tensor, keys: slice | Tensor) -> Tensor:
    """Return [kv_heads, keys, head_dim]: cache[:, keys].

    Scattered rows by index_select, which is several times as fast as indexing with a tensor.
    """
    return cache[:, keys] if isinstance(keys, slice) else cache.index_select(1, keys)


def _exact_calls(segment: Segment, positions: Tensor, window: int | None, dtype: torch.dtype) -> list[Call]:
    """Return rows grouped by the bucket that their number of keys falls into."""
    if segment.visible is None and isinstance(segment.keys, slice):
        return _exact_chain_calls(segment, positions, window, dtype)
    return _exact_gather_calls(segment, positions, window, dtype)


def _exact_chain_calls(segment: Segment, positions: Tensor, window: int | None, dtype: torch.dtype) -> list[Call]:
    """Return a chain in contiguous slots: rows of one bucket share one slice of keys, no gather."""
    assert isinstance(segment.keys, slice)
    device = positions.device
    width = segment.stop - segment.start
    first = segment.num_keys - width + 1  # keys that the first row sees
    calls = []
    row = 0
    while row < width:
        bucket = -(-(first + row) // BUCKET) * BUCKET
        stop = min(width, bucket - first + 1)
        counts = torch.arange(first + row, first + stop, device=device)[:, None]
        keys = torch.arange(bucket, device=device)
        mask = keys < counts  # [rows, bucket]
        if window is not None:
            mask &= keys >= counts - window
        rows = slice(segment.start + row, segment.start + stop)
        calls.append(Call(rows, slice(segment.keys.start, segment.keys.start + bucket), _additive(mask, dtype), False))
        row = stop
    return calls


def _exact_gather_calls(segment: Segment, positions: Tensor, window: int | None, dtype: torch.dtype) -> list[Call]:
    """Return tree rows, or scattered slots: every row's own keys in path order, gathered."""
    device = positions.device
    rows = positions[segment.start : segment.stop]
    visible = key_mask(segment, rows, None)  # without the window: the order must not depend on it
    counts = visible.sum(dim=1)  # [rows] keys of each row
    slots = slot_indices(segment.keys, device)
    where = key_positions(segment, device)
    calls = []
    start = 0
    for stop, bucket in _buckets(counts.tolist()):
        # A stable sort by "not visible" puts a row's own keys in front, in order.
        order = (~visible[start:stop]).to(torch.uint8).sort(dim=1, stable=True).indices[:, :bucket]
        if order.shape[1] < bucket:
            order = torch.nn.functional.pad(order, (0, bucket - order.shape[1]))
        mask = torch.arange(bucket, device=device) < counts[start:stop, None]
        if window is not None:
            mask &= where[order] > rows[start:stop, None] - window
        query_rows = slice(segment.start + start, segment.start + stop)
        calls.append(Call(query_rows, slots[order], _additive(mask, dtype), False))
        start = stop
    return calls


def _buckets(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return (one past the last row, bucket) of each run of rows that share a bucket and fit the gather limit."""
    runs: list[tuple[int, int]] = []
    start = 0
    for row, count in enumerate(counts):
        bucket = -(-count // BUCKET) * BUCKET
        limit = max(1, MAX_GATHERED_KEYS // bucket)
        if runs and runs[-1][1] == bucket and row - start < limit:
            runs[-1] = (row + 1, bucket)
        else:
            runs.append((row + 1, bucket))
            start = row
    return runs


def _attend_each(call: Call, query: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
    """Return attention with every row as a batch entry of its own, in its mask's dtype.

    Queries [rows, kv_heads, groups, head_dim] meet their own keys.
    """
    assert call.mask is not None
    mask = call.mask[:, None, None, :]
    rows, heads, dim = query.shape
    kv_heads = k_cache.shape[0]
    q = query.view(rows, kv_heads, heads // kv_heads, dim).to(mask.dtype)
    if isinstance(call.keys, slice):
        k = k_cache[:, call.keys].to(mask.dtype).expand(rows, -1, -1, -1)  # [rows, kv_heads, keys, head_dim]
        v = v_cache[:, call.keys].to(mask.dtype).expand(rows, -1, -1, -1)
    else:
        shape = (kv_heads, *call.keys.shape, dim)
        flat = call.keys.reshape(-1)
        k = _rows_of(k_cache, flat).to(mask.dtype).view(shape).transpose(0, 1)
        v = _rows_of(v_cache, flat).to(mask.dtype).view(shape).transpose(0, 1)
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.reshape(rows, heads * dim).to(query.dtype)
