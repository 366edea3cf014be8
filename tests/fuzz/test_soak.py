"""The soak works for seconds, and each of its conditions can fail."""

from __future__ import annotations

import csv
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import soak
from soak import GROWTH_BYTES, Reading, growth, judge_memory

from paceline.engine.scheduler import Scheduler

pytestmark = pytest.mark.timeout(240)
MIB = 2**20


def curve(slope_mib: float, seconds: int = 600) -> list[Reading]:
    """Two drafters in turns of ten seconds, one of them larger, growing by ``slope_mib`` a minute."""
    return [
        Reading(t, round((300 + 200 * (t // 10 % 2) + slope_mib * t / 60) * MIB), "ab"[t // 10 % 2])
        for t in range(0, seconds, 2)
    ]


def test_two_seconds(tmp_path: Path) -> None:
    assert soak.main(["--minutes", str(2 / 60), "--out", str(tmp_path)]) == 0
    rows = list(csv.DictReader((tmp_path / "memory.csv").open()))
    assert rows and all(int(row["rss_bytes"]) > 50 * MIB for row in rows)


def test_growth_is_that_of_each_drafter() -> None:
    """Between the thirds of ten minutes lie 400 seconds; which drafter a third has more of does not matter."""
    assert growth(curve(0))[0] == 0
    assert growth(curve(6))[0] == pytest.approx(40 * MIB, rel=0.05)
    uneven = [r for r in curve(0) if r.drafter == "a" or r.second < 250]
    assert growth(uneven)[0] == 0


def test_memory_that_grows_fails() -> None:
    assert judge_memory(curve(0), 600)[0] is None
    problem, said = judge_memory(curve(6), 600)
    assert problem == said and "memory grew by" in said
    assert judge_memory(curve(0.5), 600)[0] is None  # 3 MiB
    assert GROWTH_BYTES == 8 * MIB
    assert judge_memory(curve(60, 100), 100) == (None, "memory is judged from 300 s on; this run had 100")


def test_what_is_left_behind_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Aborted sequences that stay in the scheduler."""
    caplog.set_level(logging.CRITICAL, logger="paceline")
    real = Scheduler.remove

    def remove(self: Scheduler, sequences: Sequence[Any]) -> None:
        real(self, [s for s in sequences if s.checker.finish_reason != "abort"])

    monkeypatch.setattr(Scheduler, "remove", remove)
    assert soak.main(["--minutes", str(2 / 60), "--out", str(tmp_path)]) == 1
    assert "FAILED" in capsys.readouterr().out
