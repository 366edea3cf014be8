"""What drafted tokens were drawn from: q at every node of a batch of trees, for rejection sampling.

Axis letters: B requests, N nodes, K candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from .errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class SparseQ:
    """The distribution that the children of each node were drawn from.

    Only honest draws may carry it: every child of node n was drawn from row n, siblings in index order,
    and no node was removed after the draw. Rows of nodes without children are never read.
    """

    ids: Tensor | None  # [B, N, K] int64  tokens with non-zero probability, -1 padded; None: all tokens, K = V
    probs: Tensor  # [B, N, K] float  each row with children sums to 1
    replacement: bool = True  # False: a token drawn for one sibling was out of the draw for the next

    def dense(self, b: int, n: int, vocab_size: int) -> Tensor:
        """[V] float64: the distribution that the children of node ``n`` of request ``b`` were drawn from."""
        return self._at(slice(b, b + 1)).rows(torch.tensor([n], device=self.probs.device), vocab_size)[0]

    def rows(self, nodes: Tensor, vocab_size: int) -> Tensor:
        """[B, V] float64: the distribution below ``nodes`` [B], one node a request."""
        self.require_vocab(vocab_size)
        batch = torch.arange(nodes.shape[0], device=nodes.device)
        probs = self.probs[batch, nodes].double()  # [B, K]
        if self.ids is None:
            return probs
        ids = self.ids[batch, nodes]  # [B, K]
        rows = probs.new_zeros(nodes.shape[0], vocab_size)
        return rows.scatter_add_(1, ids.clamp(min=0), probs.masked_fill(ids < 0, 0.0))

    def of_tokens(self, nodes: Tensor, tokens: Tensor) -> Tensor:
        """[B, M] float64: probability of ``tokens`` [B, M] below ``nodes`` [B, M] int64."""
        batch = torch.arange(nodes.shape[0], device=nodes.device)[:, None]
        if self.ids is None:
            return self.probs[batch, nodes, tokens].double()
        here = self.ids[batch, nodes] == tokens[:, :, None]  # [B, M, K]
        return (self.probs[batch, nodes].double() * here).sum(dim=2)

    def require_vocab(self, vocab_size: int) -> None:
        """Raises ConfigError if this q has no ids and covers another number of tokens."""
        if self.ids is None and self.probs.shape[2] != vocab_size:
            raise ConfigError(
                f"q over {self.probs.shape[2]} tokens for a target with {vocab_size}",
                "a q without ids must cover the whole vocabulary",
                "give ids, or probabilities for every token of the target",
            )

    def take(self, order: Tensor) -> SparseQ:
        """The rows of nodes ``order`` [B, M] int64."""
        return self._at((torch.arange(order.shape[0], device=order.device)[:, None], order))

    def narrow(self, width: int) -> SparseQ:
        """The rows of the first ``width`` nodes."""
        return self._at((slice(None), slice(width)))

    def to(self, device: torch.device | str) -> SparseQ:
        """The same on another device."""
        return replace(self, ids=None if self.ids is None else self.ids.to(device), probs=self.probs.to(device))

    def _at(self, index: object) -> SparseQ:
        return replace(self, ids=None if self.ids is None else self.ids[index], probs=self.probs[index])  # type: ignore[index]


def stacked(parts: Sequence[tuple[int, SparseQ | None]], width: int) -> SparseQ:
    """q of several batches below each other, padded to ``width`` nodes.

    Args:
        parts: requests of each batch, and its q; None for bare roots, of which no row is read.
        width: nodes wanted.

    Raises:
        ConfigError: q of different kinds.
    """
    given = [q for _, q in parts if q is not None]
    kinds = {(q.ids is None, q.replacement, q.probs.dtype) for q in given}
    candidates = max(q.probs.shape[2] for q in given)
    if len(kinds) > 1 or (given[0].ids is None and any(q.probs.shape[2] != candidates for q in given)):
        raise ConfigError(
            "stack of sampled drafts of different kinds",
            "their q differ in replacement, dtype, vocabulary, or in whether they list token ids",
            "draw the drafts of one batch in the same way",
        )

    def joined(like: Tensor, tensors: Sequence[Tensor | None], value: float) -> Tensor:
        grown = []
        for (batch, _), tensor in zip(parts, tensors, strict=True):
            part = like.new_full((batch, 0, candidates), value) if tensor is None else tensor
            grown.append(pad(part, (0, candidates - part.shape[2], 0, width - part.shape[1]), value=value))
        return torch.cat(grown)

    first = given[0]
    ids = None if first.ids is None else joined(first.ids, [None if q is None else q.ids for _, q in parts], -1)
    return SparseQ(ids, joined(first.probs, [None if q is None else q.probs for _, q in parts], 0.0), first.replacement)
