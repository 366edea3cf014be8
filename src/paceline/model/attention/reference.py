"""Dense attention in plain tensor algebra, any dtype: the reference that fast backends are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .base import AttentionPlan, Segment, key_mask


class ReferenceAttention:
    """Softmax(q k^T * scale) v, written as it is defined."""

    def plan(self, segments: Sequence[Segment], positions: Tensor, windows: frozenset[int | None]) -> AttentionPlan:
        """Return by window one boolean mask [rows, keys] a segment."""
        masks = {w: [key_mask(s, positions[s.start : s.stop], w) for s in segments] for w in windows}
        return AttentionPlan(segments, masks)

    def attend(
        self,
        plan: AttentionPlan,
        query: Tensor,  # [rows, heads, head_dim]
        k_cache: Tensor,  # [kv_heads, slots, head_dim]
        v_cache: Tensor,  # [kv_heads, slots, head_dim]
        scale: float,
        window: int | None,
    ) -> Tensor:  # [rows, heads * head_dim]
        """Return attention of every row over the keys that its mask shows."""
        outputs = []
        groups = query.shape[1] // k_cache.shape[0]
        for segment, mask in zip(plan.segments, plan.prepared[window], strict=True):
            q = query[segment.start : segment.stop]  # [rows, heads, head_dim]
            k = k_cache[:, segment.keys].repeat_interleave(groups, dim=0)  # [heads, keys, head_dim]
            v = v_cache[:, segment.keys].repeat_interleave(groups, dim=0)
            scores = torch.einsum("rhd,hkd->hrk", q, k) * scale  # [heads, rows, keys]
            weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
            outputs.append(torch.einsum("hrk,hkd->rhd", weights, v))
        return torch.cat(outputs).flatten(1)
