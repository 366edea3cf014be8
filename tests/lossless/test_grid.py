"""Speculative output is plain output: every drafter x every sampling option x batches of 1, 3 and 8.

In float64 with dense attention there is nothing to forgive: ids, finish reasons and texts are compared with
``==``, log-probabilities to nine digits, against an oracle that recomputes the whole text for every token.
Each test also asserts that it met what the grid is for; without that it might have tested nothing.
"""

from __future__ import annotations

import pytest
from grid import (
    CONDITIONS,
    CONFIG,
    DRAFTERS,
    FAILING,
    NORMED,
    OPTIONS,
    PROMPTS,
    SIZES,
    TWINS,
    WHOLE,
    Witness,
    case,
    config_of,
    play,
    target,
)
from kits.tiny import assemble, run
from kits.verdicts import gullible

from paceline.core.sampling import SamplingParams
from paceline.model.families import DecoderConfig

NAMES = list(OPTIONS)
SETTINGS = list(CONDITIONS)
ENDING = {n for n in NAMES if n.startswith(("eos_", "stop_"))}  # where in a path they end is luck: more of them

# Drafted tokens that passes must have accepted, every number of them.
ACCEPTED = {
    "none": set(),
    "empty": set(),
    "always_wrong": {0},
    "chain_coupled": {*range(5)},
    "chain_point": {*range(5)},
    "chain_drawn": {*range(4)},
    "static_coupled": {*range(4)},
    "static_point": {*range(4)},
    "static_drawn": {*range(3)},
    "dynamic_coupled": {*range(5)},
    "dynamic_point": {*range(4)},
    "streams_tree": {0, 1, 2},
    "streams_frontier": {0, 1, 2},
    "streams_point": {0, 1, 2},
    "streams_threshold": {0, 1},
    "streams_count": {0, 1},
    "lyanna": {0, 1, 2},
    "lyanna_fused": {0, 1, 2},
    "eagle": {0, 1, 2},
    "medusa": {0, 1, 2},
    "medusa_point": {0, 1, 2},
    "hybrid": {*range(5)},
    "hybrid_trees": {*range(5)},
    "partly_right": {*range(8)},
    "too_deep": {1, 2, 3, 5, 6, 7},
    "later_sibling": {*range(3)},
    "duplicates": {*range(4)},
    "magicdec": {*range(5)},
    "magicdec_drawn": {*range(4)},
    "pipeline_none": {0},
}
assert ACCEPTED.keys() <= DRAFTERS.keys()
EXACTLY = {"none", "empty", "always_wrong", "pipeline_none"}  # these must have accepted nothing else

ALWAYS = {"a chunk edge", "a prefix hit", "preemption"}
DRAFTED = {"drafts cut by the pool"}
TAKEN = {"drafts accepted under penalties"}
ENDED = {"EOS inside a path", "a stop str inside a path", "a stop int inside a path"}
BRANCHED = {"a sibling that is not the first"}
KNOWING = {"always_right", "greedy_eater"}  # they know the answer: paths cross every end
PIPED = {
    "pipeline_none": {"a stop"},
    "pipeline_noisy": {"a stop with levels in flight", "a partial refill", "a late sibling"},
}
FUSED = {"lyanna_fused", "lyanna_point"}  # a fresh and a re-sampled tree below one root
BRANCHING = (
    {"streams_tree", "streams_frontier", "streams_point", "streams_count"}
    | {"static_coupled", "static_point", "static_drawn", "dynamic_coupled", "dynamic_point"}
    | FUSED
    | {"lyanna", "eagle", "hybrid_trees", "medusa", "medusa_point", "greedy_eater", "later_sibling", "random_trees"}
)
assert DRAFTERS.keys() >= BRANCHING


def _must_meet(drafter: str) -> set[str]:
    """What any run of the grid with this drafter must have met."""
    marks = set(ALWAYS)
    if drafter.startswith("pipeline"):
        return marks | PIPED.get(drafter, {"a stop with levels in flight"})
    if drafter != "none":
        marks |= DRAFTED
    if drafter not in EXACTLY:
        marks |= TAKEN
    if drafter in KNOWING:
        marks |= ENDED
    if drafter in BRANCHING:
        marks |= BRANCHED
    if drafter in FUSED:
        marks |= {"a node of a second source", "a duplicate merged"}
    if drafter in FAILING:
        marks |= {"a failed drafter"}
    return marks


def _assert_met(drafter: str, witness: Witness, least: int) -> None:
    assert witness.checks >= least
    assert _must_meet(drafter) <= witness.marks, _must_meet(drafter) - witness.marks
    wanted = ACCEPTED.get(drafter, {1, 2} if drafter in KNOWING else {1} if drafter in FAILING else {0, 1})
    assert wanted <= witness.accepted, wanted - witness.accepted
    assert drafter not in EXACTLY or witness.accepted <= wanted


@pytest.mark.parametrize("config", [CONFIG, WHOLE, NORMED], ids=["windowed", "whole", "normed"])
def test_the_target_varies(config: DecoderConfig) -> None:
    """A looping target would make every drafter right and every test empty."""
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    outputs = run(assemble(decoder=target(config)), [(prompt, params) for prompt in PROMPTS])
    assert all(len(set(o.outputs[0].token_ids)) >= 20 for o in outputs)


@pytest.mark.parametrize(
    "drafter", [pytest.param(name, marks=pytest.mark.full if name in TWINS else ()) for name in DRAFTERS]
)
def test_every_option(drafter: str) -> None:
    """All options once, a share of them in each condition, different options and prompts in one batch."""
    witness, config = Witness(), config_of(drafter)
    shift = list(DRAFTERS).index(drafter)  # so that over all drafters each option meets each condition
    for k, condition in enumerate(SETTINGS):
        names = NAMES[(k + shift) % len(SETTINGS) :: len(SETTINGS)]
        cases = [case(n, (3 * NAMES.index(n) + 1) % 8, config) for n in names]
        cases += [case(n, (3 * NAMES.index(n) + 2) % 8, config) for n in names if n in ENDING]
        play(drafter, condition, cases, witness, encore=3)
    _assert_met(drafter, witness, least=len(NAMES))


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_full_product(drafter: str) -> None:
    """Every option in batches of 1, 3 and 8: the large ones with few rows, together and in a tight pool."""
    witness, config = Witness(), config_of(drafter)
    for index, option in enumerate(NAMES):
        for size in SIZES:
            cases = [case(option, (index + i) % len(PROMPTS), config) for i in range(size)]
            conditions = SETTINGS[1:] if size == max(SIZES) else [SETTINGS[(index + size) % len(SETTINGS)]]
            for condition in conditions:
                play(drafter, condition, cases, witness, encore=1)
    _assert_met(drafter, witness, least=len(NAMES) * (3 * 8 + 3 + 1))


def test_a_wrong_verifier_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grid has teeth: a verifier that takes every first child is caught at once."""
    from paceline.engine import verification

    monkeypatch.setitem(verification.VERIFIERS, "sample_and_match", verification.VerifierKind(gullible))
    with pytest.raises(AssertionError):
        play("always_wrong", "together", [case("greedy", i) for i in range(3)], Witness())
