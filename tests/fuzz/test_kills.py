"""The drafter's process is killed in small, and what is wrong is found."""

from __future__ import annotations

import random
from typing import Any

import kills
import pytest

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]  # processes that start and die


def test_one_death() -> None:
    found = kills.run(requests=8, kills=1, seed=1)
    assert found.requests >= 8 and len(found.resumed) == 1 and found.accepted > 0
    assert not [problem for problem in found.problems if "resumed late" not in problem]  # a busy machine starts slowly


def test_other_ids_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = kills.Killed(random.Random(0))
    generate = killed.mirror.generate

    def wrong(*given: Any, **more: Any) -> Any:
        outputs = generate(*given, **more)
        outputs[0].outputs[0].token_ids.append(7)
        return outputs

    monkeypatch.setattr(killed.mirror, "generate", wrong)
    killed.batch(2)
    assert len(killed.found.problems) == 1 and "other ids" in killed.found.problems[0]
