"""The default verdict as a verifier of its own, for tests that plant a fault in it."""

from __future__ import annotations

from collections import abc

from torch import Tensor

from paceline.core.sequence import Sequence
from paceline.core.tree import TokenTree
from paceline.core.verify import Accepted, walk
from paceline.engine.verification import choose_nodes


def choices(sequences: abc.Sequence[Sequence], tree: TokenTree, logits: Tensor) -> list[list[int]]:
    """[B][nodes] the target's own choice after every node."""
    rows = zip(sequences, logits.split(tree.counts), strict=True)
    return [choose_nodes(sequence, own, tree, b).tolist() for b, (sequence, own) in enumerate(rows)]


def sample_and_match(tree: TokenTree, chosen: abc.Sequence[abc.Sequence[int]]) -> list[Accepted]:
    """Follow each tree along the choices [B][nodes] after its nodes."""
    return [*map(walk, tree.tokens, tree.parents, chosen)]


def match(sequences: abc.Sequence[Sequence], tree: TokenTree, logits: Tensor) -> list[Accepted]:
    """Follow each tree along the target's own choices."""
    return sample_and_match(tree, choices(sequences, tree, logits))
