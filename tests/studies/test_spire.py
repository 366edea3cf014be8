"""The study of SPIRe's model: the paper's numbers are in what it writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import spire
from kits.studies import values

pytest.importorskip("matplotlib")


def test_all_figures_hold_the_papers_numbers(tmp_path: Path) -> None:
    assert spire.study.run(["--out", str(tmp_path)]) == 0
    assert {file.name for file in tmp_path.glob("*.svg")} == {
        *(f"figure_{n}.svg" for n in (1, 3, 4, 6)),
        "figure_6-appendix.svg",
    }
    small, large = values(tmp_path, "figure_1"), values(tmp_path, "figure_6")
    at = {draft: round(curve[small["contexts"].index(512)], 2) for draft, curve in small["curves"].items()}
    assert at == {"vanilla": 1.36, "MagicDec": 2.05, "SPIRe": 2.78}
    far = {draft: round(curve[large["contexts"].index(65_536)], 2) for draft, curve in large["curves"].items()}
    assert (far["MagicDec"], far["SPIRe"]) == (2.14, 2.82)
    grid = values(tmp_path, "figure_4")
    cell = grid["multipliers"]["SPIRe"][grid["batches"].index(64)][grid["contexts"].index(512)]
    assert round(cell, 2) == 2.78
    bounds = values(tmp_path, "figure_3")["targets"]
    assert {name: value["power_of_two"] for name, value in bounds.items()} == {"spire-8-layer": 32, "llama-3-70b": 4096}
    lines = {(line["target"], line["draft"]): line for line in values(tmp_path, "section_5")["lines"]}
    found = lines[("spire-8-layer", "SPIRe")]
    assert (round(found["saved"], 2), round(found["net"], 2)) == (6.40, 6.15)
    assert round(lines[("spire-8-layer", "MagicDec")]["net"], 2) == 5.13  # 5.12 in the paper, from a rounded 2.05
    assert lines[("spire-8-layer", "MagicDec")]["due"] == 0 < found["due"] < 0.4
    assert not {"table_1", "tau_by_depth", "cells"} & {file.stem for file in tmp_path.iterdir()}  # of trained drafts
