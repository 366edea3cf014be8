"""Product trees of levels."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from kits.draft import Paths, paths, text, view
from kits.tiny import VOCAB
from torch import Tensor

from paceline.core.sequence import Sequence
from paceline.draft.levels import best_levels, cut, product_trees

LEVELS, K = 3, 4
RULES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "warm": {"temperature": 0.8},
    "cut": {"temperature": 1.1, "top_k": 9, "top_p": 0.9},
    "penalised": {"temperature": 0.9, "frequency_penalty": 0.7},
}


def draw(seed: int, levels: int = LEVELS) -> Tensor:
    """[levels, VOCAB] logits."""
    return 2 * torch.randn(levels, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(seen: Sequence, logits: Tensor, coupled: bool, k: int = K) -> Paths:
    """Every path through the k best tokens of each level, and the sum of its log q."""
    first, sampler = len(seen.tokens), seen.sampler
    if sampler.plain:
        scores = logits
    elif coupled:
        scores = sampler.scores(logits, None, [first + j for j in range(len(logits))])
    else:
        scores = sampler.process(logits)
    log_q = scores.log_softmax(-1)
    best = [row.topk(k).indices.tolist() for row in log_q]
    found: Paths = {}
    for depth in range(1, len(logits) + 1):
        for path in itertools.product(*best[:depth]):
            score = sum(float(log_q[j, token]) for j, token in enumerate(path))
            if score > float("-inf"):
                found[path] = score
    return found


def likeliest(whole: Paths, most: int) -> Paths:
    return {path: whole[path] for path in sorted(whole, key=lambda path: -whole[path])[:most]}


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("coupled", [False, True])
def test_product_trees_are_ranked_by_the_rules_and_noise_of_their_places(rules: str, coupled: bool) -> None:
    views = [view(text(7, key), key, **RULES[rules]) for key in range(3)]
    rows = [(views[0], draw(0), 9), (views[1], None, 9), (views[2], draw(2, 2), 5)]
    found = [paths(proposal) for proposal in product_trees(rows, K, coupled)]
    for (seen, logits, nodes), tree in zip(rows, found, strict=True):
        assert tree == pytest.approx({} if logits is None else likeliest(by_hand(seen, logits, coupled), nodes))
    short = best_levels([(views[0], draw(0))], K + 2, coupled)[0]
    assert paths(product_trees([(views[0], short, 9)], K, coupled)[0]) == found[0]
    assert cut(short, 1) == (short[0][1:], short[1][1:])
