"""How long a stage may be at a frame, on made-up frames."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from paceline.distributed.hanging import HANG_S, MOST_ROW_S, MOST_S, RECENT, SLACK, HangLimit


def after(*frames: tuple[int, float]) -> HangLimit:
    made = HangLimit()
    for rows, seconds in frames:
        made.note(rows, seconds)
    return made


def most(rows: int) -> float:
    return MOST_S + MOST_ROW_S * rows


def test_of_the_first_frames_nothing_is_known() -> None:
    for made in (HangLimit(), after((1, 2.0)), after((1, 0.01), (64, 0.5))):
        assert [made.seconds(rows) for rows in (1, 64, 2048)] == [most(rows) for rows in (1, 64, 2048)]


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("at", [0, 5, 19])
def test_one_slow_frame_changes_nothing(rows: int, at: int) -> None:
    frames = [(rows, 0.02)] * 20
    usual = after(*frames)
    frames[at] = rows, 2.0
    slow = after(*frames)
    for asked in (1, 8, 64, 512):
        assert slow.seconds(asked) == usual.seconds(asked) <= HANG_S + SLACK * 0.02 * max(1, asked / rows)
    assert slow.seconds(64) < 10


def test_what_was_slow_for_a_while_is_forgotten() -> None:
    slow = [(1, 0.02)] * 20 + [(1, 2.0)] * 5
    assert after(*slow).seconds(1) == pytest.approx(HANG_S + SLACK * 2.0)
    assert after(*slow, *[(1, 0.02)] * (RECENT - 1)).seconds(1) == pytest.approx(HANG_S + SLACK * 0.02)


def test_no_limit_is_above_the_stated_one() -> None:
    made = after(*[(1, 2.0)] * 40)
    assert made.seconds(64) == most(64) == 124
    assert made.seconds(2) == pytest.approx(HANG_S + SLACK * 4.0)


def test_a_size_is_bounded_by_all_others() -> None:
    made = after(*[(8, 0.1)] * 2, *[(100, 0.4)] * 2)
    assert made.seconds(1) == pytest.approx(HANG_S + SLACK * 0.1)  # no longer than 8 rows
    assert made.seconds(10) == pytest.approx(HANG_S + SLACK * 0.125)  # as 8 rows 1.25 times
    assert made.seconds(64) == pytest.approx(HANG_S + SLACK * 0.4)  # no longer than 100 rows
    assert made.seconds(200) == pytest.approx(HANG_S + SLACK * 0.8)
    made = after((8, 0.1), (15, 0.1), (15, 0.1))  # of about a size
    assert made.seconds(15) == pytest.approx(HANG_S + SLACK * 0.1)


# Seconds of a frame by its rows: weights read once, arithmetic of each row, their sum, and the longer of them.
LAWS: list[Callable[[int], float]] = [
    lambda rows: 0.5,
    lambda rows: 0.05 * rows,
    lambda rows: 0.3 + 0.02 * rows,
    lambda rows: max(0.4, 0.04 * rows),
]


@pytest.mark.parametrize("law", LAWS)
def test_a_long_frame_of_many_rows_is_waited_for(law: Callable[[int], float]) -> None:
    """Also where all frames before it had few rows, and where times vary by half."""
    draw = random.Random(0)
    made, longest = HangLimit(), 0.0
    for rows in [1] * 30 + [draw.choice((1, 2, 7, 8)) for _ in range(30)] + [512, 1, 300, 2, 512, 2048, 64, 512]:
        took = law(rows) * draw.uniform(1.0, 1.5)
        assert took < made.seconds(rows)
        made.note(rows, took)
        longest = max(longest, took)
    assert longest > 0.5 and (law(2048) <= 0.5 or longest > 40)
    assert made.seconds(1) < HANG_S + SLACK * 1.5 * law(1) + 1e-9
