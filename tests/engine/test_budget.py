"""Draft budgets: fixed, by batch size, and the automatic one in worlds without a model."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.budget_world import HARD, LOOKUP, NETWORK, RIGHT, STEP_COSTS, WRONG, Sequence, World, run
from kits.tiny import assemble, tiny_decoder

from paceline import LLM, SamplingParams
from paceline.core.errors import ConfigError
from paceline.core.tree import TokenTree
from paceline.draft.base import DrafterSpec
from paceline.engine import calibration
from paceline.engine.auto import FIRST_ROWS, LOOK_EVERY, PLAIN_EVERY, SHARE, AutoBudget
from paceline.engine.budget import AUTO, FixedBudget, StepRecord, parse_budget
from paceline.engine.calibration import Calibration, Fingerprint
from paceline.engine.chances import FIRST_GAIN, HORIZON, AskGain, Chances, History
from paceline.engine.costs import CostTable, DraftCosts, StepCosts, bucket, interpolate

PLAIN = FixedBudget(size=0)


def auto(world: World, cap: int = 8, **options: Any) -> AutoBudget:
    """An automatic budget over a world's costs."""
    costs = DraftCosts.of_network(world.table()) if world.level_ms > 0 else DraftCosts()
    return AutoBudget(world.table(), cap=cap, draft_costs=[costs], **options)


def gain(world: World, batch: int, steps: int, cap: int = 8) -> float:
    """Speed with the automatic budget over plain decoding's."""
    return run(auto(world, cap), world, batch, steps).speed / run(PLAIN, world, batch, steps).speed


# -- what a user may say


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (None, AUTO),
        ("auto", AUTO),
        (" AUTO ", AUTO),
        (0, 0),
        (8, 8),
        ("8", 8),
        ("1:8,4:4,16:0", ((1, 8), (4, 4), (16, 0))),
        ({4: 4, 1: 8}, ((1, 8), (4, 4))),
        ({"1": 3}, ((1, 3),)),
    ],
)
def test_forms(value: Any, wanted: Any) -> None:
    found = parse_budget(value)
    assert (found.size if isinstance(found, FixedBudget) else found) == wanted


@pytest.mark.parametrize(
    "value",
    [-1, 1025, True, 1.5, "many", "1:8,4", "1:2:3", "2:4", "1:8,1:4", "4:4,1:8", "1:-1", "1:2000", "", {}, {2: 1},
     {1: 1.5}, [1]],
)  # fmt: skip
def test_bad_input_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError):
        parse_budget(value)


def test_a_table_takes_the_entry_below() -> None:
    table = parse_budget("1:8,4:4,16:0")
    assert isinstance(table, FixedBudget)
    assert [table.size_at(b) for b in (1, 3, 4, 15, 16, 99)] == [8, 8, 4, 4, 0, 0]
    assert table.plan([None, None], 5) == [4, 4]  # type: ignore[list-item]
    assert table.reason() is None and not table.never_drafts
    assert table.explain() == "by batch size: 1:8,4:4,16:0" and FixedBudget(size=3).explain() == "fixed at 3"
    off = parse_budget("1:0,8:0")
    assert isinstance(off, FixedBudget) and off.never_drafts and "every batch size" in str(off.reason())
    assert off.explain() == off.reason() and FixedBudget(size=0).explain() == "the draft budget is 0"


def test_a_table_drives_the_engine() -> None:
    """Alone a request drafts; two together do not, and say why."""
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9, 8, 9, 8, 9, 8]]
    engine = assemble(_ngram())
    engine.budget = engine.scheduler.budget = parse_budget("1:4,2:0")  # type: ignore[assignment]
    alone = _answers(engine, prompts[:1])
    together = _answers(engine, prompts)
    assert alone[0].stats.drafted > 0
    assert not any(o.stats.drafted for o in together[:1])
    assert "batch sizes met" in together[0].stats.off_reason
    assert alone[0].outputs[0].token_ids == together[0].outputs[0].token_ids


# -- what steps cost

points = st.lists(st.floats(0.1, 100), min_size=1, max_size=8).map(
    lambda values: tuple((1 + 3 * i, ms) for i, ms in enumerate(values))
)


@given(chain=points, plain=points, more=st.integers(0, 60), batch=st.integers(1, 40))
def test_costs_never_fall(chain: Any, plain: Any, more: int, batch: int) -> None:
    table = CostTable(chain=chain, plain=plain)
    assert table.chain_ms(more + 1) >= table.chain_ms(max(1, more)) > 0
    assert table.step_ms(batch, more) <= table.step_ms(batch, more + 1) + 1e-9
    assert table.step_ms(batch, 0) <= table.step_ms(batch + 1, 0) + 1e-9


@given(points)
def test_figures_that_rise_are_kept(chain: Any) -> None:
    rising = tuple((count, ms + 200 * i) for i, (count, ms) in enumerate(chain))
    assert CostTable(chain=rising, plain=rising).chain == rising


def test_noise_is_pooled() -> None:
    table = CostTable(chain=((1, 5.0), (2, 9.0), (4, 5.0), (8, 8.0)), plain=((1, 5.0),))
    assert table.chain == ((1, 5.0), (2, 7.0), (4, 7.0), (8, 8.0))


