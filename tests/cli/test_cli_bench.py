"""``paceline bench`` on the command line: help, tables, files, and mistakes that end in one line."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers  # noqa: F401  (first loaded in a command, its log would go to a stream that is closed afterwards)
from rich.console import Console
from typer.testing import CliRunner

from paceline import native, zoo
from paceline.bench.config import LINE_EVERY_S, log_lines
from paceline.bench.report import load_report
from paceline.cli import app
from paceline.core.errors import ConfigError
from paceline.network.padding import SCALE_ROOM

SMALL = ("--workload", "wikisql", "--prompts", "1", "--repeats", "1", "--max-new-tokens", "8", "--threads", "1")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs ``paceline bench ARGS`` in this process: wide lines, no colours."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    return lambda *args: CliRunner().invoke(app, ["bench", *map(str, args)])


def test_help_names_options_and_subcommands(run: Any) -> None:
    output = run("--help").output
    for word in ("--method", "--workload", "--batch", "--quick", "--overwrite", "--out", "--check"):
        assert word in output
    for command in ("calibrate", "workloads", "step"):
        assert command in output
        assert run(command, "--help").exit_code == 0


def test_a_run_shows_a_table_and_writes_its_files(run: Any, tmp_path: Path) -> None:
    result = run(*SMALL, "--method", "fast=ngram,depth=3;budget=3", "--title", "a trial run", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "fast" in result.stdout and "plain" in result.stdout
    for name in ("report.json", "report.html"):
        assert (tmp_path / name).is_file() and name in result.stdout
    report = load_report(tmp_path)
    assert report.title == "a trial run" and [m.name for m in report.methods] == ["plain", "fast"]
    assert [e.method for e in report.exactness] == ["fast"] and report.exactness[0].passed


def test_without_out_nothing_is_written(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*SMALL, "--method", "plain", "--no-check")
    assert result.exit_code == 0 and not list(tmp_path.iterdir())


def test_quick_runs_are_small_where_the_user_does_not_say(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.cli import bench

    seen: list[Any] = []

    def stop(config: Any, **options: Any) -> None:
        seen.append((config.prompts, config.repeats, config.max_new_tokens, config.time_limit_s, config.batches))
        raise ConfigError("a run", "not needed here", "look at the settings")

    monkeypatch.setattr(bench, "Run", stop)
    for flags in ([], ["--quick"], ["--quick", "--prompts", "20", "--max-new-tokens", "7", "--batch", "1,4"]):
        assert run(*flags).exit_code == 2
    assert seen == [
        (20, 3, None, None, (1,)),
        (8, 2, 48, 110.0, (1,)),
        (20, 2, 7, 110.0, (1, 4)),
    ]


def test_wrong_ids_end_with_status_1(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wrong token, planted in the outputs of every method with a drafter."""
    from paceline.bench import measure

    fill = measure._fill

    def wrong(trial: Any, *found: Any) -> None:
        fill(trial, *found)
        if trial.method != "plain":
            trial.outputs[0][3] += 1

    monkeypatch.setattr(measure, "_fill", wrong)
    result = run(*SMALL, "--method", "ngram")
    assert result.exit_code == 1 and "wrong token" in result.stdout
    assert run(*SMALL, "--method", "ngram", "--no-check").exit_code == 0


