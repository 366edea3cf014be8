"""The study of Mirror: the paper's numbers, and every figure that runs, in small."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import mirror
import pytest
from kits.studies import run
from mirror_parts.forecast import Parts

pytest.importorskip("matplotlib")
QUICK = ("--quick", "--model", "paceline-small")


def test_table_1_inverted(tmp_path: Path) -> None:
    models = run(mirror.study, tmp_path, "table_1", *QUICK)["models"]
    first, last = models["Qwen3-14B, T=0"], models["Qwen3-32B, T=0"]
    assert (first["exception"], last["exception"]) == ("Mathematical Reasoning", "Mathematical Reasoning")
    assert [round(bound(first["ratios"].values()), 2) for bound in (min, max)] == [1.73, 1.90]
    assert [round(bound(last["ratios"].values()), 2) for bound in (min, max)] == [1.34, 1.75]
    for own in models.values():
        assert own["without"][1] < own["all"][1] < 0.2


PARTS = Parts(prefix=10.0, exit=1.0, suffix=10.0, host=0.5, send=0.2, draft=8.0, verdict=0.4, fresh=3.0)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_what_is_counted(tmp_path: Path) -> None:
    found = run(mirror.study, tmp_path, "figure_7", "--max-new-tokens", 24, *QUICK)
    (trace,) = found["traces"]
    assert found["widths"] == [1, 4] and trace["rates"] == sorted(trace["rates"], reverse=True)
    assert trace["verdicts"] > 2 and (tmp_path / "figure_7.svg").is_file()
    assert all(
        own["equal"] == own["ids"] == own["requests"]
        for own in run(mirror.study, tmp_path, "traces", *QUICK)["tasks"].values()
    )
    assert 0 <= run(mirror.study, tmp_path, "figure_3b", *QUICK)["tasks"]["sql"]["mean"] <= 2
    (tmp_path / "law.json").write_text(json.dumps({"parts": {"alone": asdict(PARTS)}}))
    simulated = run(mirror.study, tmp_path, "simulated", "--measured", tmp_path / "law.json", *QUICK)
    assert simulated["label"] == "virtual clock" and simulated["costs"] == {"exit": 0.06, "verdict": 0.02}
    assert all(0 < one["ratio"] <= one["most"] < 1.5 / 1.08 + 1e-9 for one in simulated["runs"].values())
