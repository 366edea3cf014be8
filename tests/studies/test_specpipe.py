"""The study of SpecPipe: virtual times are what the formulas give, and ids are plain decoding's."""

from __future__ import annotations

from pathlib import Path

import pytest
import specpipe
from kits.studies import run, values

from paceline.runtime.placement import cores

pytest.importorskip("matplotlib")


def test_the_papers_hit_rates_give_its_times_over_the_plain_pipeline(tmp_path: Path) -> None:
    assert specpipe.study.run(["figure_11", "table_1", "--max-new-tokens", "48", "--out", str(tmp_path)]) == 0
    found = values(tmp_path, "figure_11")
    for one in found["runs"]:
        if one["link"] == "no link":
            assert one["tbt_ms"] == pytest.approx(one["formula_ms"], rel=1e-6)
            assert one["tbt_ms"] == pytest.approx(one["bubbles_ms"], rel=1e-6)
        else:
            assert one["tbt_ms"] > one["formula_ms"]
        assert one["formula_ms"] < one["equation_2_ms"]
    assert values(tmp_path, "table_1")["farthest"] < 0.05


@pytest.mark.full
@pytest.mark.skipif(len(cores()) < 2, reason="two stages on two cores")
def test_real_stages_in_small(tmp_path: Path) -> None:
    small = ("--model", "paceline-small", "--times", 1, "--prompts", 1, "--repeats", 1, "--max-new-tokens", 12)
    found = run(specpipe.study, tmp_path, "real", *small)
    assert found["rates"]["synthetic, P = 0.95"] > 0.5 > found["rates"]["plain pipeline"] == 0
    assert found["ceiling"] > 0 and found["times_plain"] == pytest.approx(
        found["ms"]["plain pipeline"] / found["ms"]["synthetic, P = 0.95"]
    )
