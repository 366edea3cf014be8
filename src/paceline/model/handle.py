"""Parts of the target that drafters of its states share: embedding, final norm and head, without a copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.layers import Stack
from .linear import LinearOp


@dataclass(frozen=True, slots=True, eq=False)
class TargetHandle:
    """A target's two ends. The tensors are the target's own: nothing may write to them.

    States are *raw* as the last layer leaves them (tap -1), and *normed* after the final norm.
    """

    embedding: Tensor  # [V, d_model]; without values where the weights are in blocks, of which `embed` makes them
    final: Callable[[Tensor], Tensor]  # [rows, d_model] normed states, from raw ones
    head: LinearOp
    stack: Stack | None  # the compiled layers, whose packed head others may run; None: torch's kernels

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of states and embeddings."""
        return self.embedding.dtype

    def embed(self, tokens: Tensor) -> Tensor:
        """Return [.., d_model] embeddings of ``tokens`` [..] int64, without positions."""
        return F.embedding(tokens, self.embedding) if self.stack is None else self.stack.embed(tokens)

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
        return self.head.wide(states if normed else self.final(states))
