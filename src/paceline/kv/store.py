"""K and V themselves: the tensors of one process, by slot. The ledger decides which sequence holds a slot."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from .. import kernels
from ..kernels.memory import Arena
from ..model.rope import rotated


class KVStore:
    """K and V of a range of layers; ``slots`` are those of the tensors, scratch and padding included."""

    def __init__(
        self, num_layers: int, kv_heads: int, head_dim: int, slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        # Zeros, not empty: a masked key is multiplied by weight 0, and 0 * NaN would not be 0.
        # Heads first: what one head reads in a pass lies in one piece.
        shape = (num_layers, kv_heads, slots, head_dim)
        if device.type == "cpu":
            memory = Arena()  # fresh pages of the system, which are zeros
            self._hold(*(memory.empty(prod(shape), dtype).view(shape) for _ in range(2)))
        else:
            self._hold(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)))

    def _hold(self, all_k: Tensor, all_v: Tensor) -> None:
        self.all_k, self.all_v = all_k, all_v  # [layers, kv_heads, slots, head_dim]
        self.k = list(self.all_k.unbind(0))  # one a layer: [kv_heads, slots, head_dim]
        self.v = list(self.all_v.unbind(0))

    def part(self, start: int, stop: int) -> KVStore:
        """Return the same K and V of the layers start .. stop - 1 alone."""
        store: KVStore = object.__new__(KVStore)
        store._hold(self.all_k[start:stop], self.all_v[start:stop])
        return store

    def copy_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy K and V of slots of every layer; ranges may overlap, since all are read before the first is written."""
        if len(sources) != len(targets):
            raise ValueError(f"{len(sources)} slots to copy to {len(targets)}")
        library = kernels.in_use() if self.all_k.device.type == "cpu" and self.all_k.is_contiguous() else None
        if library is not None:  # a few rows: torch would wake threads for them, which takes longer than a pass
            layers, heads, slots, dim = self.all_k.shape
            shape, moves = (layers * heads, slots, dim * self.all_k.itemsize), array("q", (*sources, *targets))
            for cache in (self.all_k, self.all_v):
                if library.pl_copy_rows(cache.data_ptr(), *shape, moves.buffer_info()[0], len(sources)):
                    raise IndexError(f"slots {[*sources, *targets]} of a cache of {slots}")
            return
        source = torch.tensor(sources, device=self.all_k.device)
        target = torch.tensor(targets, device=self.all_k.device)
        for cache in (self.all_k, self.all_v):
            cache.index_copy_(2, target, cache.index_select(2, source))

    def copy_turned(self, source: Tensor, target: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Copy K and V of slots [n] int64 of every layer, the keys turned by angles of their own.

        The angles are cos and sin [n, dim] float32 or wider, for the first dimensions of a head, sin signed; see
        `Rotation`.
        """
        self.all_k.index_copy_(2, target, rotated(self.all_k.index_select(2, source), cos, sin))
        self.all_v.index_copy_(2, target, self.all_v.index_select(2, source))
