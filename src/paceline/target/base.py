"""The primitive under every round: run any range of a decoder's layers.

Everything that a forward pass needs is in its arguments: no global context, no attribute hung on a
model. Rows are packed over sequences, ragged and without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ..attention.base import Segment


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """What a drafter may know about the target before the first forward pass."""

    name: str
    num_layers: int
    d_model: int
    vocab_size: int
    max_position: int
    dtype: torch.dtype
    eos_ids: tuple[int, ...]
    bos_id: int | None
    tokenizer: Any  # the Hugging Face tokenizer, or None for a model without one


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
    sequence: Tensor  # [rows] int64  index into the batch (a request with n=4 is four sequences)
    node: Tensor  # [rows] int64  index into the tree; the last prompt row is node 0, earlier ones -1
    slots: Tensor | slice  # [rows] int64  where each row's K and V go; a slice where contiguous
    attn: Any  # AttentionPlan, from the cache view and the tree


@dataclass(slots=True)
class ForwardState:
    """Activations in flight."""

    hidden: Tensor  # [rows, d_model]
    positions: Tensor  # [rows] int64
    sequence: Tensor  # [rows] int64
    node: Tensor  # [rows] int64
    slots: Tensor | slice  # [rows]
    attn: Any  # AttentionPlan
    rope: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict)  # cos, sin of these positions, by rope kind


class KVCache(Protocol):
    """What a forward pass sees of a cache: one K and one V tensor a layer, [kv_heads, slots, head_dim]."""

    k: list[Tensor]
    v: list[Tensor]


class Planner(Protocol):
    """Whoever turns segments into an attention plan."""

    def plan(self, segments: Sequence[Segment], positions: Tensor) -> Any:
        """The plan for rows at ``positions`` [rows] int64."""
        ...


class Target(Planner, Protocol):
    """A decoder any range of whose layers can be run."""

    num_layers: int

    def embed(self, batch: Batch) -> ForwardState:
        """Token embeddings (and learned positions, where the family has them): [rows, d_model]."""
        ...

    def run_layers(
        self, state: ForwardState, start: int, stop: int, cache: KVCache, taps: Taps | None = None
    ) -> ForwardState:
        """Run layers start .. stop - 1 in place on ``state``; K and V of every row go to its slot."""
        ...

    def logits(self, state: ForwardState, rows: Tensor | None = None) -> Tensor:
        """[rows, vocab], float32 or wider: final norm and output head of the rows named (all by default)."""
        ...
