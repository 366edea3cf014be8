"""The width follows what trees of each width would have cost, and times of ticks."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
from kits.tiny import run
from test_pipeline_round import GREEDY, PROMPTS, drafter, ids, piped, plain

from paceline.core.errors import CapabilityError, ConfigError
from paceline.core.sampling import SamplingParams
from paceline.rounds import parse_round
from paceline.rounds.pipeline.widths import REST, SURVEY, TickTime, Widths


class Watch(Widths):
    """Replays all that is said, and never changes the width."""

    def __init__(self, most: int, stages: int) -> None:
        super().__init__(most, stages)
        self.seen: list[Mapping[int, int]] = []

    def said(self, ticks: Mapping[int, int]) -> None:
        self.seen.append(ticks)


def ran(prompt: list[int], width: int, stages: int) -> tuple[list[bool], list[Mapping[int, int]], list[int]]:
    """Of one width: which tokens were hits, what was replayed of all widths, and in which ticks tokens were said."""
    engine, round_, ticks = piped(drafter(0.03 if stages == 4 else 0.06), stages, f",width={width},children=4")
    round_.widths = watch = Watch(width, stages)
    run(engine, [(prompt, SamplingParams(temperature=0, max_tokens=48, ignore_eos=True))])
    hits = [verdict.hit for tick in ticks for verdict in tick.verdicts]
    return hits, watch.seen, [place for place, tick in enumerate(ticks) if tick.said]


@pytest.mark.parametrize("stages", [4, pytest.param(8, marks=pytest.mark.full)])
def test_a_replay_finds_what_narrower_trees_do_when_they_run(stages: int) -> None:
    """Hits and ticks of widths 1, 2, 4, as one run with 8 replays them and as runs of each give them."""
    hits: dict[int, list[int]] = {}
    ticks: dict[int, list[int]] = {}
    for prompt in PROMPTS[1:3]:
        _, wide, _ = ran(prompt, 8, stages)
        for width in (1, 2, 4, 8):
            direct, own, when = ran(prompt, width, stages)
            gaps = [after - before for before, after in pairwise(when)]
            assert [seen[width] for seen in own[1:]] == gaps[:-1]  # its own run to the tick
            assert [seen[width] < stages for seen in own[1:]] == direct[:-1]
            hits.setdefault(width, []).append(sum(seen[width] < stages for seen in wide[1:]) - sum(direct[:-1]))
            ticks.setdefault(width, []).append(sum(seen[width] for seen in wide[1:]) - sum(gaps[:-1]))
    assert max(abs(off) for row in hits.values() for off in row) <= 1  # of 46; by ranks in the wide level up to 6
    assert max(abs(off) for row in ticks.values() for off in row) <= 4  # of 92 to 305


def told(widths: Widths, seconds: Any, ticks: Mapping[int, int], tokens: int = SURVEY) -> int:
    for step in range(tokens):
        rows = 1 + step % 8
        widths.time.saw(rows, seconds(rows))
        widths.said(ticks)
    return widths.width


def test_a_width_is_worth_its_rows_or_falls_and_is_surveyed_again() -> None:
    ticks = {1: 4, 2: 3, 4: 2, 8: 1}
    assert told(Widths(8, 4), lambda rows: 1.0, ticks) == 8
    assert told(Widths(8, 4), lambda rows: float(rows), ticks) == 1
    widths = Widths(6, 4)
    assert told(widths, lambda rows: 1.0 + 0.5 * rows, {1: 4, 2: 2, 4: 2, 6: 2}) == 2 and not widths.surveying
    assert told(widths, lambda rows: 1.0, {}, REST) == 6 and widths.surveying
    assert told(widths, lambda rows: 1.0, {}, 3 * SURVEY) == 6 and widths.surveying  # nothing was replayed
    assert widths.bubbles(1) == 3.0
    unknown = Widths(8, 4)
    for _ in range(SURVEY):
        unknown.time.saw(3, 1.0)
        unknown.said(ticks)
    assert unknown.width == 4  # so that ticks differ in their rows


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


def test_ids_do_not_depend_on_it() -> None:
    jobs = [(prompt, GREEDY) for prompt in PROMPTS[:2]]
    engine, round_, _ = piped(drafter(), 4, ",width=8,children=4,adapt=true")
    seconds, seen = [0.0], set()

    def now() -> float:
        seconds[0] += max(round_._levels_in)  # wide levels take long
        return seconds[0]

    round_.now = now

    def note(ticked: Any) -> None:
        seen.add(round_.width)

    round_.on_tick = note
    assert ids(run(engine, jobs)) == plain(jobs)
    assert len(seen) > 1 and round_.failure is None


def test_what_it_needs() -> None:
    with pytest.raises(ConfigError, match="adapt"):
        parse_round("pipeline,adapt=true,tree=1x1")
    with pytest.raises(CapabilityError, match="adapt is for drafts"):
        piped(None, 2, ",adapt=true")
