"""Sessions of several drafters as one: what is drafted below a node is what the parts say there, merged."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from paceline.core.sampling import SamplingParams
from paceline.drafters.base import SequenceView
from paceline.drafters.hybrid_sessions import HybridSessions
from paceline.drafters.sessions import ROOT, Ask, Opening
from paceline.drafters.text_sessions import TextSessions

VOCAB = 50


class Rule:
    """Continues a text by draws from its last tokens; some texts it does not know."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.left: list[int] = []

    def says(self, text: Sequence[int], width: int) -> list[tuple[int, float]]:
        draw = random.Random(f"{self.seed} {[*text][-3:]}")
        tokens = draw.sample(range(6), min(width, draw.randrange(4)))
        return [(token, -draw.random() * (place + 1)) for place, token in enumerate(tokens)]

    def continuations(self, sequence: SequenceView, path: Sequence[int], width: int) -> list[tuple[int, float]]:
        return self.says([*sequence.tokens, *path], width)

    def release(self, keys: Sequence[int]) -> None:
        self.left += keys


def merged(rules: Sequence[Rule], text: Sequence[int], width: int) -> dict[int, float]:
    """The parts' tokens behind a text with the highest chance of each, the likeliest ones."""
    found: dict[int, float] = {}
    for rule in rules:
        for token, log_q in rule.says(text, width):
            found[token] = max(log_q, found.get(token, log_q))
    return dict(sorted(found.items(), key=lambda item: -item[1])[:width])


@pytest.mark.parametrize("seed", range(12))
def test_trees_of_several_drafters_are_merged_below_every_node(seed: int) -> None:
    draw = random.Random(seed)
    rules = [Rule(1), Rule(2), Rule(3)]
    sessions = HybridSessions([TextSessions(rule, VOCAB, ()) for rule in rules])
    text: list[int] = [7, 3, 1]
    nodes: dict[int, list[int]] = {ROOT: []}
    sessions.open(Opening(5, text, 3, SamplingParams(temperature=0, max_tokens=99), 0, 0))
    grown_nodes = shared = rerooted = 0
    for _ in range(40):
        width = draw.randint(1, 4)
        wanted = draw.sample([*nodes], min(len(nodes), draw.randint(1, 3)))
        given = [(draw.choice([*nodes]), 9 + draw.randrange(3))] if draw.random() < 0.3 else []
        (answer,) = sessions.grow([Ask(5, given, wanted, width)])
        for (parent, token), number in zip(given, answer.given, strict=True):
            nodes[number] = [*nodes[parent], token]
        below: dict[int, dict[int, float]] = {}
        for parent, number, token, log_q in zip(answer.parents, answer.nodes, answer.tokens, answer.log_q, strict=True):
            assert nodes.setdefault(number, [*nodes[parent], token]) == [*nodes[parent], token]
            below.setdefault(parent, {})[token] = log_q
        for parent in {*wanted, *answer.given}:
            expected = merged(rules, [*text, *nodes[parent]], width)
            assert below.get(parent, {}) == expected
            shared += len(expected) < sum(len(rule.says([*text, *nodes[parent]], width)) for rule in rules)
        grown_nodes += len(answer.nodes)
        if draw.random() < 0.3 and len(nodes) > 1:
            number = draw.choice([node for node in nodes if node != ROOT])
            path = nodes[number]
            sessions.reroot(5, number)
            text += path
            kept = {n: p[len(path) :] for n, p in nodes.items() if p[: len(path)] == path and n != number}
            nodes, rerooted = {ROOT: [], **kept}, rerooted + 1
        elif draw.random() < 0.1:
            token = draw.randrange(20)
            sessions.commit(5, [token])
            text, nodes = [*text, token], {ROOT: []}
    assert grown_nodes > 20 and shared and rerooted
    sessions.close(5)
    sessions.close(5)
    assert all(rule.left == [5] for rule in rules)


def test_nodes_that_are_not_there() -> None:
    sessions = HybridSessions([TextSessions(Rule(1), VOCAB, ())])
    sessions.open(Opening(1, [1], 1, SamplingParams(max_tokens=4), 0, 0))
    with pytest.raises(KeyError):
        sessions.grow([Ask(1, expand=[4])])
    with pytest.raises(KeyError):
        sessions.grow([Ask(1, given=[(4, 2)])])
    with pytest.raises(KeyError):
        sessions.grow([Ask(2)])
