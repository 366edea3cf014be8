"""Proposals in plain Python: the best nodes are a tree, a graft holds every path of both."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.draft import paths, proposals

from paceline.core.errors import ConfigError
from paceline.drafters.proposal import Proposal, to_tree


@given(proposals(), st.integers(0, 14))
@settings(max_examples=150, deadline=None)
def test_the_best_nodes_are_a_tree_and_none_left_out_is_better(whole: Proposal, budget: int) -> None:
    before, kept = paths(whole), paths(whole.best(budget))
    assert len(kept) == min(budget, len(whole))
    assert kept.items() <= before.items()
    assert all(path[:-1] in kept for path in kept if len(path) > 1)
    left = [score for path, score in before.items() if path not in kept]
    assert not left or not kept or max(left) <= min(kept.values())
    assert [*kept] == [path for path in before if path in kept]  # in their order
    assert [*before] == [*paths(whole)]  # and the whole is untouched
    assert [[*before][i] for i in whole.ranked(budget)] == [*kept]


@given(proposals(), proposals())
@settings(max_examples=150, deadline=None)
def test_a_graft_holds_every_path_of_both_once(one: Proposal, other: Proposal) -> None:
    before, added = paths(one), paths(other)
    one.graft(other, 7)
    both = paths(one)
    assert both.keys() == before.keys() | added.keys()
    assert {p: both[p] for p in before} == before  # what is there stays as it is
    for path in added.keys() - before.keys():  # a new node is as likely, given its parent, as it was
        above, above_there = (scores[path[:-1]] if len(path) > 1 else 0.0 for scores in (both, added))
        assert math.isclose(both[path] - above, added[path] - above_there, abs_tol=1e-9)
    assert [*both][: len(before)] == [*before]
    assert one.sources == [0] * len(before) + [7] * (len(both) - len(before)) or not before


@given(st.lists(proposals(), min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_a_tensor_tree_holds_the_same_nodes(several: list[Proposal]) -> None:
    tree = to_tree([*range(50, 50 + len(several))], several)
    tree.check()
    assert tree.counts == [len(p) + 1 for p in several]
    assert tree.scores is not None
    for b, proposal in enumerate(several):
        stop = len(proposal) + 1
        assert tree.tokens[b][:stop] == [50 + b, *proposal.tokens]
        assert tree.parents[b][1:stop] == proposal.parents
        assert tree.scores[b][1:stop] == proposal.log_scores
        assert tree.sources[b][1:stop] == [0] * len(proposal)
    assert [row[0] for row in tree.tokens] == [*range(50, 50 + len(several))]


def test_expected_accepted_adds_up_the_chances_of_all_paths() -> None:
    proposal = Proposal()
    first = proposal.add(0, 5, math.log(0.5))
    proposal.add(first, 6, math.log(0.25))
    proposal.add(0, 7, math.log(0.125))
    assert proposal.expected_accepted == pytest.approx(0.875)
    assert not proposal.is_chain
    assert proposal.best(2).is_chain and Proposal().is_chain


def test_what_is_no_tree_is_refused() -> None:
    for score in (math.nan, "a"):
        with pytest.raises((ConfigError, TypeError)):
            to_tree([4], [Proposal([5], [0], [score])])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="columns of lengths"):
        to_tree([4], [Proposal([5, 6], [0], [-0.1, -0.2])])
