"""Sparse views of a text: its first tokens (sinks), and a window of its last ones.

Sources: StreamingLLM (Xiao et al. 2024), sections 3.1 and 3.2; SPIRe, section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..model.attention.base import slot_indices
from ..model.rope import RopeConfig, RopeTable, Rotation
from .ledger import Ledger, SequenceCache
from .pool import KVPool


@dataclass(frozen=True, slots=True)
class SinkWindow:
    """The tokens that a row sees: the first ``sinks`` of the text, and the last ``window``, its own among them."""

    sinks: int
    window: int

    @property
    def keys(self) -> int:
        """Return how many tokens a row sees at most."""
        return self.sinks + self.window

    def gap(self, position: int) -> int:
        """Return how many tokens between sinks and window the row at ``position`` does not see."""
        return max(0, position + 1 - self.keys)


class PoolView:
    """A sparse view of texts in the target's pool, with in-cache positions.

    Positions are those within the view, without the gap. Rotary attention knows differences of positions alone, so the
    window's keys stay as they lie in the pool, and the sinks' are turned on by the gap. These are copies in scratch
    slots: the text's own are only read.
    """

    def __init__(self, shape: SinkWindow, rope: RopeConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        # Keys have been scaled once, and are only turned here.
        self._table = RopeTable(replace(rope, attention_factor=1.0), wide, device)

    def keys(self, cache: SequenceCache, position: int, index: int) -> slice | Tensor:
        """Return the slots that the row at ``position`` sees, its own last; ``index`` is the text's in `turn`."""
        sinks, gap = self.shape.sinks, self.shape.gap(position)
        if not gap:
            return cache.slots(0, position + 1)
        window = cache.slots(sinks + gap, position + 1)
        if not sinks:
            return window
        parts = self.scratch(cache.pool, index), window
        return torch.cat([slot_indices(part, cache.pool.device) for part in parts])

    def scratch(self, pool: Ledger, index: int) -> slice:
        """Return the scratch slots of a text's sinks."""
        sinks = self.shape.sinks
        whole = pool.scratch(sinks * (index + 1))
        return slice(whole.stop - sinks, whole.stop)

    def turn(self, pool: KVPool, rows: Sequence[tuple[SequenceCache, int]]) -> None:
        """Copy the sinks of texts with a gap into the scratch slots of a pass, their keys turned.

        Each text has its cache and the position of the pass's row.
        """
        gaps = [self.shape.gap(position) for _, position in rows]
        moved = [index for index, gap in enumerate(gaps) if gap]
        if not self.shape.sinks or not moved:
            return
        device = pool.k[0].device
        sources = torch.cat([slot_indices(rows[i][0].slots(0, self.shape.sinks), device) for i in moved])
        targets = torch.cat([slot_indices(self.scratch(pool, i), device) for i in moved])
        by = torch.tensor([gaps[i] for i in moved], device=device).repeat_interleave(self.shape.sinks)
        cos, sin = self._table.rows(by)
        pool.tensors.copy_turned(sources, targets, cos[:, 0], sin[:, 0])

    def reach(self, position: int) -> Rotation:
        """Return cos and sin of every gap in texts up to ``position``."""
        return self._table.reach(self.shape.gap(position))