def test_interpolation_goes_on_beyond_the_last_point() -> None:
    assert interpolate(((1, 1.0), (3, 2.0)), 2) == 1.5
    assert interpolate(((1, 1.0), (3, 2.0)), 5) == 3.0
    assert interpolate(((1, 1.0), (9, 9.0), (17, 9.0)), 33) == pytest.approx(9 + 16 * 0.5)  # a last flat stretch ends


@pytest.mark.parametrize("chain", [(), ((2, 1.0),), ((1, 1.0), (1, 2.0)), ((1, 0.0),), ((1, float("nan")),)])
def test_tables_that_cannot_be_are_refused(chain: Any) -> None:
    with pytest.raises(ConfigError):
        CostTable(chain=chain, plain=((1, 1.0),))


def test_buckets_double() -> None:
    assert [bucket(n) for n in (0, 1, 2, 3, 4, 5, 8, 9, 16, 17)] == [0, 1, 2, 3, 3, 4, 4, 5, 5, 6]


@pytest.mark.parametrize("factor", [0.2, 1.0, 5.0])
def test_steps_correct_a_table_that_is_off(factor: float) -> None:
    world = World(STEP_COSTS["stairs"])
    costs = StepCosts(replace(world, table_error=factor).table())
    for _ in range(12):
        costs.observe(1, 0, 100, world.step_ms(1, 0))
    assert costs.predict(1, 0) == pytest.approx(world.step_ms(1, 0), rel=0.02)
    assert costs.predict(1, 8) == pytest.approx(world.step_ms(1, 8), rel=0.05)  # nothing was drafted yet


def test_what_rows_cost_is_believed_at_once() -> None:
    """Of a kind that is new the table says little: three steps are enough, and the machine is not to blame."""
    world = World(STEP_COSTS["steep"], batch_error=3.0)
    costs = StepCosts(world.table())
    for extra in (0, 0, 0, 8, 8, 8):
        costs.observe(8, extra, 100, world.step_ms(8, extra))
    assert costs.predict(8, 0) == pytest.approx(world.step_ms(8, 0), rel=0.02)
    assert costs.predict(8, 8) == pytest.approx(world.step_ms(8, 8), rel=0.02)


def test_one_hiccup_moves_nothing() -> None:
    world = World(STEP_COSTS["flat"])
    costs = StepCosts(world.table())
    for step in range(40):
        costs.observe(1, 0, 100, world.step_ms(1, 0) * (10 if step % 10 == 5 else 1))
    assert costs.predict(1, 0) == pytest.approx(world.step_ms(1, 0), rel=0.01)


def test_a_machine_that_slows_down_is_followed() -> None:
    world = World(STEP_COSTS["flat"])
    costs = StepCosts(world.table())
    for step in range(80):
        costs.observe(1, 8 * (step % 2), 100, world.step_ms(1, 8 * (step % 2)) * (3 if step >= 40 else 1))
    assert costs.predict(1, 0) == pytest.approx(3 * world.step_ms(1, 0), rel=0.05)
    assert costs.predict(1, 8) / costs.predict(1, 0) == pytest.approx(
        world.step_ms(1, 8) / world.step_ms(1, 0), rel=0.05
    )


@given(most=st.integers(1, 200), batch=st.integers(1, 64), factor=st.floats(0.3, 3))
def test_rows_never_make_a_step_cheaper(most: int, batch: int, factor: float) -> None:
    world = World(STEP_COSTS["stairs"])
    costs = StepCosts(world.table())
    for step in range(9):
        costs.observe(batch, 4 * (step % 3), 100, world.step_ms(batch, 4 * (step % 3)) * factor ** (step % 2))
    rise = costs.rise(batch, most, 100)
    assert len(rise) == most + 1 and rise[0] == 0 and all(a <= b for a, b in itertools.pairwise(rise))


def test_what_rows_cost_is_the_difference_of_two_steps() -> None:
    world = World(STEP_COSTS["stairs"])
    costs = StepCosts(world.table())
    rise = costs.rise(3, 20, 100)
    for rows in (1, 2, 3, 4, 5, 8, 9, 16, 17, 20):
        assert rise[rows] == pytest.approx(costs.predict(3, rows, 100) - costs.predict(3, 0, 100), abs=1e-9)


@pytest.mark.parametrize("truth", [(0.02, 1.0), (0.5, 0.0), (0.03, 4.0)])
def test_the_drafters_time_is_learned(truth: tuple[float, float]) -> None:
    a, b = truth
    costs = DraftCosts(0.1, 0.6 if b else 0.0, 0.01)
    for call in range(240):
        sequences, levels = 1 + call % 3, 2 + call % 5
        costs.observe(sequences, levels, 2, a * sequences + b * levels)
    assert costs.predict(2) == pytest.approx(a * 2 + b * 4, rel=0.2)
    assert costs.level_ms(1) == pytest.approx(b, rel=0.2)


def test_catching_up_is_charged_apart() -> None:
    costs = DraftCosts(0.1, 0.6, 0.001)
    for call in range(120):
        unseen = 400 if call % 10 == 0 else 2
        costs.observe(1, 4, unseen, 2.5 + 0.05 * max(0, unseen - 16))
    assert costs.predict(1) == pytest.approx(2.5, rel=0.05)
    assert costs.catch_up_ms == pytest.approx(0.05, rel=0.1)


