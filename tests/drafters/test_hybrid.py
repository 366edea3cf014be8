"""The hybrid drafter: its trees, its choice between look-up and draft model, and the books it keeps on both."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from draft_kit import paths, paths_of, proposals, text, view, want
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import VOCAB, assemble, hybrid, run, tiny_config, tiny_decoder

from paceline.core.sampling import SamplingParams
from paceline.drafters.base import SequenceView, StepFeatures
from paceline.drafters.hybrid import DRAFT, LONGEST, RETRY, SUFFIX, Hybrid, _Book, _Chances, _joined
from paceline.drafters.proposal import Proposal

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"depth": 4, "lookup": 6},
    "tree": {"depth": 4, "lookup": 6, "topk": 3, "nodes": 9},
}
REPEATED = text(12) * 3 + text(12)[:5]


def bound(drafter: Hybrid, sequences: int = 4, tokens: int = 2000) -> Hybrid:
    drafter.bind(tiny_decoder().info("tiny"), sequences, tokens, torch.device("cpu"))
    return drafter


def told(drafter: Hybrid, sequence: SequenceView, new: list[int], accepted: int) -> None:
    """What a round tells the drafter after a step."""
    sequence.tokens += new
    drafter.observe(StepFeatures([sequence], [new], [accepted], [[*range(1, accepted + 1)]]))


@pytest.mark.parametrize("shape", SHAPES)
def test_trees_fit_whatever_is_accepted(shape: str) -> None:
    draw = random.Random(3)
    drafter = bound(hybrid(**SHAPES[shape]))
    views = [view(REPEATED, 1), view(text(20, 1), 2), view([5], 3)]
    met = set()
    for _ in range(25):
        budgets = [draw.choice([0, 1, 3, 64]) for _ in views]
        depths = [draw.choice([0, 1, 2, 64, 64]) for _ in views]
        tree = drafter.propose(want(views, budgets, depths))
        tree.check()
        for b, sequence in enumerate(views):
            found = paths_of(tree, b)
            assert int(tree.tokens[b, 0]) == sequence.tokens[-1]
            assert len(found) <= budgets[b] and max(map(len, found), default=0) <= depths[b]
            marks = tree.source[b, 1 : len(found) + 1].tolist()
            met |= {*marks}
            assert shape == "tree" or len({*marks}) <= 1
            path = draw.choice([(), *found])
            told(drafter, sequence, [*path, draw.choice(sequence.tokens)], len(path))
        drafter._draft._pool.check_integrity()  # type: ignore[union-attr]
    assert met == {DRAFT, SUFFIX}
    drafter.release([1, 2, 3])
    assert not drafter._books and not drafter._draft._states
    drafter._draft._pool.check_idle()  # type: ignore[union-attr]


def test_repeated_text_is_looked_up_and_fresh_text_drafted() -> None:
    drafter = bound(hybrid(depth=4, lookup=6))
    tree = drafter.propose(want([view(REPEATED, 1), view([*range(40)], 2)]))
    assert tree.source[0, 1:7].tolist() == [SUFFIX] * 6
    assert tree.tokens[0, 1:7].tolist() == text(12)[5:11]
    drafted = int(tree.num_nodes[1]) - 1
    assert drafted > 0 and tree.source[1, 1 : drafted + 1].tolist() == [DRAFT] * drafted


def test_a_tree_holds_both() -> None:
    drafter = bound(hybrid(depth=3, lookup=4, topk=2, nodes=10, pass_cost=0.0))
    # Only two tokens match, and what follows them is no favourite of the draft model.
    sequence = view([*text(20, 4), 3, 9, *text(6, 5), 3, 9], 1)
    tree = drafter.propose(want([sequence]))
    marks = tree.source[0, 1 : int(tree.num_nodes[0])].tolist()
    assert {*marks} == {DRAFT, SUFFIX}
    looked_up = [p for p, mark in zip(paths_of(tree), marks, strict=True) if mark == SUFFIX]
    assert looked_up[0][0] == text(6, 5)[0]


def test_chances_start_with_a_guess_and_follow_what_happens() -> None:
    chances = _Chances()
    before = [chances.of(m) for m in range(LONGEST + 3)]
    assert before == sorted(before) and all(0 <= p <= 1 for p in before)
    assert before[LONGEST] == before[LONGEST + 2]  # longer matches are not told apart
    for _ in range(200):
        chances.learn(4, True)
        chances.learn(LONGEST + 9, False)
    assert chances.of(4) > 0.97 and chances.of(LONGEST) < 0.03
    assert chances.of(5) == before[5]


def test_a_look_up_is_judged_up_to_its_first_wrong_token() -> None:
    drafter = bound(hybrid(depth=4, lookup=6))
    sequence = view(REPEATED, 1)
    drafter.propose(want([sequence]))
    guess = drafter._books[1].lookup
    assert guess is not None
    tries = drafter._chances.tries[:]
    hits = drafter._chances.hits[:]
    told(drafter, sequence, [guess.tokens[0], (guess.tokens[1] + 1) % VOCAB], 1)
    depth = min(guess.matched, LONGEST)
    right, wrong = depth, min(depth + 1, LONGEST)
    touched = {m for m in range(LONGEST + 1) if drafter._chances.tries[m] != tries[m]}
    assert touched == {right, wrong}
    assert drafter._books[1].lookup is None  # judged once
    if right != wrong:
        assert drafter._chances.of(right) > hits[right] / tries[right]
        assert drafter._chances.of(wrong) < hits[wrong] / tries[wrong]


def test_a_draft_model_that_does_not_pay_rests_and_is_tried_again() -> None:
    drafter = bound(hybrid(depth=4, pass_cost=1.0))
    sequence = view([*range(40)], 1)
    asked = []
    for step in range(3 * RETRY + 1):
        drafter.propose(want([sequence]))
        asked.append(drafter._books[1].drafted)
        told(drafter, sequence, [40 + step], 0)  # never right, never seen before
    assert [i for i, a in enumerate(asked) if a] == [0, RETRY, 2 * RETRY, 3 * RETRY]


def test_a_draft_model_that_pays_is_asked_every_time() -> None:
    drafter = bound(hybrid(depth=4, pass_cost=0.1))
    sequence = view([*range(30)], 1)
    for step in range(20):
        drafter.propose(want([sequence]))
        assert drafter._books[1].drafted
        told(drafter, sequence, [30 + 3 * step + i for i in range(3)], 2)
    assert drafter._books[1].gain == pytest.approx(2, abs=0.05)


def test_nothing_is_learned_from_a_step_without_room_for_drafts() -> None:
    """Neither a budget of zero nor a full pool says anything about what a pass costs or gains."""
    crowded = bound(hybrid(depth=4), sequences=1, tokens=16)
    for drafter, length, budget in ((bound(hybrid(depth=4)), 9, 0), (crowded, 80, 64)):
        sequence = view([*range(length)], 1)
        for step in range(3):
            tree = drafter.propose(want([sequence], budget))
            assert tree.num_nodes.tolist() == [1]
            told(drafter, sequence, [(length + step) % VOCAB], 0)
        book = drafter._books[1]
        assert (book.passes, book.gain, book.drafted) == (_Book().passes, _Book().gain, False)


@given(proposals(), proposals(), st.integers(0, 14))
@settings(max_examples=150, deadline=None)
def test_joined_trees_keep_the_best_of_both_and_say_whose_it_is(draft: Proposal, lookup: Proposal, budget: int) -> None:
    ours, theirs = paths(draft), paths(lookup)
    tree, marks = _joined(draft, lookup, budget)
    kept = paths(tree)
    assert len(kept) == len(marks) == min(budget, len(ours | theirs))
    for (path, score), mark in zip(kept.items(), marks, strict=True):
        assert mark == (DRAFT if path in ours else SUFFIX)
        assert len(path) == 1 or score <= kept[path[:-1]]
        assert score <= max(ours.get(path, -99.0), theirs.get(path, -99.0))
    assert paths(draft) == ours and paths(lookup) == theirs  # both untouched


@pytest.mark.parametrize("shape", SHAPES)
def test_a_short_draft_context_leaves_the_look_up(shape: str) -> None:
    """Where the draft model's context ends, the look-up goes on, and the answer is the plain one."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    requests = [(REPEATED, params), (text(7), params)]
    engine = assemble(hybrid(target={"config": tiny_config(max_position=48)}, noise=0.0, **SHAPES[shape]))
    outputs = run(engine, requests)
    assert engine.round.failure is None  # type: ignore[attr-defined]
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in run(assemble(), requests)]
