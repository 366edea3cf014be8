"""The default verdict as a verifier of its own, for tests that plant a fault in it."""

from __future__ import annotations

from collections import abc

from torch import Tensor

from paceline.core.sequence import Sequence
from paceline.core.tree import TokenTree
from paceline.core.verify import Accepted, walk
from paceline.engine.verification import choose_nodes


def choices(sequences: abc.Sequence[Sequence], trees: abc.Sequence[TokenTree], logits: Tensor) -> list[list[int]]:
    """[B][nodes] the target's own choice after every node."""
    rows = zip(sequences, logits.split([1 + len(tree) for tree in trees]), trees, strict=True)
    return [choose_nodes(*row).tolist() for row in rows]


def match(sequences: abc.Sequence[Sequence], trees: abc.Sequence[TokenTree], logits: Tensor) -> list[Accepted]:
    """Follow each tree along the target's own choices."""
    return [*map(walk, trees, choices(sequences, trees, logits))]


def gullible(sequences: abc.Sequence[Sequence], trees: abc.Sequence[TokenTree], logits: Tensor) -> list[Accepted]:
    """Take the first node of every tree, whatever it is."""
    verdicts = zip(match(sequences, trees, logits), trees, strict=True)
    return [(path or [1] * (len(tree) > 0), token) for (path, token), tree in verdicts]