def test_a_first_call_for_a_short_text_does_not_price_a_drafter_out() -> None:
    """It does what is done once; with few tokens to divide that by, long texts would never be asked for again."""
    costs = DraftCosts()
    costs.observe(1, 4, 20, 3.0)
    assert costs.catch_up_ms < 0.06
    many = DraftCosts()
    many.observe(1, 4, 416, 40.0)
    assert many.catch_up_ms == pytest.approx(0.1, rel=0.2)
    short = DraftCosts()
    short.observe(1, 4, 2, 40.0)
    assert short.predict(1) == DraftCosts().predict(1)


# -- honest chances


def _text(chances: list[Chances]) -> History:
    view: Any = SimpleNamespace(key=0, tokens=[1], max_len=None)
    return History(view, chances, len(chances))


def _weigh(text: History, tokens: list[int], parents: list[int], scores: list[float]) -> tuple[Any, Any]:
    """The chances of a tree's nodes given their parents, and those of the paths to them."""
    text.judge()
    path, _ = text.propose(TokenTree([tokens], [parents], [[0] * len(parents)], [len(parents)]), 0, scores)
    return [1.0, *(node[-1] for node in text.proposal)], path


def _chain(text: History, proposal: list[int], odds: float) -> tuple[Any, Any]:
    """The same of a chain whose drafter gives every node the same odds."""
    count, step = len(proposal), math.log(odds / (1 + odds))
    return _weigh(text, [1, *proposal], [-1, *range(count)], [step * i for i in range(count + 1)])


def _follow(text: History, tokens: list[int]) -> None:
    """The text goes on."""
    text.view.tokens += tokens
    text.judge()


@pytest.mark.parametrize("claimed", [0.2, 1.0, 30.0])
@pytest.mark.parametrize("true", [0.1, 0.5, 0.9])
def test_what_a_drafter_claims_is_corrected(claimed: float, true: float) -> None:
    chances, draw = [Chances()], random.Random(3)
    text = _text(chances)
    for _ in range(600):
        _chain(text, [int(draw.random() < true) for _ in range(4)], claimed)
        _follow(text, [1, 1, 1, 1])
    given, path = _chain(_text(chances), [1, 1, 1, 1], claimed)
    assert given[1] == pytest.approx(true, abs=0.1)
    assert path[3] == pytest.approx(true**3, abs=0.12)


def test_nodes_that_were_not_reached_teach_nothing() -> None:
    chances = [Chances()]
    text = _text(chances)
    _chain(text, [0, 1, 1], 1.0)
    before = [*chances[0].odds]
    _follow(text, [1, 1, 1])
    assert sum(a != b for a, b in zip(before, [*chances[0].odds], strict=True)) == 1
    _chain(text, [1, 1, 1], 1.0)
    before = [*chances[0].odds]
    _follow(text, [])
    assert before == [*chances[0].odds]


def test_of_siblings_one_is_right() -> None:
    chances = [Chances()]
    tree = [7, 1, 2, 3], [-1, 0, 0, 2], [0.0, math.log(0.5), math.log(0.4), math.log(0.25)]
    text = _text(chances)
    for _ in range(300):  # the second child, and what is below it, always
        _weigh(text, *tree)
        _follow(text, [2, 3])
    _, path = _weigh(_text(chances), *tree)
    assert path[1] < 0.1 and path[2] > 0.9 and path[3] > 0.85


def test_a_sequence_leans_from_its_kind() -> None:
    """Where half of the texts are always right and half never, each is soon told apart."""
    chances = [Chances()]
    texts = [_text(chances), _text(chances)]
    for step in range(200):
        right = step % 2
        _chain(texts[right], [right], 1.0)
        _follow(texts[right], [1])
    bad, good = (_chain(text, [1], 1.0)[0][1] for text in texts)
    assert good > 0.8 and bad < 0.2


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(-9, 0)), min_size=1, max_size=12), st.floats(-3, 3))
def test_no_node_is_likelier_than_its_parent(nodes: list[tuple[int, float]], shift: float) -> None:
    parents, scores = [-1], [0.0]
    for place, (parent, given_) in enumerate(nodes):
        parents.append(min(parent, place))
        scores.append(scores[parents[-1]] + given_)
    text = _text([Chances()])
    text.shift[0] = shift
    _, path = _weigh(text, [1] * len(parents), parents, scores)
    assert all(0 < path[i] <= path[parents[i]] for i in range(1, len(parents)))


# -- the automatic budget: never slower


@cache
def plain_speed(name: str, batch: int, steps: int, seed: int) -> float:
    """Of plain decoding, whoever could have drafted, and however well."""
    return run(PLAIN, World(STEP_COSTS[name], seed=seed), batch, steps).speed


@pytest.mark.parametrize("drafter", [LOOKUP, NETWORK], ids=["lookup", "network"])
@pytest.mark.parametrize("batch", [1, 8, *(pytest.param(b, marks=pytest.mark.full) for b in (2, 4, 16, 32, 64))])
def test_never_slower(batch: int, drafter: dict[str, float]) -> None:
    """Every shape of cost x every acceptance; the mean of some seeds. (The hard worlds below have 4 and 32, too.)"""
    steps, seeds = (400, (0, 1, 2)) if batch == 8 else (900, (0, 1))  # what a first ask of all costs is to be paid back
    for name, acceptance in itertools.product(STEP_COSTS, (0.0, 0.2, 0.5, 0.95)):
        worlds = [World(STEP_COSTS[name], acceptance=lambda _, a=acceptance: a, seed=s, **drafter) for s in seeds]
        found = [run(auto(w), w, batch, steps).speed / plain_speed(name, batch, steps, w.seed) for w in worlds]
        assert sum(found) / len(found) >= 0.97, f"{name} costs, acceptance {acceptance}: {found}"


