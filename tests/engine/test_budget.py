"""Draft budgets: fixed, by batch size, and the automatic one in worlds without a model."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits import tiny
from kits.budget_world import HARD, LOOKUP, NETWORK, RIGHT, STEP_COSTS, WRONG, Sequence, World, run
from kits.tiny import assemble

from paceline import LLM, SamplingParams
from paceline.core.errors import ConfigError
from paceline.core.tree import TokenTree
from paceline.draft.base import DrafterSpec
from paceline.draft.ngram import NgramConfig
from paceline.engine.auto import FIRST_ROWS, SHARE, AutoBudget
from paceline.engine.budget import AUTO, FixedBudget, StepRecord, parse_budget
from paceline.engine.chances import Chances, History
from paceline.engine.costs import CostTable, DraftCosts, interpolate

PLAIN = FixedBudget(0)
TABLE = CostTable(chain=((1, 5.0), (64, 6.0)), plain=((1, 5.0), (8, 5.5)))


def auto(world: World, cap: int = 8, **options: Any) -> AutoBudget:
    """An automatic budget over a world's costs."""
    costs = DraftCosts.of_network(world.table()) if world.level_ms > 0 else DraftCosts()
    return AutoBudget(world.table(), cap=cap, draft_costs=[costs], **options)


def gain(world: World, batch: int, steps: int, cap: int = 8) -> float:
    """Speed with the automatic budget over plain decoding's."""
    return run(auto(world, cap), world, batch, steps).speed / run(PLAIN, world, batch, steps).speed


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(None, AUTO), ("auto", AUTO), (" AUTO ", AUTO), (0, 0), (8, 8), ("8", 8)],
)
def test_forms(value: Any, wanted: Any) -> None:
    found = parse_budget(value)
    assert (found.most_nodes if isinstance(found, FixedBudget) else found) == wanted


@pytest.mark.parametrize(
    "value",
    [-1, "-1", 1025, "99999999999", True, 1.5, "1.5", "many", "1:8,4:4", "", "²", {}, {1: 3}, [1]],
)
def test_bad_input_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError):
        parse_budget(value)


points = st.lists(st.floats(0.1, 100), min_size=1, max_size=8).map(
    lambda values: tuple((1 + 3 * i, ms) for i, ms in enumerate(values))
)


@given(chain=points, plain=points, more=st.integers(0, 60), batch=st.integers(1, 40))
def test_costs_never_fall(chain: Any, plain: Any, more: int, batch: int) -> None:
    table = CostTable(chain=chain, plain=plain)
    assert table.chain_ms(more + 1) >= table.chain_ms(max(1, more)) > 0
    assert table.step_ms(batch, more) <= table.step_ms(batch, more + 1) + 1e-9
    assert table.step_ms(batch, 0) <= table.step_ms(batch + 1, 0) + 1e-9


def test_interpolation_goes_on_beyond_the_last_point() -> None:
    assert interpolate(((1, 1.0), (3, 2.0)), 2) == 1.5
    assert interpolate(((1, 1.0), (3, 2.0)), 5) == 3.0
    assert interpolate(((1, 1.0), (9, 9.0), (17, 9.0)), 33) == pytest.approx(9 + 16 * 0.5)  # a last flat stretch ends


def _text(chances: list[Chances]) -> History:
    view: Any = SimpleNamespace(key=0, tokens=[1], max_len=None)
    return History(view, chances, len(chances))


def _weigh(text: History, tokens: list[int], parents: list[int], scores: list[float]) -> tuple[Any, Any]:
    """The chances of a tree's nodes given their parents, and those of the paths to them."""
    text.judge()
    path, _ = text.propose(TokenTree(tokens[1:], parents[1:], scores[1:]), blind=False)
    return [1.0, *(node[-1] for node in text.proposal)], path


def _follow(text: History, tokens: list[int]) -> None:
    """The text goes on."""
    text.view.tokens += tokens
    text.judge()


