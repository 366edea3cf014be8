"""``paceline plan``: tables, commands that the benchmark reads, JSON, and mistakes that end in one line."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from kits import gguf_files
from typer.testing import CliRunner

from paceline.bench.methods import parse_method
from paceline.cli import app
from paceline.draft import registry
from paceline.plan.plan import DRAFTERS, PLAIN
from paceline.weights import zoo

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


def test_a_table_with_reasons_assumptions_and_commands(run: Any) -> None:
    result = run(*LARGE)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "batch 64, context 65,536" in lines[0]
    assert lines[2].split()[0] == "spire" and "KV-bound: sparse draft of 8,192 keys" in lines[2]
    for words in (
        "compute-bound at no batch size",
        "SPIRe, table 1",
        "does not fit",
        "spire: memory: 20 devices would hold it",
    ):
        assert words in result.stdout


def test_commands_are_what_the_benchmark_reads(run: Any) -> None:
    """Every drafter of the planner is registered, and what is not trained is named as missing."""
    assert {PLAIN, *DRAFTERS} <= {*registry.names()}
    found = ranked(run(*SMALL, "--weights", "int8", "--width", "2", "--depth", "3", "--json"))
    for name, row in found.items():
        trained = name != "spire" or zoo.weights("spire", "paceline-small")
        assert (row["command"] is None) == (not trained) == (row["missing"] is not None)
        if row["command"]:
            words = shlex.split(row["command"])
            assert words[:2] == ["paceline", "bench"] and "--dtype int8" in row["command"]
            method = parse_method(words[words.index("--method") + 1])
            assert method.plain == (name == PLAIN)
    assert "magicdec,window=64,sinks=1,depth=3" in found["magicdec"]["command"]
    assert "branching=2x1x1;budget=6" in found["draft_model"]["command"]
    assert "streams:paceline-small-streams,chain=true;budget=3" in found["streams"]["command"]


def test_a_gguf_file_is_planned_as_it_is_stored(run: Any, tmp_path: Path) -> None:
    """Its types and its path; what has no weights comes last, and what the planner has no law of is named."""
    (folder := tmp_path / "a model").mkdir()
    file = gguf_files.write(folder / "small.gguf", "q4_1")
    for target in (file, folder):
        said = json.loads((result := run("--target", str(target), *SMALL[2:], "--json")).stdout)
        found, stored = ranked(result), said["target"]["weight_bytes"]
        assert stored == 20 / 32 and said["ranked"][0]["holds"] < 1.2e6 and said["unpredicted"] == ["suffix"]
        words = shlex.split(found["ngram"]["command"])
        assert words[words.index("--model") + 1] == str(target) and "--dtype" not in words
        runs = [row["command"] is not None for row in said["ranked"]]
        assert runs == [True] * 3 + [False] * 3 and found["draft_model"]["multiplier"] > found["none"]["multiplier"]
    plain = ranked(run("--target", str(file), *SMALL[2:], "--weights", "bfloat16", "--json"))
    assert "--dtype bfloat16" in plain["ngram"]["command"] and plain["none"]["holds"] > 2 * found["none"]["holds"]
    assert "not predicted: suffix, eagle, lyanna, medusa, hybrid;" in run(*SMALL).stdout


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