def test_plain_decoding_is_as_fast_in_every_world_of_the_same_costs() -> None:
    """What `plain_speed` stands on."""
    other = World(STEP_COSTS["stairs"], acceptance=lambda _: 0.1, seed=1, **NETWORK)
    assert run(PLAIN, other, 3, 50).speed == plain_speed("stairs", 3, 50, 1)


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("batch", [1, 4, 32])
def test_never_slower_in_hard_worlds(name: str, batch: int) -> None:
    found = []
    for seed in (0, 1):
        world = World(**{"costs": STEP_COSTS["stairs"], **HARD[name], "seed": seed})
        found.append(gain(world, batch, 900 if batch == 1 else 600))
    assert sum(found) / 2 >= 0.97, found


@pytest.mark.parametrize("batch", [8, 32, 64])
def test_rows_that_are_dearer_than_the_table_says_are_found_out_soon(batch: int) -> None:
    world = {"costs": STEP_COSTS["stairs"], **HARD["rows priced ten times too cheap"]}
    found = [gain(World(**world, seed=seed), batch, 100) for seed in range(4)]
    assert sum(found) / 4 >= 0.94, found


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize(("costs", "acceptance"), [("flat", 0.5), ("flat", 0.8), ("stairs", 0.6), ("linear", 0.9)])
def test_close_to_the_best_fixed_budget_where_drafts_pay(costs: str, acceptance: float, batch: int) -> None:
    world = World(STEP_COSTS[costs], acceptance=lambda _: acceptance, **LOOKUP)
    best = max(run(FixedBudget(size=n), world, batch, 900).speed for n in (0, 1, 2, 4, 8))
    assert run(auto(world), world, batch, 900).speed >= 0.92 * best


def test_only_the_sequences_that_pay_draft() -> None:
    """In one batch, a text that copies itself drafts and one that does not rests."""
    world = World(STEP_COSTS["linear"], answer=4000, ask_ms=0.3)
    budget = auto(world)
    sequences = [Sequence(1, world), Sequence(2, world)]
    asked, kept = [0, 0], [0, 0]
    for step in range(400):
        found = _step(budget, sequences, [[RIGHT] * 8, [WRONG] * 8], world)
        if step >= 200:
            asked = [n + (nodes > 0) for n, nodes in zip(asked, found[0], strict=True)]
            kept = [n + nodes for n, nodes in zip(kept, found[1], strict=True)]
    assert asked[0] > 190 and kept[0] > 190 * 6
    assert asked[1] < 60 and kept[1] < 20  # 1% of the time pays for some


def test_asks_that_do_not_pay_stay_within_their_share() -> None:
    world = World(STEP_COSTS["jump"], acceptance=lambda _: 0.0, noise=0.0, ask_ms=0.5)
    budget = auto(world)
    ran = run(budget, world, 1, 4000)
    late = ran.asked[2000:]
    assert 0 < sum(late) * world.ask_ms <= 1.2 * SHARE * 2000 * world.step_ms(1, 0)
    assert sum(ran.history[2000:]) < 20


@pytest.mark.parametrize(("renewed", "asks"), [([], (0, 5)), ([None], (25, 30)), ([1.5], (25, 30)), ([0.01], (0, 12))])
def test_a_drafter_that_takes_over_is_met_with_what_is_expected_of_it(
    renewed: list[float | None], asks: tuple[int, int]
) -> None:
    """The same sequence, in its middle: a drafter that is always right is believed at once, or hardly tried, where it
    is not told of, or nothing is expected of it."""
    world = World(STEP_COSTS["linear"], answer=4000, ask_ms=0.5)
    budget, sequences = auto(world), [Sequence(1, world)]
    for _ in range(600):
        _step(budget, sequences, [[WRONG] * 8], world)
    for expected in renewed:
        budget.renew("drafter", expected)
    asked = [_step(budget, sequences, [[RIGHT] * 8], world)[0][0] > 0 for _ in range(30)]
    assert asks[0] <= sum(asked) <= asks[1]


def test_what_was_counted_of_other_drafters_stays_where_one_takes_over() -> None:
    table = World(STEP_COSTS["linear"]).table()
    budget = AutoBudget(table, cap=8, sources=("look-up", "network"))
    sequence: Any = Sequence(1, World(STEP_COSTS["linear"]))
    budget.plan([sequence], 1)
    history = budget._histories[1]
    for source in (0, 1):
        for _ in range(40):
            budget._chances[source].learn(0, True)
            history.learn(source, 1.0, 1.0)
    kept = history.gains[0].gain
    budget.renew("network", 0.25)
    assert budget._chances[0].odds[0] == budget._chances[1].odds[0]
    for chances in budget._chances:
        chances.learn(0, False)
    assert budget._chances[1].odds[0] < budget._chances[0].odds[0] / 2
    budget.plan([sequence], 1)
    assert history.gains[1].gain == 0.25 and history.gains[0].gain == pytest.approx(kept, rel=0.2)


