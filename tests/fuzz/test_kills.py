"""Processes are killed in small, and what is wrong is found."""

from __future__ import annotations

import random
from typing import Any

import kills
import pytest

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]  # processes that start and die


@pytest.mark.parametrize("options", [{}, kills.MIRROR], ids=["pipeline", "mirror"])
def test_one_death(options: dict[str, Any]) -> None:
    found = kills.run(kills=1, seed=1, **options)
    assert len(found.deaths) == 1 and found.requests >= 2 * kills.BATCH
    assert not [problem for problem in found.problems if "are wanted" not in problem]  # a busy machine starts slowly


def test_other_ids_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = kills.Killed(random.Random(0))
    prepared = killed.prepared()
    killed.batch(prepared)
    assert not killed.found.problems
    prepared[2][0][0] += 1
    killed.batch(prepared)
    assert len(killed.found.problems) == 1 and "other ids" in killed.found.problems[0]
