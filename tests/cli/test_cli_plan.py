"""``paceline plan``: the table, JSON, and mistakes that end in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kits import gguf_files
from typer.testing import CliRunner

from paceline.cli import app
from paceline.draft import registry
from paceline.plan.plan import DRAFTERS, PLAIN

LARGE = ("--target", "llama-3-70b", "--machine", "h100", "--batch", "64", "--context", "65536")
SMALL = ("--target", "paceline-small", "--machine", "cpu", "--context", "256")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    return lambda *args: CliRunner().invoke(app, ["plan", *args])


def ranked(result: Any) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    return {row["drafter"]: row for row in json.loads(result.stdout)["ranked"]}


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
    for target in (file, folder):
        said = json.loads((result := run("--target", str(target), *SMALL[2:], "--json")).stdout)
        found, stored = ranked(result), said["target"]["weight_bytes"]
        assert stored == 20 / 32 and found["ngram"]["holds"] < 1.2e6
        assert found["draft_model"]["multiplier"] > found["none"]["multiplier"]
    plain = ranked(run("--target", str(file), *SMALL[2:], "--weights", "bfloat16", "--json"))
    assert plain["none"]["holds"] > 2 * found["none"]["holds"]


@pytest.mark.parametrize(
    ("args", "wrong"),
    [
        (("--target", "llama-3-7b"), "Did you mean 'llama-3-70b'? Known models: llama-2-7b"),
        (("--context", "131073"), "Give 1 to 131072"),
        (("--kv", "nan"), "more than 0 bytes"),
        (("--weights", "int9"), "not a type or a number"),
        (("--tau", "spire=9"), "Give 1 to 5"),
        (("--draft", "nobody"), "no such model"),
    ],
)
def test_mistakes_end_in_one_line(run: Any, args: tuple[str, ...], wrong: str) -> None:
    result = run(*LARGE, *args)
    assert result.exit_code == 2, result.output
    assert wrong in result.stderr and len(result.stderr.strip().splitlines()) == 1