def test_catching_up_must_pay_within_the_answer() -> None:
    """A prompt of 600 tokens that a drafter must read first, at 0.02 ms each: it pays in long answers alone."""
    view: Any = SimpleNamespace(key=0, tokens=[RIGHT] * 600, prompt_len=600, max_len=None)
    history = History(view, [Chances()], 1)
    history.at_batch([AskGain()])
    assert history.asks_left(0) == HORIZON / (1 + FIRST_GAIN)
    view.max_len = 606
    assert history.asks_left(0) == pytest.approx(3 / (1 + FIRST_GAIN))


def test_where_no_acceptance_could_pay_rows_are_measured_once() -> None:
    world = World(STEP_COSTS["steep"], acceptance=lambda _: 1.0, noise=0.0)
    ran = run(auto(world), world, 16, 400)
    assert [nodes for nodes in ran.history if nodes] == [FIRST_ROWS]
    assert sum(n > 0 for n in ran.asked[100:]) < 15


def test_drafts_that_were_not_checked_teach() -> None:
    """A text turns predictable while nothing is checked: the proposals that were left out tell so."""
    world = World(STEP_COSTS["linear"], acceptance=lambda step: 0.0 if step < 300 else 0.95, answer=10_000)
    ran = run(auto(world), world, 1, 500)
    assert sum(ran.history[200:300]) < 10
    assert sum(ran.history[330:]) / 170 > 4


def test_a_drafter_with_a_network_stops_where_a_level_does_not_pay() -> None:
    dear = World(STEP_COSTS["flat"], acceptance=lambda _: 0.5, claimed=0.5, level_ms=0.8, noise=0.0)
    cheap = replace(dear, level_ms=0.05)
    deep = [sum(run(auto(w), w, 1, 600).history[300:]) for w in (dear, cheap)]
    assert 0 < deep[0] < 0.6 * deep[1]


def test_a_hiccup_does_not_end_speculation() -> None:
    world = World(STEP_COSTS["stairs"], acceptance=lambda _: 0.7, hiccup=0.05)
    ran = run(auto(world), world, 1, 600)
    assert ran.drafted_steps > 0.9 * ran.steps


def test_what_it_says() -> None:
    world = World(STEP_COSTS["flat"], acceptance=lambda _: 0.8, noise=0.0)
    budget = auto(world)
    assert "no step was planned" in budget.explain() and budget.reason() is None
    run(budget, world, 1, 300)
    told = budget.describe()
    assert json.loads(json.dumps(told)) == told
    assert told["kind"] == "auto" and told["nodes"] and told["expected_tokens"] > 1.5
    assert "at batch 1" in told["why"] and "expected" in told["why"]
    assert told["sources"]["drafter"]["held"][0] == pytest.approx(0.8, abs=0.1)
    poor = World(STEP_COSTS["linear"], acceptance=lambda _: 0.0)
    budget = auto(poor)
    run(budget, poor, 1, 300)
    assert "drafts do not pay" in budget.explain() and not budget.describe()["nodes"]


def test_off_is_said_of_answers_without_any_draft() -> None:
    """Rows that are far too dear: the first ones are measured, in the first answer, and nothing is drafted later."""
    llm = LLM("paceline-small", drafter="ngram", max_model_len=256)
    budget = llm.engine.budget
    learn = budget.observe
    budget.observe = lambda step: learn(  # type: ignore[method-assign]
        replace(step, draft_ms=0.0, ask_ms=0.0, rest_ms=5.0 + 20.0 * sum(step.drafted))
    )
    answers = [
        llm.generate(
            "Once upon a time there was a little", SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
        )[0].stats
        for most in (96, 96, 2)
    ]
    assert answers[0].drafted > 0 and answers[0].off_reason is None
    assert [stats.drafted for stats in answers[1:]] == [0, 0]
    assert "drafts do not pay" in str(answers[1].off_reason) and " node" not in str(answers[1].off_reason)
    assert answers[2].off_reason is None  # its steps were plain ones


def test_at_rest_states_are_taken_only_before_the_next_look() -> None:
    """`rests` is said of steps behind which nothing is drafted; where requests come or go, a step later."""
    world = World(STEP_COSTS["linear"], acceptance=lambda _: 0.0, answer=4000, ask_ms=0.3)
    budget = auto(world, spares=True)
    budget.rests = False
    sequences = [Sequence(key, world) for key in range(3)]
    said = []
    for step in range(300):
        live = sequences[: 1 + (step % 97 > 60)]
        rested = budget.rests
        budgets, _ = _step(budget, live, [[WRONG] * 4] * len(live), world)
        assert not (rested and any(budgets))
        said.append(budget.rests)
    assert 0.4 < sum(said[100:]) / 200 < 0.75
    eager = auto(world)
    for _ in range(100):
        _step(eager, sequences[:1], [[WRONG] * 4], world)
        assert not eager.rests


