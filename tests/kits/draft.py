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
from paceline.draft.proposal import Proposal

Paths = dict[tuple[int, ...], float]


@st.composite
def proposals(draw: st.DrawFn) -> Proposal:
    """Any tree of up to 12 nodes, siblings apart, no score above its parent's, few different scores."""
    made = Proposal()
    taken: set[tuple[int, int]] = set()
    for _ in range(draw(st.integers(0, 12))):
        parent = draw(st.integers(0, len(made)))
        token = draw(st.integers(0, 4))
        if (parent, token) not in taken:
            taken.add((parent, token))
            above = made.log_scores[parent - 1] if parent else 0.0
            made.add(parent, token, above - draw(st.sampled_from([0.0, 0.5, 1.25])))
    return made


def paths(proposal: Proposal) -> Paths:
    found: list[tuple[int, ...]] = [()]
    for parent, token in zip(proposal.parents, proposal.tokens, strict=True):
        found.append((*found[parent], token))  # fails where a parent comes after its child
    scores = dict(zip(found[1:], proposal.log_scores, strict=True))
    assert len(scores) == len(proposal)
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


def paths_of(tree: TokenTree, b: int = 0) -> dict[tuple[int, ...], float]:
    """Every drafted path with its score."""
    assert tree.scores is not None
    paths: list[tuple[int, ...]] = [()]
    parents, tokens = tree.parents[b], tree.tokens[b]
    for node in range(1, tree.counts[b]):
        paths.append((*paths[parents[node]], tokens[node]))
    found = dict(zip(paths[1:], tree.scores[b][1:], strict=True))
    assert len(found) == len(paths) - 1, "a path was proposed twice"
    return found
