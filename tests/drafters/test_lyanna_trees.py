"""Trees from a chain of logits, against the algorithms written out node by node."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kits.state import algorithm_1
from torch import Tensor

from paceline.core.tree import padded_paths
from paceline.drafters.base import SequenceView
from paceline.drafters.growth import Grower, Growth
from paceline.drafters.lyanna.trees import Bias, beam_sampling, token_info_sampling
from paceline.drafters.proposal import Proposal

V = 11
CASES = [(seed, levels, branches) for seed in range(6) for levels, branches in ((1, 3), (3, 1), (3, 2), (3, 4), (5, 3))]


def draw(seed: int, levels: int) -> tuple[Tensor, Tensor]:
    """Raw logits [levels, V], and a table of token-info [V, V]."""
    generator = torch.Generator().manual_seed(seed)
    made = [2 * torch.randn(n, V, generator=generator, dtype=torch.float64) for n in (levels, V)]
    return made[0], made[1]


def paths(tree: Proposal) -> dict[tuple[int, ...], float]:
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append((*found[parent], token))
    assert len({*found}) == len(found)
    return dict(zip(found[1:], tree.log_scores, strict=True))


def assert_same(found: dict[tuple[int, ...], float], wanted: dict[tuple[int, ...], float]) -> None:
    assert found.keys() == wanted.keys()
    for path, log_q in found.items():
        assert math.isclose(math.exp(log_q), wanted[path], rel_tol=1e-9)


def grown(chains: Sequence[tuple[int, Tensor]], branches: int, bias: Bias, rule: Any = None) -> list[Proposal]:
    """The trees of Algorithm 1 of roots and levels; ``rule`` stands in the place of a request's rules."""

    def ranked(logits: Tensor, paths: Any, positions: Any, noisy: bool) -> Tensor:
        return logits if rule is None else rule(logits, padded_paths(paths, logits.device))

    sampler: Any = SimpleNamespace(plain=rule is None, ranked=ranked)
    views = [SequenceView(i, [root], 1, sampler) for i, (root, _) in enumerate(chains)]
    growths = [Growth(v, 999, len(own), logits=own) for v, (_, own) in zip(views, chains, strict=True)]
    token_info_sampling(growths, Grower((1,) * 9, branches, "point"), bias)
    return [growth.draft for growth in growths]


@pytest.mark.parametrize(("seed", "levels", "branches"), CASES)
def test_token_info_sampling_is_algorithm_1(seed: int, levels: int, branches: int) -> None:
    """Of several sequences at once, of unlike depth, each as it would be alone."""
    drawn = [draw(100 * seed + i, levels - i % levels) for i in range(3)]
    table = drawn[0][1]
    chains = [(i + 2, logits) for i, (logits, _) in enumerate(drawn)]
    for (root, logits), tree in zip(chains, grown(chains, branches, lambda tokens: table[list(tokens)]), strict=True):
        assert_same(paths(tree), algorithm_1(logits, table, root, branches))
    (plain,) = grown(chains[:1], branches, lambda tokens: None)
    assert_same(paths(plain), algorithm_1(drawn[0][0], torch.zeros(V, V), 2, branches))


@pytest.mark.parametrize(("seed", "levels", "branches"), CASES)
def test_a_budget_keeps_the_likeliest_nodes_and_their_parents(seed: int, levels: int, branches: int) -> None:
    logits, table = draw(seed, levels)
    (tree,) = grown([(1, logits)], branches, lambda tokens: table[list(tokens)])
    whole = paths(tree)
    for budget in range(len(whole) + 2):
        kept = paths(tree.best(budget))
        assert len(kept) == min(budget, len(whole))
        assert all(path[:-1] in kept or len(path) == 1 for path in kept)
        left = [score for path, score in whole.items() if path not in kept]
        assert not left or not kept or max(left) <= min(kept.values())


def test_rules_see_the_paths_and_may_forbid() -> None:
    logits, table = draw(3, 3)
    seen: list[tuple[int, ...]] = []

    def rule(rows: Tensor, drafted: Tensor | None) -> Tensor:
        seen.extend([()] if drafted is None else map(tuple, drafted.tolist()))
        rows = rows.clone()
        rows[:, 2:] = -math.inf
        return rows

    found = paths(grown([(0, logits)], 4, lambda tokens: table[list(tokens)], rule)[0])
    assert {path[-1] for path in found} == {0, 1} and len(found) == 2 + 4 + 8
    assert [*map(len, seen)] == [0] + [1] * 2 + [2] * 4 and {*seen[1:]} <= found.keys()


def test_naive_beam_sampling_takes_the_likeliest_paths() -> None:
    """Against all paths of the levels' likeliest tokens, sorted; the example of fig. 6 (a) among them."""
    for seed in range(8):
        logits, _ = draw(seed, 3)
        q = logits.log_softmax(-1).topk(3, dim=-1)
        whole = {}
        for depth in (1, 2, 3):
            for picks in itertools.product(range(3), repeat=depth):
                path = tuple(int(q.indices[i, j]) for i, j in enumerate(picks))
                whole[path] = sum(float(q.values[i, j]) for i, j in enumerate(picks))
        order = sorted(whole, key=lambda path: -whole[path])
        for budget in (0, 1, 4, 12, 100):
            found = paths(beam_sampling(logits, 3, budget))
            assert found.keys() == {*order[:budget]}
            assert all(math.isclose(found[p], whole[p]) for p in found)
    figure = torch.tensor([[0.6, 0.3, 0.1], [0.7, 0.2, 0.1], [0.7, 0.2, 0.1]]).log()
    assert [*paths(beam_sampling(figure, 2, 4))] == [(0,), (0, 0), (1,), (0, 0, 0)]
    assert not len(beam_sampling(figure[:0], 2, 4))


def test_equal_scores_are_settled_by_order() -> None:
    (tree,) = grown([(0, torch.zeros(3, 4))], 2, lambda tokens: None)
    assert tree.parents == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
