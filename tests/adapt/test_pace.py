"""When the first part of a training ends: its time is over, or little is left to gain."""

from __future__ import annotations

import math
from collections.abc import Mapping

from paceline.adapt.training import LEVEL, TrainingPace, further_gain


class Trainer:
    """Notes that it was stopped."""

    stopped = False

    def stop(self) -> None:
        self.stopped = True


def pace(left: float = 100.0) -> tuple[TrainingPace, Trainer]:
    def tell(figures: Mapping[str, float]) -> None: ...

    made, trainer = TrainingPace(lambda: left, 1e6, tell), Trainer()
    made.trainer = trainer  # type: ignore[assignment]
    return made, trainer


def check(made: TrainingPace, tokens: float, accepted: float) -> None:
    made.step(1, {"tokens": tokens, "loss": 1.0})
    made.evaluated(1, {"accepted/a": accepted, "accepted/b": accepted, "ce/a/1": 9.0})


def test_it_goes_on_while_checks_rise_and_ends_where_they_stay() -> None:
    made, trainer = pace()
    for n in range(5):
        check(made, 1e5 * (n + 1), 0.5 + 0.2 * n)
    assert not trainer.stopped
    for n in range(5, 9):
        check(made, 1e5 * (n + 1), 1.3)
    assert trainer.stopped and made.early


def test_one_bad_check_ends_nothing() -> None:
    made, trainer = pace()
    for n, value in enumerate((0.5, 0.7, 0.9, 0.4, 1.2, 1.4)):
        check(made, 1e5 * (n + 1), value)
    assert LEVEL == 2 and not trainer.stopped


def test_it_ends_where_its_time_is_over() -> None:
    made, trainer = pace(left=-1.0)
    check(made, 1e5, 0.5)
    assert trainer.stopped and not made.early


def test_going_on_is_worth_it_while_checks_rise() -> None:
    rising = [(1e5 * 2**n, 0.5 + 0.2 * n) for n in range(4)]
    level = [(1e5 * 2**n, 1.0 + 0.001 * n) for n in range(4)]
    assert further_gain(rising, 3e6) > 0.05 and further_gain(level, 3e6) < 0.01
    assert further_gain(rising[:2], 3e6) == math.inf
    assert further_gain([(n, 2.0 - n / 1e6) for n, _ in rising], 3e6) == 0.0
