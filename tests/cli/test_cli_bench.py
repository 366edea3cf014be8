"""``paceline bench`` on the command line: help, tables, files, and mistakes that end in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers  # noqa: F401  (first loaded in a command, its log would go to a stream that is closed afterwards)
from typer.testing import CliRunner

from paceline.bench.records import REPORT
from paceline.cli import app
from paceline.core.errors import ConfigError

SMALL = ("--workload", "wikisql", "--prompts", "1", "--repeats", "1", "--max-new-tokens", "8", "--threads", "1")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs ``paceline bench ARGS`` in this process: wide lines, no colours."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    return lambda *args: CliRunner().invoke(app, ["bench", *map(str, args)])


def test_a_run_shows_a_table_and_writes_its_files(run: Any, tmp_path: Path) -> None:
    result = run(*SMALL, "--method", "fast=ngram,depth=3;budget=3", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "fast" in result.stdout and "plain" in result.stdout
    for name in ("report.json", "report.md"):
        assert (tmp_path / name).is_file() and name in result.stdout
    report = REPORT.validate_json((tmp_path / "report.json").read_bytes())
    assert [m.name for m in report.methods] == ["plain", "fast"]
    assert [e.method for e in report.exactness] == ["fast"] and report.exactness[0].passed


def test_quick_runs_are_small_where_the_user_does_not_say(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.cli import bench

    seen: list[Any] = []

    def stop(config: Any, **options: Any) -> None:
        seen.append((config.prompts, config.repeats, config.max_new_tokens, config.time_limit_s, config.batches))
        raise ConfigError("a run", "not needed here", "look at the settings")

    monkeypatch.setattr(bench, "Run", stop)
    for flags in ([], ["--quick"], ["--quick", "--prompts", "20", "--max-new-tokens", "7", "--batch", "1,4"]):
        assert run(*flags).exit_code == 2
    assert seen == [(20, 3, None, None, (1,)), (8, 2, 48, 110.0, (1,)), (20, 2, 7, 110.0, (1, 4))]


def test_wrong_ids_end_with_status_1(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wrong token, planted in the outputs of every method with a drafter."""
    from paceline.bench import measure

    drive = measure.EngineRunner._drive

    def wrong(runner: Any, group: Any, trial: Any, most: int | None = None) -> None:
        drive(runner, group, trial, most)
        if trial.method != "plain" and most is None:
            trial.outputs[0][3] += 1

    monkeypatch.setattr(measure.EngineRunner, "_drive", wrong)
    result = run(*SMALL, "--method", "ngram")
    assert result.exit_code == 1 and "wrong token" in result.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--method", "ngrm"], "ngram"),
        (["--method", "vllm/ngram"], "studies/peers.py"),
        (["--batch", "1,x"], "--batch 1,x"),
        (["--workload", "drop"], "--data"),
        (["--prompts", "0"], "prompts=0: prompts must be 1 or more"),
        (["--temperature", "-1"], "temperatures must be 0 or more"),
        (["--workload", "boks"], "books"),
        (["--prompts", "2", "--batch", "4"], "batch 4 of wikisql"),
        (["--overwrite"], "--out DIR"),
        (["--out", "/dev/null"], "/dev/null"),
    ],
)
def test_mistakes_end_in_one_line_before_anything_runs(run: Any, args: list[str], message: str) -> None:
    result = run(*SMALL, *args)  # where one is not seen, what runs is small
    assert result.exit_code == 2
    assert result.stdout == "" and result.stderr.startswith("error: ") and message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_steps_are_timed_by_rows_and_context(run: Any) -> None:
    sizes = ("--rows", "1,3", "--context", "16,40", "--repeats", "2", "--threads", "1")
    result = run("step", "--model", "paceline-small-draft", *sizes)
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()[-4:]]
    assert [row[:2] for row in rows] == [["16", "1"], ["16", "3"], ["40", "1"], ["40", "3"]]
    assert all(len(row) == 7 and row[6].endswith("%") for row in rows) and rows[0][4] == rows[2][4] == "1.00"
