"""The study of SpecPipe: virtual times are what the formulas give, and ids are plain decoding's."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import specpipe

from paceline.distributed.placement import cores

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


def test_everything_else_in_small(tmp_path: Path) -> None:
    figures = [name for name in specpipe.study.items if name not in ("figure_11", "table_1", "real")]
    small = ["--quick", "--stages", "2", "--max-new-tokens", "6", "--tasks", "sql"]
    assert specpipe.study.run([*figures, *small, "--out", str(tmp_path)]) == 0
    assert {file.stem for file in tmp_path.glob("*.json")} == {*figures}


def test_measured_times_take_the_papers_place(tmp_path: Path) -> None:
    """A layer of 2 ms and a head of 3, drafts for nothing."""
    timed = tmp_path / "timed"
    timed.mkdir()
    parts = {"layer_ms": {"1": 2.0, "8": 2.0}, "head_ms": {"1": 3.0, "8": 3.0}, "draft_ms": {"1": 0.0, "8": 0.0}}
    (timed / "times.json").write_text(json.dumps({**parts, "layers": 12, "threads": 1}))
    (timed / "costs.json").write_text(json.dumps({"plan_ms": [0.0, 0.0], "coordinator_ms": [0.0, 0.0, 0.0]}))
    ask = ["figure_13", "--stages", "4", "--prompts", "1", "--max-new-tokens", "16", "--tasks", "sql"]
    assert specpipe.study.run([*ask, "--measured", str(timed), "--out", str(tmp_path)]) == 0
    found = values(tmp_path, "figure_13")
    cut = [int(size) for size in re.findall(r"stages of (\S+) layers", found["remarks"][0])[0].split("x")]
    assert sum(cut) == 12 and cut[-1] < min(cut[:-1])  # which has the head
    here, far = found["rows"]
    assert here["tbt_ms"] == pytest.approx(here["times_plain"] ** -1 * 27.0)  # 12 layers and the head, one row
    assert 8.0 <= here["tbt_ms"] < 27.0 < far["tbt_ms"] * far["times_plain"]
    (timed / "costs.json").unlink()
    assert specpipe.study.run([*ask, "--measured", str(timed), "--out", str(tmp_path)]) == 2


@pytest.mark.full
@pytest.mark.skipif(len(cores()) < 2, reason="two stages on two cores")
def test_real_stages_in_small(tmp_path: Path) -> None:
    small = ["--model", "paceline-small", "--prompts", "1", "--repeats", "1", "--max-new-tokens", "12"]
    assert specpipe.study.run(["real", *small, "--out", str(tmp_path)]) == 0
    found = values(tmp_path, "real")
    assert found["rates"]["synthetic, P = 0.95"] > 0.5 > found["rates"]["plain pipeline"] == 0
    assert found["ceiling"] > 0 and found["times_plain"] == pytest.approx(
        found["ms"]["plain pipeline"] / found["ms"]["synthetic, P = 0.95"]
    )
