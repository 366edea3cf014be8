"""Sequences as drafters see them, what is wanted of a draft, and the paths of what came back."""

from __future__ import annotations

import random
from collections import abc
from typing import Any

from hypothesis import strategies as st

from kits.tiny import VOCAB
from paceline.core.sampling import SamplingParams, SequenceSampler
from paceline.core.sequence import Sequence
from paceline.core.tree import TokenTree
from paceline.draft.base import DraftRequest

Paths = dict[tuple[int, ...], float]


@st.composite
def proposals(draw: st.DrawFn) -> TokenTree:
    """Any tree of up to 12 nodes, siblings apart, no score above its parent's, few different scores."""
    made = TokenTree()
    taken: set[tuple[int, int]] = set()
    for _ in range(draw(st.integers(0, 12))):
        parent = draw(st.integers(0, len(made)))
        token = draw(st.integers(0, 4))
        if (parent, token) not in taken:
            taken.add((parent, token))
            made.add(parent, token, made.score(parent) - draw(st.sampled_from([0.0, 0.5, 1.25])))
    return made


def paths(tree: TokenTree) -> Paths:
    found: list[tuple[int, ...]] = [()]
    for parent, token in zip(tree.parents, tree.tokens, strict=True):
        found.append((*found[parent], token))  # fails where a parent comes after its child
    scores = dict(zip(found[1:], tree.scores, strict=True))
    assert len(scores) == len(tree), "a path was drafted twice"
    return scores


def view(tokens: list[int], key: int = 0, **params: Any) -> Sequence:
    rules = SamplingParams(**{"temperature": 0, "seed": 3} | params)
    sampler = SequenceSampler(rules, tokens, seed=3, sample_index=0, vocab_size=VOCAB)
    return Sequence(key, list(tokens), len(tokens), sampler)


def text(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def want(views: list[Sequence], budget: int | list[int] = 64, depth: int | list[int] = 64) -> DraftRequest:
    budgets = [budget] * len(views) if isinstance(budget, int) else budget
    depths = [depth] * len(views) if isinstance(depth, int) else depth
    return DraftRequest(views, budgets, depths)


def requested(rows: abc.Sequence[tuple[Sequence, int, int]]) -> DraftRequest:
    """Of (sequence, budget, depth) each."""
    views, budgets, depths = zip(*rows, strict=True)
    return DraftRequest(views, budgets, depths)


def paths_of(trees: abc.Sequence[TokenTree], b: int = 0) -> Paths:
    """Every drafted path of one tree with its score."""
    return paths(trees[b])