def test_workloads_are_listed(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = run("workloads").stdout
    assert "gsm8k" in shown and "packaged sample" in shown and "needs --data" in shown
    (tmp_path / "bench_drop.jsonl").write_text('{"prompt": "x", "completion": "y"}\n')
    monkeypatch.chdir(tmp_path)
    [row] = [line for line in run("workloads", "--data", ".").stdout.splitlines() if line.strip().startswith("drop")]
    assert "bench_drop.jsonl" in row and "needs --data" not in row


def test_calibrate_writes_beside_the_model(run: Any, tmp_path: Path) -> None:
    source = zoo.find("paceline-small-draft")
    assert source is not None
    folder = Path(shutil.copytree(source, tmp_path / "model"))
    before = set(folder.iterdir())
    result = run("calibrate", "--model", folder, "--repeats", "1", "--threads", "1")
    assert result.exit_code == 0, result.output
    [made] = set(folder.iterdir()) - before
    assert json.loads(made.read_text()) and made.name in result.stdout.replace("\n", "")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--method", "ngrm"], "ngram"),
        (["--method", "ngram;bugdet=2"], "budget"),
        (["--method", "vllm/ngram"], "studies/peers.py"),
        (["--batch", "1,x"], "--batch 1,x"),
        (["--batch", "64"], "batch 64"),
        (["--temperature", "-1"], "--temperature -1.0: --temperature must be 0 or more"),
        (["--workload", "boks"], "books"),
        (["--workload", "drop"], "--data"),
        (["--data", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--prompts", "0"], "--prompts 0: --prompts must be 1 or more"),
        (["--prompt-tokens", "8"], "--prompt-tokens 8"),
        (["--model", "random:1x64x64x64", "--workload", "books"], "no tokenizer"),
        (["--overwrite"], "--out DIR"),
        (["--out", "/dev/null"], "/dev/null"),
        (["calibrate", "--model", "random:1x64x64x64"], "a model that stays"),
        (["calibrate", "--model", "stretch:random:1x64x64x64,times=2"], "a model that stays"),
        (["--model", "stretch:paceline-small"], "Write stretch:MODEL,times=8"),
        (["step", "--model", "stretch:paceline-small,times=1"], "times=1 is not 2 to"),
    ],
)
def test_mistakes_end_in_one_line_before_anything_runs(run: Any, args: list[str], message: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert result.stdout == "" and result.stderr.startswith("error: ") and message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_log_gets_lines_now_and_then() -> None:
    now, text = [0.0], io.StringIO()
    tell = log_lines(Console(file=text, width=200), clock=lambda: now[0])
    for done in range(30):
        tell("books, ngram", (done, 60))
        now[0] += 1.0
    said = text.getvalue().splitlines()
    assert len(said) == int(29 // LINE_EVERY_S)
    assert said[0] == "10 of 60 trials, books, ngram"
    tell("and now this", None)
    assert text.getvalue().splitlines()[-1] == "and now this"


def test_stretched_models_are_called_so(run: Any, tmp_path: Path) -> None:
    model, label = ("--model", "stretch:random:2x64x40x64,times=2"), "random:2x64x40x64, stretched 2x"
    sizes, out = ("--rows", "1", "--context", "8", "--repeats", "1"), tmp_path / "step.json"
    result = run("step", *model, *sizes, "--threads", "1", "--out", out)
    assert result.exit_code == 0, result.output
    assert label in result.stdout and json.loads(out.read_text())["model"] == label


@pytest.mark.skipif(native.library() is None, reason="no compiled kernels")
def test_steps_read_keys_and_values_in_bytes(run: Any, tmp_path: Path) -> None:
    sizes, out, read = ("--rows", "2", "--context", "30", "--repeats", "1"), tmp_path / "step.json", []
    for dtype in ("auto", "int8"):
        asked = ("--model", "random:2x64x64x64x1x1", "--dtype", "bfloat16", "--kv-cache-dtype", dtype)
        result = run("step", *asked, *sizes, "--threads", "1", "--out", out)
        assert result.exit_code == 0 and ("K/V in int8" in result.stdout) == (dtype == "int8"), result.output
        read.append(json.loads(out.read_text())["rows"][0]["kv_bytes"])
    assert read == [32 * 2 * 2 * 64 * 2, 32 * 2 * 2 * (64 + SCALE_ROOM)]
    refused = run("step", *asked, *sizes, "--kernels", "torch")
    assert refused.exit_code == 2 and "--kv-cache-dtype int8" in refused.output
