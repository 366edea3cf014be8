"""The study of SpecPipe: virtual times are what the formulas give, and ids are plain decoding's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import specpipe

from paceline.runtime.placement import cores

pytest.importorskip("matplotlib")


def values(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text("utf-8"))


def test_the_papers_hit_rates_give_its_times_over_the_plain_pipeline(tmp_path: Path) -> None:
    assert specpipe.study.run(["figure_11", "table_1", "--max-new-tokens", "48", "--out", str(tmp_path)]) == 0
    found = values(tmp_path, "figure_11")
    for run in found["runs"]:
        if run["link"] == "no link":
            assert run["tbt_ms"] == pytest.approx(run["formula_ms"], rel=1e-6)
            assert run["tbt_ms"] == pytest.approx(run["bubbles_ms"], rel=1e-6)
        else:
            assert run["tbt_ms"] > run["formula_ms"]
        assert run["formula_ms"] < run["equation_2_ms"]
    assert values(tmp_path, "table_1")["farthest"] < 0.05


@pytest.mark.full
@pytest.mark.skipif(len(cores()) < 2, reason="two stages on two cores")
def test_real_stages_in_small(tmp_path: Path) -> None:
    small = ["--model", "paceline-small", "--times", "1", "--prompts", "1", "--repeats", "1", "--max-new-tokens", "12"]
    assert specpipe.study.run(["real", *small, "--out", str(tmp_path)]) == 0
    found = values(tmp_path, "real")
    assert found["rates"]["synthetic, P = 0.95"] > 0.5 > found["rates"]["plain pipeline"] == 0
    assert found["ceiling"] > 0 and found["times_plain"] == pytest.approx(
        found["ms"]["plain pipeline"] / found["ms"]["synthetic, P = 0.95"]
    )
