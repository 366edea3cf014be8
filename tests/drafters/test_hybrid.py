"""The hybrid drafter: which drafters it takes, what it asks of whom, and what becomes of their nodes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.draft import paths, proposals, text, view, want
from kits.tiny import hybrid, tiny_decoder

from paceline.core.errors import ConfigError
from paceline.core.tree import TokenTree
from paceline.draft.hybrid import Hybrid, HybridConfig

SUFFIX, DRAFT = 0, 1
REPEATED = text(12) * 3 + text(12)[:5]


def bound(drafter: Hybrid, sequences: int = 4, tokens: int = 2000) -> Hybrid:
    drafter.bind(tiny_decoder().info("tiny"), sequences, tokens, torch.device("cpu"))
    return drafter


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ("", "empty"), ("suffix+", "empty"), ("suffix;depth=none", "depth"), ("suffix;wide=3", "wide"),
        ("suffix+hybrid:m", "hybrids"),
    ],
)  # fmt: skip
def test_parts_that_are_none_are_refused(parts: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        HybridConfig(parts=parts)


def test_with_a_fixed_budget_a_sure_look_up_spares_the_network() -> None:
    drafter = bound(hybrid())
    sure = view(REPEATED * 4, 1)
    first, second = drafter.draft(want([sure, view([*range(40)], 2)]))
    assert {*first.sources} == {SUFFIX} and DRAFT in second.sources


@given(proposals(), proposals(), st.integers(0, 14))
@settings(max_examples=150, deadline=None)
def test_merged_trees_keep_the_best_and_say_whose_it_is(first: TokenTree, second: TokenTree, budget: int) -> None:
    ours, theirs = paths(first), paths(second)
    draft = TokenTree()
    for source, found in enumerate((first, second)):
        draft.graft(found, source)
    whole = paths(draft)
    assert whole.keys() == ours.keys() | theirs.keys()
    draft = draft.best(budget)
    kept = paths(draft)
    assert len(kept) == len(draft.sources) == min(budget, len(whole))
    if kept and len(kept) < len(whole):
        assert min(kept.values()) >= max(score for path, score in whole.items() if path not in kept)
    for (path, score), mark in zip(kept.items(), draft.sources, strict=True):
        assert mark == (0 if path in ours else 1)
        above = kept[path[:-1]] if len(path) > 1 else 0.0
        own = ours if path in ours else theirs
        given_ = own[path] - (own[path[:-1]] if len(path) > 1 else 0.0)
        assert math.isclose(score - above, given_, abs_tol=1e-9)
    assert paths(first) == ours and paths(second) == theirs  # both untouched
