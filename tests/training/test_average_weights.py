"""tools/average_weights.py: the mean of two models of one shape."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

TOOL = Path(__file__).parents[2] / "tools/average_weights.py"


def model(folder: Path, value: float, rows: int = 2) -> Path:
    folder.mkdir()
    save_file({"w": torch.full((rows, 3), value, dtype=torch.bfloat16)}, folder / "model.safetensors")
    (folder / "config.json").write_text(f'"{folder.name}"')
    return folder


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, TOOL, *map(str, arguments)], capture_output=True, text=True, check=False)


def test_the_mean_has_the_later_ones_share_and_files(tmp_path: Path) -> None:
    earlier, later, out = model(tmp_path / "a", 1.0), model(tmp_path / "b", 2.0), tmp_path / "out"
    assert run(earlier, later, "--share", 0.25, "--out", out).returncode == 0
    assert torch.equal(load_file(out / "model.safetensors")["w"], torch.full((2, 3), 1.25, dtype=torch.bfloat16))
    assert (out / "config.json").read_text() == '"b"'


def test_models_of_another_shape_and_shares_beyond_one_are_refused(tmp_path: Path) -> None:
    earlier, later, out = model(tmp_path / "a", 1.0), model(tmp_path / "b", 2.0, rows=4), tmp_path / "out"
    assert "average models of one shape" in run(earlier, later, "--out", out).stderr
    assert "give 0 to 1" in run(earlier, later, "--share", 2, "--out", out).stderr
    assert not out.exists()
