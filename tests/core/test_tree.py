"""`TokenTree` against a plain model of a tree: the list of its nodes' token paths."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.core.tree import TokenTree

quick = settings(max_examples=60, deadline=None)

VOCAB = 4  # small, so that duplicate children occur


@st.composite
def trees(draw, max_nodes: int = 9) -> TokenTree:
    """A random tree; duplicate children and the bare root included."""
    count = draw(st.integers(0, max_nodes))
    tokens = draw(st.lists(st.integers(0, VOCAB - 1), min_size=count, max_size=count))
    scores = draw(st.lists(st.integers(-5, 0).map(float), min_size=count, max_size=count))
    return TokenTree(tokens, [draw(st.integers(0, i)) for i in range(count)], scores, [i % 7 for i in range(count)])


def paths_of(tree: TokenTree) -> list[list[int]]:
    """Nodes from the root to each node, found by following parents one by one."""
    found = []
    for node in range(len(tree) + 1):
        path = [node]
        while path[0]:
            path.insert(0, tree.parents[path[0] - 1])
        found.append(path)
    return found


@quick
@given(trees())
def test_views_agree_with_following_parents(tree):
    tree.check()
    paths, tokens, mask = paths_of(tree), tree.path_tokens().tolist(), tree.ancestor_mask()
    assert tree.depths() == [len(path) - 1 for path in paths] and tree.depth == max(tree.depths())
    for node, path in enumerate(paths):
        assert [t for t in tokens[node] if t >= 0] == [tree.tokens[n - 1] for n in path[1:]]
        assert mask[node].nonzero().flatten().tolist() == path and tree.path(node) == path[1:]
    assert tree.is_chain == (tree.parents == [*range(len(tree))])


@quick
@given(trees(), st.data())
def test_kept_nodes_keep_their_paths_sources_and_scores(tree, data):
    paths = paths_of(tree)
    own = sorted({n for path in paths if data.draw(st.booleans()) for n in path if n})
    cut = replace(tree, q={0: torch.ones(VOCAB)}).subset(own)
    cut.check()
    for after, old in zip(paths_of(cut)[1:], own, strict=True):
        assert [cut.tokens[n - 1] for n in after[1:]] == [tree.tokens[n - 1] for n in paths[old][1:]]
        assert cut.sources[after[-1] - 1] == tree.sources[old - 1] and cut.score(after[-1]) == tree.score(old)
    assert not cut.q


@pytest.mark.parametrize(
    "broken",
    [
        {"parents": [0, 2]},
        {"parents": [0, -1]},
        {"parents": [1, 0]},
        {"tokens": [1]},
        {"sources": [0]},
        {"scores": [0.0, float("nan")]},
        {"scores": [0.0]},
    ],
    ids=str,
)
def test_check_finds_each_broken_invariant(broken):
    right = TokenTree([1, 2], [0, 0])
    right.check()
    with pytest.raises(ConfigError):
        replace(right, **broken).check()
