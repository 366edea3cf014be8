"""The contract of attention: which keys each row of a packed batch sees.

Rows are packed over sequences (ragged, no padding). A `Segment` describes the rows of one sequence in
one forward pass; a backend turns all segments into a plan once, and every layer uses that plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..fields import Slots, Values

# Exact attention reads whole buckets of keys, so it may look past a sequence's last slot.
PADDING_SLOTS = 64


@dataclass(frozen=True, slots=True)
class Segment:
    """The rows of one sequence in one forward pass, and the keys that they may see.

    Keys come in logical order: first ``prefix`` keys that every row sees, then the *block*: keys of
    which a row sees those that ``visible`` names. The last keys of the block are this pass's own rows.
    Row i's own key is at index ``prefix + block_offset + i``.
    """

    start: int  # first row of the segment in the packed batch
    stop: int  # one past its last row
    keys: Slots  # slots of all visible keys in logical order: a slice where contiguous, else int64 [keys]
    num_keys: int  # prefix + block length
    prefix: int  # leading keys that every row sees (their positions are 0 .. prefix - 1)
    visible: Values | None  # [rows, num_keys - prefix] bool; None: a chain, row i sees block keys 0 .. i
    positions: Values | None  # [num_keys - prefix] int64 positions of the block's keys; None: prefix + arange


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Describe what a backend prepares once for all layers of a forward pass."""

    segments: Sequence[Segment]
    prepared: Any  # the backend's own
    held: Sequence[Tensor] = ()  # what must live as long


class AttentionBackend(Protocol):
    """One way to compute attention over the paged cache."""

    def plan(self, segments: Sequence[Segment], positions: Tensor, windows: frozenset[int | None]) -> AttentionPlan:
        """Prepare masks for every sliding window in use.

        Args:
            segments: one a sequence, covering all rows in order.
            positions: [rows] int64, absolute position of every row.
            windows: the sliding windows that occur in the network (None: full attention). A row at
                position t sees keys at positions > t - window.
        """
        ...

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
        ...


def slot_indices(slots: slice | Tensor, device: torch.device) -> Tensor:
    """Return [slots] int64: slots that may be given as a slice, where they are contiguous."""
    return torch.arange(slots.start, slots.stop, device=device) if isinstance(slots, slice) else slots


def block_visibility(segment: Segment, device: torch.device) -> Tensor:
    """Return [rows, block] bool: which keys of the block each row sees (the chain rule where none is given)."""
    if segment.visible is not None:
        return segment.visible
    rows = segment.stop - segment.start
    block = segment.num_keys - segment.prefix
    return torch.ones(rows, block, dtype=torch.bool, device=device).tril(block - rows)


def key_positions(segment: Segment, device: torch.device) -> Tensor:
    """Return [num_keys] int64: absolute position of every key."""
    if segment.positions is None:
        return torch.arange(segment.num_keys, device=device)
    return torch.cat((torch.arange(segment.prefix, device=device), segment.positions))


def key_mask(segment: Segment, positions: Tensor, window: int | None) -> Tensor:
    """Return [rows, num_keys] bool: the keys that the rows of a segment, at ``positions`` [rows] int64, may see.

    Those at positions <= row position - window are out of sight, where there is a window.
    """
    device = positions.device
    rows = segment.stop - segment.start
    mask = torch.ones(rows, segment.num_keys, dtype=torch.bool, device=device)
    mask[:, segment.prefix :] = block_visibility(segment, device)
    if window is not None:
        mask &= key_positions(segment, device)[None, :] > positions[:, None] - window
    return mask
