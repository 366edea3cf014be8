"""What a layer does differently for rows of speculative streams: rotated values, attention over few keys.

Source: Speculative Streaming, appendices E.4 and H.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...model.attention.base import AttentionBackend
from .visibility import main_sees, stream_sees


def value_rotation(
    stream: Tensor, epsilon: Tensor | float, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """cos and sin [rows, 1, 1] of j * epsilon, for rows of streams j [rows] int64 (appendix E.4); epsilon in radians a
    stream, one for all or [rows] float64. The angles are float64, whatever the result's dtype."""
    angle = (stream.double() * epsilon)[:, None, None]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate_values(values: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
    """Values [..., rows, kv_heads, head_dim] with pairs (i, i + head_dim / 2) rotated by `value_rotation`, if any."""
    if rotation is None:
        return values
    cos, sin = (part.to(rotated_dtype(values)) for part in rotation)
    first, second = values.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(values.dtype)


def rotated_dtype(values: Tensor) -> torch.dtype:
    """In which values are rotated: float32, or float64 where they are that wide."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True)
class StreamLimit:
    """The streams of one sequence that attend to few of the keys that their main rows see (appendix H.1).

    G main rows carry gamma streams each; the block of the segment ends in their keys, node by node.
    """

    most: int  # keys of the main row's, itself included
    rows: Tensor  # [G] int64 the main rows, in the packed pass
    streams: slice  # rows of their streams, node by node: G * gamma
    keys: Tensor  # [keys] int64 slots of the keys that main rows may see, in logical order
    key_positions: Tensor  # [keys] int64
    visible: Tensor  # [G, keys] bool: what each main row sees, itself included, whatever the window
    own: Tensor  # [G] int64 index of each main row's own key
    positions: Tensor  # [G] int64 of the main rows
    scratch: Tensor  # [G * gamma] int64 slots of the streams' own keys
    shared: bool  # main rows attend to their own streams, too (eq. 3)

    def attend(
        self,
        query: Tensor,  # [rows, heads, head_dim]
        k_cache: Tensor,  # [kv_heads, slots, head_dim]
        v_cache: Tensor,
        scale: float,
        window: int | None,
    ) -> Tensor:  # [G * gamma, heads * head_dim]
        """Attention of the stream rows over their main row's best keys and streams 1 .. j.

        Keys are chosen by the main row's attention weights, averaged over heads. Streams keep the keys that are inside
        their own sliding window, which lies up to gamma behind the main row's.
        """
        chosen, found = self._best(query[self.rows], k_cache, scale, window)  # [G, most]
        kv_heads, carriers = k_cache.shape[0], len(self.rows)
        own_k, own_v = (c[:, self.scratch].unflatten(1, (carriers, -1)) for c in (k_cache, v_cache))
        gamma = own_k.shape[2]
        near_k, near_v = (c[:, self.keys[chosen]] for c in (k_cache, v_cache))  # [kv_heads, G, most, head_dim]
        q = query[self.streams].unflatten(0, (carriers, gamma)).unflatten(2, (kv_heads, -1))
        step = torch.arange(1, gamma + 1, device=q.device)
        near = found[:, None].expand(-1, gamma, -1)  # [G, gamma, most]
        if window is not None:
            near = near & (self.key_positions[chosen][:, None] > (self.positions[:, None] + step - window)[..., None])
        hidden = ~stream_sees(step * 0, step, step * 0, step)  # one carrier's streams: all have the same owner
        far = torch.einsum("gjkrd,kgmd->gkrjm", q, near_k).mul(scale).masked_fill(~near[:, None, None], -torch.inf)
        close = torch.einsum("gjkrd,kgid->gkrji", q, own_k).mul(scale).masked_fill(hidden, -torch.inf)
        weights = torch.cat((far, close), -1).softmax(-1)
        mixed = torch.einsum("gkrjm,kgmd->gjkrd", weights[..., : chosen.shape[1]], near_v)
        mixed = mixed + torch.einsum("gkrji,kgid->gjkrd", weights[..., chosen.shape[1] :], own_v)
        return mixed.flatten(0, 1).flatten(1)

    def _best(self, query: Tensor, k_cache: Tensor, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
        """[G, most] the keys with the highest weights of the main row, the row itself among them, and whether it sees
        them: where it sees fewer, others stand in their place. Of equal weights the earlier key's counts more.
        """
        seen = self.visible
        if window is not None:
            seen = seen & (self.key_positions > self.positions[:, None] - window)
        slots = self.keys
        if self.shared:  # main rows attend to their streams, which cannot be chosen
            slots = torch.cat((slots, self.scratch))
        q = query.unflatten(1, (k_cache.shape[0], -1))  # [G, kv_heads, groups, head_dim]
        scores = torch.einsum("gkrd,ksd->gkrs", q, k_cache[:, slots]).mul(scale).flatten(1, 2)  # [G, heads, keys]
        seen_all = seen
        if self.shared:
            rows = torch.arange(len(query), device=seen.device)
            gamma = len(self.scratch) // len(query)
            seen_all = torch.cat((seen, main_sees(rows, rows.repeat_interleave(gamma))), 1)
        weights = scores.masked_fill(~seen_all[:, None], -torch.inf).softmax(-1)[..., : len(self.keys)].mean(1)
        weights = weights.masked_fill(~seen, -1.0).scatter(1, self.own[:, None], torch.inf)
        best = weights.sort(dim=1, descending=True, stable=True).indices[:, : self.most].sort(dim=1).values
        return best, seen.gather(1, best)


@dataclass(frozen=True, slots=True)
class StreamRows:
    """What a layer does differently for stream rows: value rotation (appendix E.4), limited attention (H.1)."""

    start: int  # first stream row of the pass; they are its last ones
    rotation: tuple[Tensor, Tensor] | None = None  # of the streams' values; see `value_rotation`
    limits: tuple[StreamLimit, ...] = ()  # of all streams, in the order of their rows, or of none

    def rotated(self, values: Tensor) -> Tensor:
        """V of all rows [rows, kv_heads, head_dim], that of stream rows rotated."""
        if self.rotation is None:
            return values
        return torch.cat((values[: self.start], rotate_values(values[self.start :], self.rotation)))

    def attend(
        self,
        backend: AttentionBackend,
        plan: Any,
        query: Tensor,  # [rows, heads, head_dim]
        k_cache: Tensor,  # [kv_heads, slots, head_dim]
        v_cache: Tensor,
        scale: float,
        window: int | None,
    ) -> Tensor:  # [rows, heads * head_dim]
        """Attention of all rows: where streams attend to few keys, the plan is that of the other rows."""
        if not self.limits:
            return backend.attend(plan, query, k_cache, v_cache, scale, window)
        main = backend.attend(plan, query[: self.start], k_cache, v_cache, scale, window)
        return torch.cat((main, *(part.attend(query, k_cache, v_cache, scale, window) for part in self.limits)))
