"""What segments cost and save, on a small network: every way trains on the same loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.bench.streams_memory import NAIVE, SegmentTask, measure
from paceline.cli.bench import app
from paceline.core.errors import ConfigError

SHAPE = "random:3x64x128x256"


def test_segments_need_less_memory_and_have_the_same_loss() -> None:
    """Scores of 768 x 768 rows are kept for the dense attention's backward pass; of segments, those of 16 carriers."""
    task = SegmentTask(folder=SHAPE, gamma=4, layers=1, rows=4, length=256, prompt=128, steps=1, threads=1)
    naive, segmented = measure(task, [NAIVE, 16])
    assert (naive.way, segmented.way) == ("naive", "16")
    assert naive.loss == pytest.approx(segmented.loss, rel=0.01)
    assert segmented.peak_mib < 0.7 * naive.peak_mib
    assert segmented.tokens_per_s > 0


def test_the_command_writes_what_it_prints(tmp_path: Path) -> None:
    out = tmp_path / "costs.json"
    options = "--rows 1 --length 32 --prompt 8 --gamma 2 --layers 1 --steps 1 --threads 1 --segments all --mode shared"
    result = CliRunner().invoke(app, ["segment-attention", "--model", SHAPE, *options.split(), "--out", str(out)])
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text("utf-8"))
    assert [cost["way"] for cost in found["costs"]] == ["all"]
    assert found["task"]["mode"] == "shared"


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"rows": 0}, "nothing would be measured"),
        ({"prompt": 511}, "no token is left"),
        ({"layers": 3}, "msa_layers"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: dict[str, int], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        measure(SegmentTask(**{"folder": SHAPE, "steps": 1, "threads": 1, **options}), [None])  # type: ignore[arg-type]