def test_of_several_sources_each_is_asked_where_it_pays() -> None:
    """A free look-up that is right in half of the texts, a dear network that is right in all."""
    world = World(STEP_COSTS["flat"])
    budget = AutoBudget(
        world.table(), cap=8, sources=("look-up", "network"),
        draft_costs=[DraftCosts(), DraftCosts(0.05, 0.25, 0.001)],
    )  # fmt: skip
    sequences = [Sequence(1, world), Sequence(2, world)]
    asked, plain = [0, 0], []
    for step in range(300):
        if not any(budget.plan(sequences, 2)):  # type: ignore[arg-type]
            plain.append(step)  # what a plain step costs is measured first, and again
            _check(budget, sequences, [([], 0), ([], 0)], world, 0.0, [0, 0])
            continue
        assert 0 in budget.ask(0, sequences, [0.0, 0.0])  # type: ignore[arg-type]
        first = [budget.first(0, view, [math.log(0.5)]) for view in sequences]  # type: ignore[arg-type]
        models = budget.ask(1, sequences, first)  # type: ignore[arg-type]
        budget.record_cost(1, 4, 1.0 if models else 0.0)
        chains = [([RIGHT] * 4, 0), ([RIGHT] * 4, 1) if 1 in models else ([WRONG] * 4, 0)]
        _check(budget, sequences, chains, world, 0.1 + (1.0 if models else 0.0))
        if step >= 100:
            asked = [n + (i in models) for i, n in enumerate(asked)]
    assert asked[0] < 20 and asked[1] > 180
    assert plain[:2] == [0, 1] and len(plain) < 15


@pytest.mark.parametrize("batch", [4, 8, 16])
def test_a_table_in_which_rows_are_far_too_dear_is_found_out(batch: int) -> None:
    """By it no row pays, so that nobody would ever learn what rows cost."""
    world = World(STEP_COSTS["stairs"], acceptance=lambda _: 0.8, rows_error=20.0)
    assert gain(world, batch, 600) > 1.05


def test_rows_are_tried_step_by_step() -> None:
    """What hundreds of rows cost is a guess of the table: each step checks up to twice as many as were known."""
    world = World(STEP_COSTS["flat"], acceptance=lambda _: 0.95)
    most = 0
    for rows in run(auto(world), world, 32, 60).history:
        assert rows <= max(FIRST_ROWS, 2 * most)
        most = max(most, rows)
    assert most > 100


def test_plain_steps_are_measured_at_intervals_that_double() -> None:
    """Also where drafts pay in every step: what they are compared with must not go stale."""
    world = World(STEP_COSTS["flat"], acceptance=lambda _: 0.9, answer=10_000)
    history = run(auto(world), world, 1, 700).history
    plain = [step for step, nodes in enumerate(history) if not nodes]
    apart = [b - a for a, b in itertools.pairwise(plain)]
    assert apart[:4] == [1, 5, 9, 17] and 33 <= apart[4] < 33 + LOOK_EVERY
    assert PLAIN_EVERY < max(apart) <= PLAIN_EVERY + LOOK_EVERY


def test_a_wrong_plain_step_is_found_out() -> None:
    """The first plain steps were slow, so that every row seems free: before long that is noticed."""
    slow = World(
        STEP_COSTS["linear"], acceptance=lambda _: 0.4, spread=0.3, batch_error=2.0, noise=0.1,
        slowness=lambda step: 2.0 if step < 3 else 1.0,
    )  # fmt: skip
    for batch in (8, 32):
        budget = auto(slow)
        drafted = run(budget, slow, batch, 100).history
        assert max(drafted[:30]) > 0  # it was misled
        assert budget._plain_ms == pytest.approx(slow.step_ms(batch, 0), rel=0.25)
        assert gain(slow, batch, 200) > 0.95


def test_the_cap_is_kept_and_checked() -> None:
    world = World(STEP_COSTS["flat"], acceptance=lambda _: 0.95)
    assert max(run(auto(world, cap=3), world, 1, 200).history) == 3
    for cap in (0, 2000):
        with pytest.raises(ConfigError):
            AutoBudget(world.table(), cap=cap)


# -- in the engine


def test_ids_do_not_depend_on_the_automatic_budget() -> None:
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9, 8, 9, 8, 9, 8], [1, 2, 3, 4]]
    plain = _answers(assemble(), prompts)
    engine = assemble(_ngram())
    table = CostTable(chain=((1, 5.0), (64, 6.0)), plain=((1, 5.0), (8, 5.5)))
    engine.budget = engine.scheduler.budget = AutoBudget(table, cap=4)
    drafted = _answers(engine, prompts)
    assert [o.outputs[0].token_ids for o in drafted] == [o.outputs[0].token_ids for o in plain]
    assert sum(o.stats.drafted for o in drafted) > 0
    assert engine.budget.describe()["steps"] > 0 and not engine.budget._histories  # ended sequences are forgotten


# -- calibration


def _fingerprint(**changes: Any) -> Fingerprint:
    base = Fingerprint(
        processor="p", cores=2, threads=2, torch="2", device="cpu", dtype="bfloat16", exact=False, quant=None,
        kernels="torch",
    )  # fmt: skip
    return replace(base, **changes)


def _calibration(ms: float = 5.0, **changes: Any) -> Calibration:
    table = CostTable(chain=((1, ms), (8, ms + 1)), plain=((1, ms), (4, ms + 2)), context=128, context_ms=0.5)
    return Calibration(fingerprint=_fingerprint(**changes), table=table, drafts={"d": table}, repeats=3)


def test_a_calibration_is_found_again(tmp_path: Path) -> None:
    path = calibration.save(tmp_path, _calibration())
    assert path == tmp_path / calibration.FILE
    calibration.save(tmp_path, _calibration(9.0, exact=True))
    calibration.save(tmp_path, _calibration(6.0))  # replaces the first
    calibration.save(tmp_path, _calibration(40.0, threads=8))
    for ms, changes in ((6.0, {}), (9.0, {"exact": True}), (40.0, {"threads": 8})):
        found, where = calibration.find(tmp_path, _fingerprint(**changes))
        assert found is not None and where == str(path)
        assert found.table.chain == ((1, ms), (8, ms + 1)) and found.table.context_ms == 0.5
        assert found.drafts["d"].plain == found.table.plain
    assert len(json.loads(path.read_text())["entries"]) == 3


