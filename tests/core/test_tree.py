"""`TokenTree` against a plain model of a tree: the list of its nodes' token paths."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.core.tree import PADDING, TokenTree

quick = settings(max_examples=60, deadline=None)

VOCAB = 4  # small, so that duplicate children occur


@st.composite
def trees(draw, max_batch: int = 3, max_nodes: int = 9, scored: bool = False) -> TokenTree:
    """A ragged batch of random trees; duplicate children and bare roots included."""
    batch = draw(st.integers(1, max_batch))
    parents, tokens, scores = [], [], []
    for _ in range(batch):
        count = draw(st.integers(0, max_nodes))
        parents.append([draw(st.integers(0, i)) for i in range(count)])
        tokens.append(draw(st.lists(st.integers(0, VOCAB - 1), min_size=count, max_size=count)))
        scores.append(draw(st.lists(st.integers(-5, 0).map(float), min_size=count, max_size=count)))
    roots = draw(st.lists(st.integers(0, VOCAB - 1), min_size=batch, max_size=batch))
    source = [[i % 7 for i in range(len(row))] for row in tokens]
    return TokenTree.from_parents(roots, parents, tokens, source, scores if scored else None)


def paths_of(tree: TokenTree, b: int) -> list[list[int]]:
    """Nodes from the root to each node, found by following parents one by one."""
    found = []
    for node in range(tree.counts[b]):
        path = [node]
        while tree.parents[b][path[0]] != PADDING:
            path.insert(0, tree.parents[b][path[0]])
        found.append(path)
    return found


@quick
@given(trees())
def test_views_agree_with_following_parents(tree):
    tree.check()
    for b in range(len(tree.counts)):
        paths, tokens, mask = paths_of(tree, b), tree.path_tokens(b).tolist(), tree.ancestor_mask(b)
        assert tree.depths()[b] == [len(path) - 1 for path in paths]
        for node, path in enumerate(paths):
            assert [t for t in tokens[node] if t >= 0] == [tree.tokens[b][n] for n in path[1:]]
            assert mask[node].nonzero().flatten().tolist() == path
    chains = [row == [*range(-1, len(row) - 1)] for row in tree.parents]
    assert tree.is_chain == all(chains)


@quick
@given(trees(scored=True), st.data())
def test_kept_nodes_keep_their_paths_sources_and_scores(tree, data):
    nodes = []
    for b, count in enumerate(tree.counts):
        picked = {n for n in range(count) if data.draw(st.booleans())}
        nodes.append(sorted({0}.union(*(paths_of(tree, b)[n] for n in picked))))
    cut = tree.subset(nodes)
    replace(cut, checked=False).check()
    for b, own in enumerate(nodes):
        before, after = paths_of(tree, b), paths_of(cut, b)
        for new, old in enumerate(own):
            assert [cut.tokens[b][n] for n in after[new]] == [tree.tokens[b][n] for n in before[old]]
            assert (cut.sources[b][new], cut.scores[b][new]) == (tree.sources[b][old], tree.scores[b][old])
    sampled = replace(tree, q=torch.ones(len(tree.counts), max(tree.counts), VOCAB))
    assert sampled.subset([range(count) for count in tree.counts]).q is None


@pytest.mark.parametrize(
    "broken",
    [
        {"parents": [[-1, 0, 2]]},
        {"parents": [[-1, 0, -1]]},
        {"parents": [[0, 0, 0]]},
        {"tokens": [[1, 2]]},
        {"sources": [[0, 0]]},
        {"counts": [2]},
        {"scores": [[0.0, 1.0, float("nan")]]},
        {"scores": [[0.0, 1.0]]},
        {"tokens": [[]], "parents": [[]], "sources": [[]], "counts": [0]},
    ],
    ids=str,
)
def test_check_finds_each_broken_invariant(broken):
    right = TokenTree([[1, 2, 3]], [[-1, 0, 0]], [[0, 0, 0]], [3])
    right.check()
    with pytest.raises(ConfigError):
        replace(right, checked=False, **broken).check()
