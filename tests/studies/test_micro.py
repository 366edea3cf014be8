"""What single operations cost is measured on real engines and processes; how much it is, no test says."""

from __future__ import annotations

from pathlib import Path

import micro
import pytest
from kits.native import needs_kernels
from kits.studies import run

from paceline.runtime.placement import cores

two_cores = pytest.mark.skipif(len(cores()) < 2, reason="two processes want a core each")


@two_cores
def test_hops(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    before = cores()
    costs = run(micro.study, tmp_path, "hops", "--sizes", "64,5000", "--repeats", 5)["hops"]
    assert [(c["wait"], c["size_bytes"]) for c in costs] == [(w, n) for w in ("busy", "idle") for n in (64, 5000)]
    assert all(0 < c["low_us"] <= c["median_us"] <= c["high_us"] for c in costs)
    assert "idle" in capsys.readouterr().out and cores() == before


@needs_kernels
def test_joins(tmp_path: Path):
    costs = run(micro.study, tmp_path, "joins", "--rows", "1,8", "--repeats", 2)["joins"]
    ways = "shared memory", "gloo"
    assert [(c["way"], c["rows"]) for c in costs] == [(way, r) for r in (1, 8) for way in ways]
    assert all(0 < c["low_us"] <= c["median_us"] <= c["high_us"] for c in costs)


@needs_kernels
def test_the_parts_of_a_step_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter = "streams:paceline-small-streams"
    asked = ("--drafter", drafter, "--batch", "1,2", "--prompts", 3, "--threads", 1)
    made = run(micro.study, tmp_path, "parts", *asked)
    shown = capsys.readouterr().out
    for word in ("host, batch 1", "compiled, batch 2", "whole step", "emit"):
        assert word in shown
    assert [one["batch"] for one in made["steps"]] == [1, 2]
    for one in made["steps"]:
        assert one["drafter"] == drafter and one["steps"] > 20 and one["tokens"] >= one["batch"]
        assert 0 < one["host_ms"] < one["step_ms"]
        # Medians of parts need not add up to the median of their sums, but nearly do.
        whole = sum(part["host_ms"] + part["native_ms"] for part in one["parts"])
        assert 0.5 * one["step_ms"] < whole < 1.5 * one["step_ms"]
        names = {part["part"] for part in one["parts"] if part["host_ms"] + part["native_ms"] > 0}
        assert {"schedule", "emit", "keep", "streams", "budget"} <= names
