"""The inputs and outputs of a forward pass over any range of a decoder's layers.

Everything that a forward pass needs is in its arguments: no global context, no hidden attribute of a
model. Rows are packed over sequences, ragged and without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from .attention.base import AttentionPlan, slot_indices

if TYPE_CHECKING:
    from .adapters import AdapterRange


@dataclass(slots=True)
class Taps:
    """Copies of hidden states, taken after the layers named.

    ``layers`` are 0-based layer indices; -1 is the last layer, before the final norm. After the pass
    ``hidden[layer]`` is [rows, d_model].
    """

    layers: tuple[int, ...]
    hidden: dict[int, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class Batch:
    """The rows of one forward pass, packed over sequences."""

    tokens: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64  absolute: root position + depth
    slots: Tensor | slice  # [rows] int64  where each row's K and V go; a slice where contiguous
    attn: AttentionPlan  # from the cache view and the tree


@dataclass(slots=True)
class ForwardState:
    """Activations in flight."""

    hidden: Tensor  # [rows, d_model]
    positions: Tensor  # [rows] int64
    slots: Tensor | slice  # [rows]
    attn: Any  # AttentionPlan; None: pruned, it must be given again
    rope: dict[Any, Any] = field(default_factory=dict)  # by network what `RopeTables.rows` gives for these positions
    adapters: Sequence[AdapterRange] = ()  # rows with low-rank adapters: disjoint ranges, in order

    def keep(self, rows: Tensor) -> ForwardState:
        """Return the state of the ``rows`` [kept] int64, ascending, alone: pruning in mid-pass.

        Plan and adapters are left out: they must be given again. K and V that dropped rows have written remain until
        their sequence's region is committed.
        """
        slots = slot_indices(self.slots, rows.device)[rows]
        return ForwardState(self.hidden[rows], self.positions[rows], slots, None)


class KVCache(Protocol):
    """Describe what a forward pass sees of a cache: one K and one V tensor a layer, [kv_heads, slots, head_dim]."""

    k: list[Tensor]
    v: list[Tensor]


@dataclass(eq=False)
class LayerCache:
    """K and V of some layers."""

    k: list[Tensor]
    v: list[Tensor]