def test_of_siblings_one_is_right() -> None:
    chances = [Chances()]
    tree = [7, 1, 2, 3], [-1, 0, 0, 2], [0.0, math.log(0.5), math.log(0.4), math.log(0.25)]
    text = _text(chances)
    for _ in range(300):  # the second child, and what is below it, always
        _weigh(text, *tree)
        _follow(text, [2, 3])
    _, path = _weigh(_text(chances), *tree)
    assert path[1] < 0.1 and path[2] > 0.9 and path[3] > 0.85


@cache
def plain_speed(name: str, batch: int, steps: int, seed: int) -> float:
    """Of plain decoding, whoever could have drafted, and however well."""
    return run(PLAIN, World(STEP_COSTS[name], seed=seed), batch, steps).speed


KINDS = {"lookup": LOOKUP, "network": NETWORK}
FULL = pytest.mark.full
GRID = [pytest.param(b, d, marks=() if (b, d) == (1, "network") else FULL)
        for b in (1, 2, 4, 8, 16, 32, 64) for d in ("lookup", "network")]  # fmt: skip


@pytest.mark.parametrize(("batch", "drafter"), GRID)
def test_never_slower(batch: int, drafter: str) -> None:
    """Every shape of cost x every acceptance; the mean of some seeds. (The hard worlds below have 4 and 32, too.)"""
    steps, seeds = (400, (0, 1, 2)) if batch == 8 else (900, (0, 1))  # what a first ask of all costs is to be paid back
    for name, acceptance in itertools.product(STEP_COSTS, (0.0, 0.2, 0.5, 0.95)):
        worlds = [
            World(STEP_COSTS[name], acceptance=lambda _, a=acceptance: a, seed=s, **KINDS[drafter]) for s in seeds
        ]
        found = [run(auto(w), w, batch, steps).speed / plain_speed(name, batch, steps, w.seed) for w in worlds]
        assert sum(found) / len(found) >= 0.97, f"{name} costs, acceptance {acceptance}: {found}"


@pytest.mark.parametrize(
    ("name", "batch"),  # every world with a batch of 1 or 4; with the others in full
    [
        pytest.param(n, b, marks=() if i % 2 == j else FULL)
        for i, n in enumerate(HARD)
        for j, b in enumerate((1, 4, 32))
    ],
)
def test_never_slower_in_hard_worlds(name: str, batch: int) -> None:
    found = []
    for seed in (0, 1):
        world = World(**{"costs": STEP_COSTS["stairs"], **HARD[name], "seed": seed})
        found.append(gain(world, batch, 900 if batch == 1 else 600))
    assert sum(found) / 2 >= 0.97, found


@pytest.mark.parametrize("batch", [8, 32, pytest.param(64, marks=FULL)])
def test_rows_that_are_dearer_than_the_table_says_are_found_out_soon(batch: int) -> None:
    world = {"costs": STEP_COSTS["stairs"], **HARD["rows priced ten times too cheap"]}
    found = [gain(World(**world, seed=seed), batch, 100) for seed in range(4)]
    assert sum(found) / 4 >= 0.94, found


@pytest.mark.parametrize(
    ("costs", "acceptance", "batch"),
    [("flat", 0.5, 1), ("stairs", 0.6, 4), pytest.param("linear", 0.9, 16, marks=FULL)],
)
def test_close_to_the_best_fixed_budget_where_drafts_pay(costs: str, acceptance: float, batch: int) -> None:
    world = World(STEP_COSTS[costs], acceptance=lambda _: acceptance, **LOOKUP)
    best = max(run(FixedBudget(n), world, batch, 900).speed for n in (0, 1, 2, 4, 8))
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
        budget.reset_source("drafter", expected)
    asked = [_step(budget, sequences, [[RIGHT] * 8], world)[0][0] > 0 for _ in range(30)]
    assert asks[0] <= sum(asked) <= asks[1]


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


