"""Parts of the target that drafters of its states share: embedding, final norm and head, without a copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.layers import Stack


@dataclass(frozen=True, slots=True, eq=False)
class TargetHandle:
    """A target's two ends. The tensors are the target's own: nothing may write to them.

    States are *raw* as the last layer leaves them (tap -1), and *normed* after the final norm.
    """

    embedding: Tensor  # [V, d_model]; without values where `embed` makes them: of blocks, or of what ranks have
    embed: Callable[[Tensor], Tensor]  # [rows, d_model] of tokens [rows] int64, without positions
    final: Callable[[Tensor], Tensor]  # [rows, d_model] normed states, from raw ones
    head: Callable[[Tensor], Tensor]  # [rows, V] float32 or wider, from normed states
    stack: Stack | None  # the compiled layers, whose packed head others may run; None: torch's kernels, or ranks

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of states and embeddings."""
        return self.embedding.dtype

    def table(self) -> Tensor:
        """Return [V, d_model] all embeddings."""
        every = torch.arange(len(self.embedding), device=self.embedding.device if not self.embedding.is_meta else "cpu")
        return self.embed(every) if self.embedding.is_meta else self.embedding

    def logits(self, states: Tensor, normed: bool = False) -> Tensor:
        """Return [rows, V] float32 or wider, never rounded to bf16 in between.

        The target's own logits are rounded where torch's kernels compute in bf16: there these differ by that.

        Args:
            states: [rows, d_model] in the target's dtype.
            normed: whether they went through the final norm.
        """
        return self.head(states if normed else self.final(states))
