"""The ranking: the paper's numbers come out of it, its reasons are true, and its bounds are named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cli.plan import reason
from paceline.core.tables import read_table
from paceline.plan import acceptance, machines, models, plan, throughput
from paceline.plan.acceptance import Acceptance
from paceline.plan.plan import PlanRequest, RankedDrafter
from paceline.plan.throughput import ServedModel
from paceline.weights import zoo

PAIRS = read_table("plan/acceptance.toml")["pair"]


def question(target: str = "llama-3-70b", machine: str = "h100", **more: Any) -> PlanRequest:
    shape = models.named(target)
    assert shape is not None
    return PlanRequest(
        **{"target": shape, "machine": machines.machine(machine), "batch": 64, "context": 65_536, **more}
    )


def form(q: PlanRequest, drafter: str, depth: int = 4) -> RankedDrafter:
    return plan.predict(
        q, drafter, depth, 1, acceptance.assumed(q.target.name, q.draft.name if q.draft else None, q.context)[drafter]
    )


def test_the_fastest_comes_first_and_plain_is_one() -> None:
    made = plan.rank(question())
    factors = [candidate.multiplier for candidate in made]
    assert factors == sorted(factors, reverse=True) and made[0].drafter == "spire"
    assert {candidate.drafter for candidate in made} == {plan.PLAIN, *plan.DRAFTERS}
    found = {candidate.drafter: candidate for candidate in made}
    assert found[plan.PLAIN].multiplier == 1 and found[plan.PLAIN].tau == 1
    for candidate in made:
        speed = candidate.tokens_per_s / found[plan.PLAIN].tokens_per_s
        assert speed == pytest.approx(candidate.multiplier)


def test_a_named_draft_model_is_priced_and_its_pair_known() -> None:
    small = models.named("llama-3-8b")
    made, other = form(question(draft=small), "draft_model"), form(question(), "draft_model")
    assert made.acceptance is not None and made.acceptance.accept == 0.81
    assert made.tau == pytest.approx(sum(0.81**n for n in range(5)))
    assert made.round.draft != other.round.draft and made.holds != other.holds


def test_streams_are_no_deeper_than_their_set_and_their_rows_have_a_price() -> None:
    """A set of four on every row, through half of the layers: the root and four nodes are 15 rows, not 9."""
    for asked in (question(batch=1, context=512), embedded()):
        assert max(made.depth for made in plan.rank(asked) if made.drafter == "streams") <= 4
    assert form(question(), "streams").rows == 15
    few = embedded(batch=1, context=128)
    assert form(few, "streams").round.verify > 1.2 * form(few, "ngram").round.verify


@given(st.floats(0, 1), st.integers(1, 64))
def test_tokens_a_round_and_back(accept: float, depth: int) -> None:
    tau = Acceptance(accept=accept, source="").tokens(depth)
    assert 1 <= tau <= depth + 1 + 1e-9
    again = acceptance.accept_of(min(tau, depth + 1), depth)
    assert Acceptance(accept=again, source="").tokens(depth) == pytest.approx(tau, abs=1e-6)


def embedded(**more: Any) -> PlanRequest:
    """The embedded target, with the zoo's draft model, where SPIRe's page has its headline."""
    target, draft = (models.read_shape(zoo.find(name)) for name in ("paceline-small", "paceline-small-draft"))
    given = {"target": target, "draft": draft, "machine": machines.machine("cpu"), "batch": 64, "context": 1984}
    return PlanRequest(**{**given, **more})


def test_a_measured_pair_takes_its_own_tau_draft_and_window() -> None:
    asked = embedded()
    found = {name: form(asked, name) for name in plan.DRAFTERS}
    stored = {pair["drafter"]: pair for pair in PAIRS if pair["target"] == "paceline-small"}
    assert {*stored} == {*plan.DRAFTERS}
    for name in ("spire", "magicdec", "draft_model"):
        known = found[name].acceptance
        assert known is not None and known.own and "src/paceline/papers/spire/README.md" in known.source
        assert found[name].tau == pytest.approx(dict(stored[name]["tau"])[1984])
    config = json.loads((zoo.find("paceline-small-spire") / "spire.json").read_text("utf-8"))
    assert (stored["spire"]["layers"], stored["spire"]["window"]) == (config["layers"], config["window"])
    own = ServedModel(shape=asked.target.last_layers(config["layers"]), keys=config["window"] + 1)
    each = throughput.pass_seconds(own, asked.machine, 64, 1984)
    assert found["spire"].round.draft == pytest.approx(4 * each)
    assert "sparse draft of 65 keys" in reason(asked, found["magicdec"])