def test_off_is_said_of_answers_without_any_draft() -> None:
    """Rows that are far too dear: the first ones are measured, in the first answer, and nothing is drafted later."""
    llm = LLM("paceline-small", drafter="ngram", max_model_len=256)
    budget = llm.engine.budget = llm.engine.scheduler.budget = AutoBudget(TABLE, cap=14)
    learn = budget.observe
    budget.observe = lambda step: learn(  # type: ignore[method-assign]
        replace(step, draft_ms=0.0, propose_ms=0.0, rest_ms=5.0 + 20.0 * sum(step.drafted))
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


def test_a_table_in_which_rows_are_far_too_dear_is_found_out() -> None:
    """By it no row pays, so that nobody would ever learn what rows cost."""
    world = World(STEP_COSTS["stairs"], acceptance=lambda _: 0.8, rows_error=20.0)
    assert gain(world, 8, 600) > 1.05


def test_rows_are_tried_step_by_step() -> None:
    """What hundreds of rows cost is a guess of the table: each step checks up to twice as many as were known."""
    world = World(STEP_COSTS["flat"], acceptance=lambda _: 0.95)
    most = 0
    for rows in run(auto(world), world, 32, 60).history:
        assert rows <= max(FIRST_ROWS, 2 * most)
        most = max(most, rows)
    assert most > 100


def test_the_cap_is_kept_and_checked() -> None:
    world = World(STEP_COSTS["flat"], acceptance=lambda _: 0.95)
    assert max(run(auto(world, cap=3), world, 1, 200).history) == 3


def test_ids_do_not_depend_on_the_automatic_budget() -> None:
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9, 8, 9, 8, 9, 8], [1, 2, 3, 4]]
    jobs = [(p, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)) for p in prompts]
    plain, engine = tiny.run(assemble(), jobs), assemble(NgramConfig(depth=4))
    engine.budget = engine.scheduler.budget = AutoBudget(TABLE, cap=4)
    drafted = tiny.run(engine, jobs)
    assert [o.outputs[0].token_ids for o in drafted] == [o.outputs[0].token_ids for o in plain]
    assert sum(o.stats.drafted for o in drafted) > 0
    assert not engine.budget._histories  # ended sequences are forgotten


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
        proposed = [TokenTree.chain(chain, 0.5) for chain, _ in (chains[i] for i in asked)]
        for i, tree in zip(asked, proposed, strict=True):
            tree.sources = [chains[i][1]] * len(tree)
        views: list[Any] = [sequences[i] for i in asked]
        for i, tree in zip(asked, budget.select(views, proposed), strict=False):
            drafted[i] = len(tree)
    accepted = [drafted[i] if RIGHT in chain else 0 for i, (chain, _) in enumerate(chains)]
    for sequence, right in zip(sequences, accepted, strict=True):
        sequence.tokens += [RIGHT] * (right + 1)
    if budget.learns:
        ms = world.step_ms(len(sequences), sum(drafted))
        rows: list[Any] = list(sequences)
        budget.observe(StepRecord(rows, budgets, drafted, accepted, True, draft_ms, draft_ms, ms))
    return drafted


def test_a_drafter_that_must_prepare_is_woken_up() -> None:
    """Streams ride only where drafts are wanted: a single try at rest finds nothing, however good the text is."""
    turns = World(
        STEP_COSTS["linear"],
        acceptance=lambda step: 0.0 if step < 150 else 0.9,
        answer=10_000,
        prepares=True,
        ask_ms=4.0,
    )
    steps = 1500
    plain = run(PLAIN, turns, 1, steps).speed
    woken, asleep = (run(auto(turns, prepares=p), turns, 1, steps) for p in (0, None))
    assert woken.speed > 1.2 * plain
    assert woken.drafted_steps > asleep.drafted_steps + 80
    never = World(STEP_COSTS["linear"], acceptance=lambda step: 0.0, answer=10_000, prepares=True, ask_ms=4.0)
    assert run(auto(never, prepares=0), never, 1, steps).speed > 0.97 * run(PLAIN, never, 1, steps).speed


def test_only_what_keeps_its_own_cache_is_taken_to_catch_up() -> None:
    table = World(STEP_COSTS["flat"]).table()
    kinds: list[dict[str, bool]] = [{}, {"network": True}, {"network": True, "cached": True}]
    found = [AutoBudget.of(DrafterSpec(name="x", default_budget=4, **kind), table).draft_costs[0] for kind in kinds]
    assert [costs.network for costs in found] == [False, True, True]
    assert found[1].catch_up_ms == 0 < found[2].catch_up_ms
