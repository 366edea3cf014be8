"""The paged K/V pool: one per device, a ledger whose store lies in the same process."""

from __future__ import annotations

import torch

from ..model.attention.base import PADDING_SLOTS
from .ledger import Ledger
from .ledger import SequenceCache as SequenceCache
from .store import KVStore


class KVPool(Ledger):
    """K and V of all sequences, in blocks of ``block_size`` slots; see `Ledger` and `KVStore`."""

    def __init__(
        self,
        num_layers: int,
        kv_heads: int,
        head_dim: int,
        num_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        block_size: int = 16,
        scratch_slots: int = 0,
    ) -> None:
        slots = -(-num_tokens // block_size) * block_size + PADDING_SLOTS + scratch_slots
        self.tensors = KVStore(num_layers, kv_heads, head_dim, slots, dtype, device)
        super().__init__(num_tokens, self.tensors, device, block_size, scratch_slots)
        self.k, self.v = self.tensors.k, self.tensors.v  # one a layer: [kv_heads, slots, head_dim]

    @staticmethod
    def bytes_per_token(num_layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Return the bytes that K and V of one token take."""
        return 2 * num_layers * kv_heads * head_dim * dtype.itemsize
