"""``studies/plan.py``: tables, commands that the benchmark reads, JSON, and mistakes that are named."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from kit.planner.plan import DRAFTERS, PLAIN
from kits import gguf_files
from plan import app
from typer.testing import CliRunner

from paceline.bench.methods import parse_method
from paceline.draft import registry

LARGE = ("--target", "llama-3-70b", "--machine", "h100", "--batch", "64", "--context", "65536")
SMALL = ("--target", "paceline-small", "--machine", "cpu", "--context", "256")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *args: CliRunner().invoke(app, [*args])


def test_a_table_with_reasons_and_commands(run: Any) -> None:
    lines = run(*LARGE).stdout.splitlines()
    assert "batch 64, context 65,536" in lines[0]
    assert lines[2].split()[0] == "spire" and "KV-bound: sparse draft of 8,192 keys" in lines[2]
    assert "spire: memory: 20 devices would hold it" in "\n".join(lines)
    assert "is not a type or a number of bytes" in str(run(*LARGE, "--weights", "int9").exception)


def test_commands_are_what_the_benchmark_reads(run: Any, tmp_path: Path) -> None:
    """Every drafter of the planner is registered; a GGUF file is planned as it is stored."""
    assert {PLAIN, *DRAFTERS} <= {*registry.names()}
    file = gguf_files.write(tmp_path / "small.gguf", "q4_1")
    for target in (SMALL, ("--target", str(file), *SMALL[2:])):
        said = json.loads(run(*target, "--width", "2", "--depth", "3", "--json").stdout)
        commands = {row["drafter"]: shlex.split(row["command"]) for row in said["ranked"] if row["command"]}
        assert {"ngram", PLAIN} <= commands.keys()
        for name, words in commands.items():
            assert words[:2] == ["paceline", "bench"] and words[words.index("--model") + 1] == target[1]
            assert parse_method(words[words.index("--method") + 1]).plain == (name == PLAIN)
    assert said["target"]["weight_bytes"] == 20 / 32
