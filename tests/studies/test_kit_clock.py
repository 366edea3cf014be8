"""Virtual time: who runs when, what is waited for, and that nothing depends on the threads underneath."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest
from kit.clock import Stuck, VirtualClock
from kits.channels import RealTime

from paceline.core.errors import ConfigError
from paceline.distributed.clock import Clock, Late, Pace


@pytest.fixture
def clock() -> Iterator[VirtualClock]:
    with VirtualClock() as made:
        yield made


def test_time_passes_where_somebody_sleeps(clock: VirtualClock):
    seen: list[tuple[str, float]] = []

    def other() -> None:
        for _ in range(3):
            clock.sleep_until(clock.now() + 2.0)
            seen.append(("other", clock.now()))

    clock.start("other", other)
    clock.sleep_until(3.0)
    seen.append(("main", clock.now()))
    clock.sleep_until(10.0)
    assert seen == [("other", 2.0), ("main", 3.0), ("other", 4.0), ("other", 6.0)]
    assert clock.now() == 10.0


def test_of_equal_times_the_one_that_was_due_first_comes_first(clock: VirtualClock):
    seen: list[int] = []

    def sleeper(number: int) -> None:
        clock.sleep_until(1.0)
        seen.append(number)

    for number in range(5):
        clock.start(f"sleeper {number}", lambda number=number: sleeper(number))
    clock.sleep_until(2.0)
    assert seen == [0, 1, 2, 3, 4]


def test_messages_are_there_when_they_were_put(clock: VirtualClock):
    box, seen = clock.mailbox(), []

    def reader() -> None:
        while True:
            seen.append((box.get(), clock.now()))

    clock.start("reader", reader)
    for number in range(3):
        clock.sleep_until(number + 0.5)
        box.put(number)
    clock.sleep_until(9.0)
    assert seen == [(0, 0.5), (1, 1.5), (2, 2.5)]


def test_a_wait_ends_with_its_time_and_its_end_is_no_later_wait_s(clock: VirtualClock):
    box, seen = clock.mailbox(), []

    def reader() -> None:
        with pytest.raises(Late):
            box.get(timeout=1.0)
        seen.append(("late", clock.now()))
        seen.append((box.get(timeout=5.0), clock.now()))  # ends at 2, not at 6
        clock.sleep_until(7.0)  # the end of the wait before, at 6, does not wake it
        seen.append(("awake", clock.now()))

    clock.start("reader", reader)
    clock.sleep_until(2.0)
    box.put("item")
    clock.sleep_until(20.0)
    assert seen == [("late", 1.0), ("item", 2.0), ("awake", 7.0)]
    with pytest.raises(Late):
        box.get(timeout=0)
    assert clock.now() == 20.0


def test_who_waits_for_nothing_is_told(clock: VirtualClock):
    clock.start("other", lambda: clock.mailbox().get())
    with pytest.raises(Stuck, match="everybody waits"):
        clock.mailbox().get()


def test_a_failed_activity_is_named(clock: VirtualClock):
    def broken() -> None:
        clock.sleep_until(1.0)
        raise ValueError("no such row")

    clock.start("stage 2", broken)
    with pytest.raises(Stuck, match="stage 2 failed: no such row"):
        clock.sleep_until(2.0)


def test_a_thread_of_another_kind_is_refused(clock: VirtualClock):
    found: list[BaseException] = []

    def outside() -> None:
        try:
            clock.sleep_until(1.0)
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=outside)
    thread.start()
    thread.join()
    assert "main's now" in str(found[0])


def test_no_thread_is_left_behind():
    before = threading.active_count()
    with VirtualClock() as clock:
        for _ in range(3):
            clock.start("waits for ever", lambda: clock.mailbox().get())
        clock.start("never begun", lambda: None)
    assert threading.active_count() == before


def traced(seed: int) -> list[tuple[float, int, int]]:
    """What a net of random activities does: sleeps, messages to each other, waits with an end."""
    draw, seen = random.Random(seed), []
    plans = [[(draw.randrange(3), draw.random(), draw.randrange(4)) for _ in range(30)] for _ in range(4)]
    with VirtualClock() as clock:
        boxes = [clock.mailbox() for _ in plans]

        def act(own: int) -> None:
            for step, (kind, seconds, other) in enumerate(plans[own]):
                if kind == 0:
                    clock.sleep_until(clock.now() + seconds)
                elif kind == 1:
                    boxes[other].put(step)
                else:
                    try:
                        boxes[own].get(timeout=seconds)
                    except Late:
                        seen.append((clock.now(), own, -step))
                seen.append((clock.now(), own, step))

        for own in range(len(plans)):
            clock.start(f"activity {own}", lambda own=own: act(own))
        clock.sleep_until(100.0)
    return seen


def test_a_schedule_is_the_same_in_every_run():
    first = traced(1)
    assert len(first) > 120 and len({own for _, own, _ in first}) == 4
    assert [time for time, _, _ in first] == sorted(time for time, _, _ in first)
    assert traced(1) == first
    assert traced(2) != first


def test_given_times(clock: VirtualClock):
    pace = Pace(clock, lambda rows: 0.5 * rows)
    with pace.work(rows=4):
        assert clock.now() == 0.0
    assert clock.now() == 2.0
    with Pace(clock).work():
        pass
    assert clock.now() == 2.0
    with pace.work(rows=1):
        clock.sleep_until(5.0)
    assert clock.now() == 5.0
    with pytest.raises(ConfigError, match="that is no time"):
        clock.sleep_until(float("inf"))


def test_the_same_code_runs_in_real_time():
    clock: Clock = RealTime()
    asked, answers = clock.mailbox(), clock.mailbox()
    clock.start("doubler", lambda: answers.put(2 * asked.get()))
    began = clock.now()
    with Pace(clock, lambda rows: 0.01).work():
        asked.put(21)
    assert answers.get(timeout=10) == 42 and clock.now() - began >= 0.01
    with pytest.raises(Late):
        answers.get(timeout=0)
    assert clock.label == "" and VirtualClock.label == "virtual clock"