def test_another_machines_calibration_is_ignored_and_the_reason_said(tmp_path: Path) -> None:
    calibration.save(tmp_path, _calibration(threads=8))
    found, why = calibration.find(tmp_path, _fingerprint())
    assert found is None and "threads 8 there, 2 here" in why
    assert calibration.find(tmp_path / "empty", _fingerprint()) == (None, "no calibration was found")


@pytest.mark.parametrize("text", ["", "{}", '{"schema": 1, "entries": [{}]}', '{"schema": 9, "entries": []}'])
def test_a_broken_file_is_ignored_and_the_reason_said(tmp_path: Path, text: str) -> None:
    (tmp_path / calibration.FILE).write_text(text)
    found, why = calibration.find(tmp_path, _fingerprint())
    assert found is None and "is ignored" in why
    calibration.save(tmp_path, _calibration())  # and can be written anew
    assert calibration.find(tmp_path, _fingerprint())[0] is not None


def test_beside_a_read_only_model_the_cache_folder_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tmp_path / "model"
    model.write_text("not a folder, so nothing can be written into it")
    path = calibration.save(model, _calibration())
    assert path.is_relative_to(tmp_path / "cache")
    assert calibration.find(model, _fingerprint())[1] == str(path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(model))
    with pytest.raises(ConfigError, match="cannot be written"):
        calibration.save(model, _calibration())


def test_a_quick_estimate_and_a_measurement_of_a_tiny_model() -> None:
    from paceline.bench.calibrate import measure

    decoder = tiny_decoder()
    quick = calibration.quick_estimate(decoder, max_sequences=64, why="no file")
    assert quick.chain[0][0] == 1 and quick.plain[-1][0] >= 8 and "no file" in quick.source
    seen: list[int] = []
    table = measure(decoder, rows=(1, 4), batches=(1, 2), contexts=(8, 40), repeats=2, progress=seen.append)
    assert [c for c, _ in table.chain] == [1, 4] and [c for c, _ in table.plain] == [1, 2]
    assert table.context == 8 and seen == [1, 2, 3]
    same = CostTable(**json.loads(json.dumps(asdict(table))))
    assert same == table
    assert calibration.fingerprint(decoder, "torch") == calibration.fingerprint(decoder, "torch")


# -- helpers


def _ngram() -> Any:
    from paceline.draft.ngram import NgramConfig

    return NgramConfig(depth=4)


def _answers(engine: Any, prompts: list[list[int]]) -> list[Any]:
    from kits.tiny import run as answer

    from paceline import SamplingParams

    return answer(engine, [(p, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)) for p in prompts])


def _step(
    budget: AutoBudget, sequences: list[Sequence], chains: list[list[int]], world: World
) -> tuple[list[int], list[int]]:
    """One step in which the drafter would propose these chains. Returns budgets, and checked nodes of each."""
    budgets = budget.plan(sequences, len(sequences))  # type: ignore[arg-type]
    given = [(chain[:nodes], 0) for chain, nodes in zip(chains, budgets, strict=True)]
    return budgets, _check(budget, sequences, given, world, world.ask_ms * sum(n > 0 for n in budgets), budgets)


def _check(
    budget: AutoBudget, sequences: list[Sequence], chains: list[tuple[list[int], int]], world: World, draft_ms: float,
    budgets: list[int] | None = None,
) -> list[int]:  # fmt: skip
    """Select, check and observe chains, each with its source; returns the nodes that were checked."""
    budgets = budgets or [len(chain) for chain, _ in chains]
    asked = [i for i, nodes in enumerate(budgets) if nodes]
    drafted = [0] * len(sequences)
    if asked:
        proposed = TokenTree(
            tokens=[[RIGHT, *chains[i][0]] for i in asked],
            parents=[[-1, *range(len(chains[i][0]))] for i in asked],
            sources=[[chains[i][1]] * (1 + len(chains[i][0])) for i in asked],
            counts=[1 + len(chains[i][0]) for i in asked],
            scores=[[math.log(0.5) * d for d in range(1 + len(chains[i][0]))] for i in asked],
        )
        views: list[Any] = [sequences[i] for i in asked]
        tree = budget.select(views, proposed)
        for i, count in zip(asked, tree.counts if tree is not None else [1] * len(asked), strict=True):
            drafted[i] = count - 1
    accepted = [drafted[i] if RIGHT in chain else 0 for i, (chain, _) in enumerate(chains)]
    for sequence, right in zip(sequences, accepted, strict=True):
        sequence.tokens += [RIGHT] * (right + 1)
    if budget.learns:
        ms = world.step_ms(len(sequences), sum(drafted))
        rows: list[Any] = list(sequences)
        budget.observe(StepRecord(rows, budgets, drafted, accepted, True, draft_ms, draft_ms, ms))
    return drafted


# -- from the command's function to the next start


