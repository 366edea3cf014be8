"""Chances of all nodes in one compiled call, against the long way: number for number."""

from __future__ import annotations

import math
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.budget_world import STEP_COSTS, World, run
from kits.native import needs_kernels

from paceline import kernels
from paceline.core.tree import TokenTree
from paceline.engine.auto import AutoBudget
from paceline.engine.chances import UNKNOWN, Chances, History, RequestKind, odds_of, weigh
from paceline.engine.costs import DraftCosts

pytestmark = needs_kernels
KINDS = 2
# Token, kind, place of the parent, and log of its chance given that one; nothing is said of some.
node = st.tuples(
    st.integers(0, 2), st.integers(0, KINDS - 1), st.integers(0, 30), st.one_of(st.floats(-9, 0.1), st.just(math.nan))
)
steps = st.lists(
    st.tuples(st.lists(st.lists(node, max_size=9), min_size=3, max_size=3), st.booleans(), st.integers(0, 20)),
    min_size=1,
    max_size=12,
)


def histories() -> list[Any]:
    """Three sequences of two kinds of requests."""
    kinds = [[Chances() for _ in range(KINDS)] for _ in range(2)]
    views: list[Any] = [SimpleNamespace(key=key, tokens=[0, 1]) for key in range(3)]
    return [History(view, RequestKind(kinds[view.key // 2]), len(kinds[0]), room=9) for view in views]


def trees(made: list[list[tuple[int, int, int, float]]], own: list[Any]) -> TokenTree:
    tokens = [[history.view.tokens[-1], *(n[0] for n in row)] for history, row in zip(own, made, strict=True)]
    parents = [[-1, *(n[2] % (i + 1) for i, n in enumerate(row))] for row in made]
    scores = []
    for row, above in zip(made, parents, strict=True):
        score = [0.0]
        for i, n in enumerate(row, start=1):
            score.append(score[above[i]] + n[3])
        scores.append(score)
    return TokenTree(tokens, parents, [[0, *(n[1] for n in row)] for row in made], [*map(len, tokens)], scores)


def state(own: list[Any]) -> list[Any]:
    return [
        (
            history.shift.tobytes(),
            [chances.table.tobytes() for chances in history.kind.chances],
        )
        for history in own
    ]


@settings(max_examples=60, deadline=None)
@given(steps)
def test_compiled_chances_are_those_of_the_long_way(steps: Any) -> None:
    """Trees of several sequences, with and without estimates; judged by texts that go on as drafted or do not."""
    fast, slow, library = histories(), histories(), kernels.library()
    for made, scored, limit in steps:
        lists = trees(made, fast)
        nodes = sum(map(len, made))
        prices = array("d", [0.07 * k for k in range(1 + min(limit, nodes))])
        one, other = (
            weigh(of, own, lists, lists.scores if scored else None, prices, every=limit == 3)
            for of, own in ((library, fast), (None, slow))
        )
        assert one.kept == other.kept and [*one.counts] == [*other.counts]
        assert [*one.gains] == [*other.gains] and (one.tokens, one.levels) == (other.tokens, other.levels)
        assert state(fast) == state(slow)
        for key, row in enumerate(made):  # as many tokens as the tree has nodes; those of some path
            for own in (fast, slow):
                own[key].view.tokens += [n[0] for n in row][: limit % 7]


def test_the_nodes_that_are_worth_most_are_kept() -> None:
    """Of two texts, by what so many rows cost; a node's parent is kept with it."""
    own = histories()[:2]
    made = [[(1, 0, 0, math.log(0.9)), (1, 0, 1, math.log(0.9)), (2, 0, 0, -9.0)], [(1, 1, 0, math.log(0.6))]]
    for prices, kept in (
        ([0.0] * 5, [[0, 1, 2, 3], [0, 1]]),
        ([0.4 * k for k in range(5)], [[0, 1, 2], [0, 1]]),
        ([0.0, 0.1, 0.2, 2.0, 3.0], [[0, 1, 2], [0]]),
        ([0.0, 0.1, 0.2], [[0, 1, 2], [0]]),
        ([2.0 * k for k in range(5)], [[0], [0]]),
    ):
        found = weigh(kernels.library(), own, trees(made, own), trees(made, own).scores, array("d", prices))
        assert found.kept == kept, prices
        count = sum(map(len, kept)) - 2
        assert sum(found.gains) == pytest.approx(found.tokens - prices[count])


@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("costs", ["flat", "linear"])
def test_a_budget_decides_the_same_in_both_ways(costs: str, batch: int) -> None:
    histories = []
    for library in (kernels.library(), None):
        world = World(STEP_COSTS[costs], acceptance=lambda _: 0.6, spread=0.3, claimed=0.7, offer=0.8)
        budget = AutoBudget(world.table(), cap=8, draft_costs=[DraftCosts()])
        budget._library = library
        ran = run(budget, world, batch, 150)
        histories.append((ran.history, ran.asked, ran.ms, budget.describe()))
    assert histories[0] == histories[1] and sum(histories[0][0] + histories[0][1]) > 100


@pytest.mark.parametrize("column", ["parents", "sources", "scores"])
def test_what_is_no_tree_is_refused(column: str) -> None:
    own = histories()
    lists = trees([[(1, 0, 0, -1.0)], [(1, 0, 0, -1.0), (1, 1, 1, -0.5)], []], own)
    scores: Any = lists.scores
    if column == "scores":
        scores = [row[:1] for row in scores]
    else:
        getattr(lists, column)[1][2] = 5
    with pytest.raises(ValueError, match="trees whose"):
        weigh(kernels.library(), own, lists, scores, array("d", [0.0] * 4))
    assert not any(history.count for history in own)


def test_more_nodes_than_there_is_room_for_are_refused() -> None:
    own = histories()[:1]
    with pytest.raises(ValueError, match="more than the cap"):
        weigh(kernels.library(), own, trees([[(1, 0, 0, -1.0)] * 10], own), None, array("d", [0.0]))


def test_of_a_node_without_an_estimate_nothing_is_assumed() -> None:
    assert odds_of(math.nan) == UNKNOWN and odds_of(math.log(0.5)) == pytest.approx(1.0) and odds_of(1.0) == 1e4
