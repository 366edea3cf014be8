"""What a layer does differently for rows of speculative streams: rotated values, attention over few keys.

Source: Speculative Streaming, appendices E.4 and H.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention.streams import stream_sees


def value_rotation(
    stream: Tensor, epsilon: Tensor | float, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """cos and sin [rows, 1, 1] of j * epsilon, for rows of streams j (appendix E.4).

    Args:
        stream: [rows] int64, the number of each row's stream.
        epsilon: radians a stream; one for all or [rows] float64.
        dtype: of the result; the angles are float64.
    """
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
        groups = query.shape[1] // k_cache.shape[0]
        k, v = (c[:, self.keys].repeat_interleave(groups, dim=0) for c in (k_cache, v_cache))  # [heads, keys, dim]
        own_k, own_v = (
            c[:, self.scratch].unflatten(1, (len(self.rows), -1)).repeat_interleave(groups, dim=0)
            for c in (k_cache, v_cache)
        )  # [heads, G, gamma, dim]
        gamma = own_k.shape[2]
        chosen = self._best(query[self.rows], k, own_k, scale, window)  # [G, keys]
        q = query[self.streams].unflatten(0, (len(self.rows), gamma))  # [G, gamma, heads, dim]
        step = torch.arange(1, gamma + 1, device=q.device)
        near = chosen[:, None].expand(-1, gamma, -1)
        if window is not None:
            near = near & (self.key_positions > (self.positions[:, None] + step - window)[..., None])
        far = torch.einsum("gjhd,hkd->hgjk", q, k).mul(scale).masked_fill(~near, -torch.inf)
        hidden = ~stream_sees(step * 0, step, step * 0, step)  # one carrier's streams: all have the same owner
        close = torch.einsum("gjhd,hgid->hgji", q, own_k).mul(scale).masked_fill(hidden, -torch.inf)
        weights = torch.cat((far, close), -1).softmax(-1)
        mixed = torch.einsum("hgjk,hkd->gjhd", weights[..., : len(self.keys)], v)
        mixed = mixed + torch.einsum("hgji,hgid->gjhd", weights[..., len(self.keys) :], own_v)
        return mixed.flatten(0, 1).flatten(1)

    def _best(self, query: Tensor, k: Tensor, own_k: Tensor, scale: float, window: int | None) -> Tensor:
        """[G, keys] bool: the keys with the highest weights of the main row, the row itself always among them."""
        seen = self.visible
        if window is not None:
            seen = seen & (self.key_positions > self.positions[:, None] - window)
        scores = torch.einsum("ghd,hkd->hgk", query, k).mul(scale).masked_fill(~seen, -torch.inf)
        if self.shared:
            scores = torch.cat((scores, torch.einsum("ghd,hgid->hgi", query, own_k).mul(scale)), -1)
        weights = scores.softmax(-1)[..., : len(self.keys)].mean(0)
        weights = weights.scatter(1, self.own[:, None], torch.inf)
        best = weights.topk(min(self.most, weights.shape[1]), dim=1).indices
        return torch.zeros_like(seen).scatter(1, best, True) & seen


@dataclass(frozen=True, slots=True)
class StreamRows:
    """What a layer does differently for stream rows: value rotation (appendix E.4), limited attention (H.1)."""

    start: int  # first stream row of the pass; they are its last ones
    rotation: tuple[Tensor, Tensor] | None = None  # of the streams' values; see `value_rotation`
    limits: tuple[StreamLimit, ...] = ()

    def rotated(self, values: Tensor) -> Tensor:
        """V of all rows [rows, kv_heads, head_dim], that of stream rows rotated."""
        if self.rotation is None:
            return values
        return torch.cat((values[: self.start], rotate_values(values[self.start :], self.rotation)))

    def limit(
        self, attended: Tensor, query: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, window: int | None
    ) -> None:
        """Overwrite the limited rows of ``attended`` [rows, heads * head_dim]."""
        for part in self.limits:
            attended[part.streams] = part.attend(query, k_cache, v_cache, scale, window)