def test_what_calibrate_writes_is_what_the_next_start_reads(tmp_path: Path) -> None:
    from paceline import LLM
    from paceline.bench.calibrate import calibrate
    from paceline.weights import zoo

    embedded = zoo.find("paceline-small")
    assert embedded is not None
    folder = tmp_path / "model"
    folder.mkdir()
    for file in embedded.iterdir():
        if file.name != calibration.FILE:
            (folder / file.name).symlink_to(file)
    drafter = "draft_model:paceline-small-draft,depth=3,dtype=int8"
    sizes = {"rows": (1, 4, 16), "batches": (1, 4), "contexts": (16, 64)}
    seen: list[tuple[str, int, int]] = []
    llm = LLM(str(folder), kv_memory="64MiB")
    made, path = calibrate(llm, drafter, lambda *told: seen.append(told), repeats=1, **sizes)
    assert path == folder / calibration.FILE and list(made.drafts) == ["paceline-small-draft,dtype=int8"]
    assert [(done, of) for _, done, of in seen] == [(1, 2), (2, 2)] * 2
    assert llm.engine.budget.describe()["why"] == "no drafter was named"

    again = LLM(str(folder), kv_memory="64MiB", drafter=drafter).engine.budget
    assert isinstance(again, AutoBudget) and again.cap == 3
    assert again.costs.table.chain == made.table.chain and again.costs.table.source == f"{path.parent.name}/{path.name}"
    exact = LLM(str(folder), kv_memory="64MiB", drafter=drafter, exact=True).engine.budget
    assert isinstance(exact, AutoBudget)
    assert "quick estimate" in exact.costs.table.source and "exact False there, True here" in exact.costs.table.source


@pytest.mark.parametrize("steps", [1500, 3000])
def test_a_drafter_that_must_prepare_is_woken_up(steps: int) -> None:
    """Streams ride only where drafts are wanted: a single try at rest finds nothing, however good the text is."""
    turns = World(
        STEP_COSTS["linear"],
        acceptance=lambda step: 0.0 if step < 150 else 0.9,
        answer=10_000,
        prepares=True,
        ask_ms=4.0,
    )
    plain = run(PLAIN, turns, 1, steps).speed
    woken, asleep = (run(auto(turns, prepares=p), turns, 1, steps) for p in (0, None))
    assert woken.speed > 1.2 * plain
    assert woken.drafted_steps > asleep.drafted_steps + 80
    never = World(STEP_COSTS["linear"], acceptance=lambda step: 0.0, answer=10_000, prepares=True, ask_ms=4.0)
    assert run(auto(never, prepares=0), never, 1, steps).speed > 0.97 * run(PLAIN, never, 1, steps).speed


# -- what a drafter costs, whatever kind it is


def _driven(spec: DrafterSpec, taps_ms: float, cost: Callable[[int], float], steps: int = 60) -> AutoBudget:
    """A budget after some steps of one sequence, in which asking takes ``cost`` of the draft's levels, in one pass of a
    network, and taps take their time whether or not anything is asked."""
    world = World(STEP_COSTS["flat"])
    budget, sequence = AutoBudget.of(spec, world.table()), Sequence(0, world)
    sequences: Any = [sequence]
    for step in range(steps):
        budgets, levels = budget.plan(sequences, 1), 1 + step % 4
        drafted = 0
        if budgets[0]:
            tree = TokenTree.from_parents([RIGHT], [range(levels)], [[RIGHT] * levels])
            chosen = budget.select([sequences[0]], tree, 1)
            drafted = 0 if chosen is None else chosen.counts[0] - 1
        ask_ms = cost(levels) if budgets[0] else 0.0
        sequence.tokens += [RIGHT] * (drafted + 1)
        rest_ms = world.step_ms(1, drafted)
        if budget.learns:
            budget.observe(
                StepRecord(sequences, budgets, [drafted], [drafted], True, ask_ms + taps_ms, ask_ms, rest_ms)
            )
    return budget


def test_the_price_of_an_ask_is_what_proposing_takes() -> None:
    """Taps and observing are spent anyway: they change what a millisecond earns, not what an ask costs."""
    spec = DrafterSpec(name="heads", default_budget=4, network=True)
    known = [_driven(spec, taps_ms, lambda levels: 0.5) for taps_ms in (0.0, 2.0)]
    for budget in known:
        assert budget.draft_costs[0].predict(1) == pytest.approx(0.5, rel=0.05)
        assert budget.draft_costs[0].usual_calls > 20
    assert known[0]._rate > known[1]._rate


def test_levels_that_take_no_pass_of_their_own_are_not_priced() -> None:
    """A drafter that says how many passes it took is not taken to pay for its levels."""
    spec = DrafterSpec(name="heads", default_budget=4, network=True)
    noisy = _driven(spec, 0.0, lambda levels: 0.4 + 0.05 * levels)
    assert noisy.draft_costs[0].predict(1) == pytest.approx(0.525, rel=0.15)
    assert noisy.draft_costs[0].level_ms(1) == noisy.draft_costs[0].predict(1)


def test_only_what_keeps_its_own_cache_is_taken_to_catch_up() -> None:
    table = World(STEP_COSTS["flat"]).table()
    kinds: list[dict[str, bool]] = [{}, {"network": True}, {"network": True, "cached": True}]
    found = [AutoBudget.of(DrafterSpec(name="x", default_budget=4, **kind), table).draft_costs[0] for kind in kinds]
    assert [costs.network for costs in found] == [False, True, True]
    assert found[1].catch_up_ms == 0 < found[2].catch_up_ms
