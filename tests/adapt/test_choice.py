"""Forecasts: what a kind reaches, what it is worth, and whether going on is."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.adapt.choice import Speeds, Survey, beside_look_ups, forecasts, further_gain, nearest, reached

SPEEDS = Speeds(score=1000.0, train=2000.0, steps=[(1.0, 1.1), (3.0, 1.2), (6.0, 1.3), (12.0, 1.6)])
DEAR = replace(SPEEDS, steps=[(nodes, 3.0 * took) for nodes, took in SPEEDS.steps])
SURVEY = Survey(
    chain=[(1, 10.0), (2, 10.2), (4, 11.0), (8, 13.0)],
    plain=[(1, 10.0), (8, 14.0)],
    context=128,
    context_ms=0.5,
    answer=500.0,
    lookup_tokens=1.5,
    lookup_speed=1.4,
    copied=0.4,
    copied_tokens=6.0,
    parameters=134_000_000,
    prompt_share=1.5,
    kinds={"eagle": SPEEDS, "medusa": SPEEDS},
)


def test_the_table_is_what_the_tool_makes_of_the_logs(capsys: pytest.CaptureFixture[str]) -> None:
    import runpy

    root = Path(__file__).resolve().parents[2]
    runpy.run_path(str(root / "tools" / "reached.py"), run_name="__main__")
    assert capsys.readouterr().out == (root / "src/paceline/adapt/reached.toml").read_text(encoding="utf-8")


def test_what_is_reached_lies_on_the_log_and_goes_on_as_it_rose() -> None:
    run = nearest("eagle", 135_000_000)
    assert run["target"] == "smollm2-135m" and nearest("eagle", 30_000_000)["target"] == "paceline-small"
    tokens, value = run["reached"][4]
    assert reached(run, tokens) == pytest.approx(value * run["used"])
    assert reached(run, 10) == 0.0
    last = run["reached"][-1]
    assert last[1] * run["used"] < reached(run, 2 * last[0]) <= reached(run, 100 * last[0]) < 3


def test_the_kind_that_is_expected_to_pay_most_comes_first() -> None:
    """More time, more tokens, more worth; a dearer draft is worth less; no forecast is below look-ups."""
    first, second = forecasts(SURVEY, 7200.0)
    assert (first.kind, second.kind) == ("eagle", "medusa") and first.hybrid >= second.hybrid >= SURVEY.lookup_speed
    assert 1 < second.alone < first.alone < first.hybrid and 0 < first.accepted < 3 and 1 <= first.nodes <= 12
    assert first.alone >= (1 + first.accepted) / first.step  # at other nodes, where look-ups do not stand beside
    longer = forecasts(SURVEY, 72_000.0)[0]
    assert longer.tokens > 5 * first.tokens and longer.hybrid > first.hybrid
    dear = replace(SURVEY, kinds={"eagle": DEAR})
    assert forecasts(dear, 7200.0)[0].hybrid == SURVEY.lookup_speed  # it would be slower, and is left out
    known = replace(SURVEY, lookup_speed=8.0, kinds={"medusa": DEAR, "eagle": SPEEDS})
    equal = forecasts(known, 7200.0)
    assert equal[0].hybrid == equal[1].hybrid == 8.0 and equal[0].alone > equal[1].alone
    for factor, better in ((1.2, "eagle"), (1.5, "medusa")):  # of two about as good the one of which more is accepted
        slower = replace(SPEEDS, steps=[(nodes, factor * took) for nodes, took in SPEEDS.steps])
        one, other = forecasts(replace(known, kinds={"eagle": slower, "medusa": SPEEDS}), 7200.0)
        assert one.kind == better and (one.alone < other.alone) == (better == "eagle")


def test_beside_look_ups_a_drafter_is_worth_what_they_do_not_know() -> None:
    """Of half the tokens, eight a pass, look-ups are right: there a drafter of depth 3 is right, too."""
    known = replace(SURVEY, copied=0.5, copied_tokens=8.0, lookup_speed=1 / (0.5 / 8 + 0.5), lookup_tokens=1.78)
    tau = 1 / (0.5 / 4 + 0.5 / 2)  # four tokens a pass where look-ups are right, two elsewhere
    assert beside_look_ups(known, tau, 3, 1.0) == pytest.approx(1 / (0.5 / 8 + 0.5 / 2))
    assert beside_look_ups(known, tau, 3, 1.5) == pytest.approx(1 / (0.5 / 8 + 1.5 * 0.5 / 2))
    assert beside_look_ups(known, 1.2, 3, 1.0) == pytest.approx(known.lookup_speed)  # right nowhere else
    nothing = replace(SURVEY, copied=0.0, copied_tokens=1.0, lookup_speed=1.0, lookup_tokens=1.0)
    assert beside_look_ups(nothing, 2.0, 3, 1.25) == pytest.approx(2.0 / 1.25)  # as alone


def test_going_on_is_worth_it_while_checks_rise() -> None:
    rising = [(1e5 * 2**n, 0.5 + 0.2 * n) for n in range(4)]
    level = [(1e5 * 2**n, 1.0 + 0.001 * n) for n in range(4)]
    assert further_gain(rising, 3e6) > 0.05 and further_gain(level, 3e6) < 0.01
    assert further_gain(rising[:2], 3e6) == math.inf
    assert further_gain([(n, 2.0 - n / 1e6) for n, _ in rising], 3e6) == 0.0
