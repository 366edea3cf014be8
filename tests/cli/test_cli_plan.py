"""``paceline plan``: the table, JSON, and mistakes that end in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kits import gguf_files
from typer.testing import CliRunner

from paceline.cli import app
from paceline.draft import registry
from paceline.plan import models
from paceline.plan.plan import DRAFTERS, PLAIN

LARGE = ("--target", "llama-3-70b", "--machine", "h100", "--batch", "64", "--context", "65536")
SMALL = ("--target", "paceline-small", "--machine", "cpu", "--context", "256")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    return lambda *args: CliRunner().invoke(app, ["plan", *args])


def test_a_table_with_reasons_and_assumptions(run: Any) -> None:
    result = run(*LARGE)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "batch 64, context 65,536" in lines[0]
    assert lines[2].split()[0] == "spire" and "KV-bound: sparse draft of 8,192 keys" in lines[2]
    assert "SPIRe, table 1" in result.stdout and "does not fit: 20 devices would hold it" in result.stdout
    assert {PLAIN, *DRAFTERS} <= {*registry.names()}


def test_a_gguf_file_is_planned_as_it_is_stored(run: Any, tmp_path: Path) -> None:
    """By its types, named as a file or as the folder that holds it."""
    (folder := tmp_path / "a model").mkdir()
    file = gguf_files.write(folder / "small.gguf", "q4_1")
    requests = ((file, ()), (folder, ()), (file, ("--weights", "bfloat16")))
    results = [run("--target", str(target), *SMALL[2:], *more) for target, more in requests]
    stored, same, wide = (result.stdout.splitlines()[2:8] for result in results)
    assert stored == same != wide and "spire" in " ".join(stored), results[0].output
    assert models.read_shape(file).weight_bytes == 20 / 32


@pytest.mark.parametrize(
    ("args", "wrong"),
    [
        (("--target", "llama-3-7b"), "Did you mean 'llama-3-70b'? Known models: llama-2-7b"),
        (("--context", "131073"), "Give 1 to 131072"),
        (("--draft", "nobody"), "no such model"),
    ],
)
def test_mistakes_end_in_one_line(run: Any, args: tuple[str, ...], wrong: str) -> None:
    result = run(*LARGE, *args)
    assert result.exit_code == 2, result.output
    assert wrong in result.stderr and len(result.stderr.strip().splitlines()) == 1
