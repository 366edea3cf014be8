"""The width follows hit rates and times of ticks."""

from __future__ import annotations

from typing import Any

import pytest
from test_pipeline_round import GREEDY, PROMPTS, drafter, ids, piped, plain
from tiny import run

from paceline.core.errors import CapabilityError, ConfigError
from paceline.rounds import parse_round
from paceline.rounds.pipeline.flight import NONE, Flight, Offer
from paceline.rounds.pipeline.widths import EVERY, TickTime, Widths


def told(widths: Widths, seconds: Any, ranks: list[int], rounds: int = 6) -> int:
    for step in range(rounds * EVERY):
        rows = 1 + step % 8
        widths.time.saw(rows, seconds(rows))
        widths.said(ranks[step % len(ranks)])
    return widths.width


def test_a_width_is_worth_its_rows_or_falls() -> None:
    ranks = [0, 0, 0, 1, 5, 0, 2, NONE]
    assert told(Widths(8, 4), lambda rows: 1.0, ranks) == 8
    assert told(Widths(8, 4), lambda rows: 1.0 + 0.2 * rows, ranks) < 8
    assert told(Widths(8, 4), lambda rows: float(rows), [0, 0, NONE]) == 1
    assert Widths(6, 4)._widths == [1, 2, 4, 6]


def test_it_rises_again_when_tokens_are_missed_that_a_wider_level_had_held() -> None:
    widths = Widths(8, 4)
    assert told(widths, lambda rows: 1.0 + 0.1 * rows, [0]) == 1
    assert told(widths, lambda rows: 1.0 + 0.01 * rows, [0, 5, 6], rounds=40) == 8


def test_times_of_ticks_lie_on_a_line_that_never_falls() -> None:
    time = TickTime()
    assert not time.known
    for step in range(200):
        time.saw(1 + step % 4, 2.0 + 0.5 * (1 + step % 4))
    assert time.known and time(1) == pytest.approx(2.5) and time(9) == pytest.approx(6.5)
    for step in range(400):
        time.saw(1 + step % 4, 3.0 - 0.1 * (step % 4))
    assert time(1) == time(8) == pytest.approx(2.85, abs=0.05)
    for _ in range(2000):
        time.saw(3, 1.0)
    assert not time.known  # nothing is known of other rows any more


def test_a_candidate_without_room_is_remembered_by_its_rank() -> None:
    flight = Flight(7, 0)
    flight.enter(1)
    flight.append([Offer(flight.root, token, -float(token)) for token in range(4)], 2)
    verdict = flight.say(3)
    assert verdict.rank == NONE and verdict.missed == 3
    flight.enter(1)
    assert flight.say(3).missed == NONE


def test_ids_do_not_depend_on_it() -> None:
    jobs = [(prompt, GREEDY) for prompt in PROMPTS[:2]]
    engine, round_, _ = piped(drafter(), 4, ",width=8,children=4,adapt=true")
    seconds, seen = [0.0], set()

    def now() -> float:
        seconds[0] += max(round_._levels_in)  # wide levels take long
        return seconds[0]

    round_.now = now

    def note(ticked: Any) -> None:
        seen.add(round_.filling.width)

    round_.on_tick = note
    assert ids(run(engine, jobs)) == plain(jobs)
    assert len(seen) > 1 and round_.failure is None


def test_what_it_needs() -> None:
    with pytest.raises(ConfigError, match="adapt"):
        parse_round("pipeline,adapt=true,tree=1x1")
    with pytest.raises(CapabilityError, match="adapt is for drafts"):
        piped(None, 2, ",adapt=true")
