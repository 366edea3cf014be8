"""Packs the rows of several sequences into one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .attention.base import Segment, slot_indices
from .base import Batch


class RowPacker:
    """Collects rows, sequence after sequence, and makes them a `Batch`.

    The planner makes its attention plan: the decoder that will run the rows, or what else has its `Decoder.plan`.
    """

    def __init__(self, planner: Any, device: torch.device) -> None:
        self._planner = planner
        self._device = device
        self._tokens: list[int] = []
        self._positions: list[int] = []
        self._slots: list[slice | Tensor] = []
        self._segments: list[Segment] = []

    @property
    def rows(self) -> int:
        """Return rows packed so far."""
        return len(self._tokens)

    def add(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        slots: slice | Tensor,
        keys: slice | Tensor,
        num_keys: int,
        prefix: int,
        visible: Tensor | None = None,
        block_positions: Sequence[int] | None = None,
    ) -> None:
        """Append the rows of the next sequence.

        Args:
            tokens, positions: one a row; see `Batch`.
            slots: where the rows' K and V go.
            keys: slots of all keys in logical order, the rows' own last.
            num_keys, prefix: see `Segment`.
            visible: [rows, num_keys - prefix] bool; None: a chain.
            block_positions: [num_keys - prefix] positions of the block's keys; None: prefix, prefix + 1, ..
        """
        start = len(self._tokens)
        self._tokens += tokens
        self._positions += positions
        self._slots.append(slots)
        where = None if block_positions is None else torch.tensor(block_positions, device=self._device)
        seen = None if visible is None else visible.to(self._device)
        self._segments.append(Segment(start, len(self._tokens), keys, num_keys, prefix, seen, where))

    def batch(self) -> Batch:
        """Return the packed rows with their attention plan."""
        # One tensor and its rows: a small pass feels every call.
        tokens, positions = torch.tensor((self._tokens, self._positions), device=self._device).unbind(0)
        return Batch(tokens, positions, self._join(), self._planner.plan(self._segments, positions))

    def _join(self) -> slice | Tensor:
        """Return all rows' slots: one slice where there is one contiguous sequence."""
        if len(self._slots) == 1:
            return self._slots[0]
        return torch.cat([slot_indices(slots, self._device) for slots in self._slots])
