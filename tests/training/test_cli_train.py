"""``paceline train``: from a command to a model that loads; stopped, gone on with, refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit import losses
from typer.testing import CliRunner, Result

from paceline import LLM, SamplingParams
from paceline.cli import app
from paceline.cli.console import ProgressLine
from paceline.train.trainer import CHECKPOINT

SHAPE = {"layers": 1, "d_model": 32, "d_ff": 48, "heads": 2, "kv_heads": 2}
STEPS = {"steps": 8, "warmup": 2, "precision": "fp32", "evaluate_every": 4}
ENDLESS = {"steps": 100000, "evaluate_every": 0, "schedule": "constant"}


def write_recipe(folder: Path, kind: str = "draft_model", options: dict[str, Any] = SHAPE, **train: Any) -> Path:
    """A recipe on boxes.jsonl."""

    def lines(values: dict[str, Any]) -> str:
        return "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())

    tables = [("options", options), ("train", STEPS | train), ("[phase]", {"until": 0.5, "rows": 2, "length": 48})]
    tables += [("[phase]", {"rows": 4, "length": 64}), ("[data.source]", {"file": "boxes.jsonl"})]
    text = f'recipe = "{kind}"\n' + "".join(f"[{name}]\n{lines(values)}" for name, values in tables)
    path = folder / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs ``paceline train ARGS`` in this process."""
    for name, value in {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)
    return lambda *args: CliRunner().invoke(app, ["train", *map(str, args)])


def stopped(step: int, work: Callable[[], Result]) -> Result:
    """What ``work`` comes to with Ctrl-C at the end of a step."""
    with pytest.MonkeyPatch.context() as patch:

        def show(line: ProgressLine, text: str) -> None:
            if text.startswith(f"step {step} of"):
                signal.raise_signal(signal.SIGINT)

        patch.setattr(ProgressLine, "show", show)
        return work()


def said(result: Result) -> str:
    return " ".join(result.output.split())


def process(*args: Any) -> subprocess.Popen[str]:
    """``paceline train ARGS`` as a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "paceline", "train", *map(str, args)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(condition: Callable[[], bool], work: subprocess.Popen[str], seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert work.poll() is None, work.communicate()[1]
        assert time.monotonic() < until, "it takes too long"
        time.sleep(0.05)


def test_a_run_goes_on_where_it_stopped(run: Callable[..., Result], data: Path, target: Path, tmp_path: Path) -> None:
    """Stopped twice, with a change of phase between: losses and weights as without, and a draft that loads."""
    args = [write_recipe(tmp_path), "--target", target, "--data", data.parent]
    assert run(*args, "--out", tmp_path / "whole").exit_code == 0
    first = stopped(3, lambda: run(*args, "--out", tmp_path / "parts"))
    assert first.exit_code == 130
    assert "stopped after step 3 of 8, checkpoint" in said(first)
    assert not (tmp_path / "parts" / "result").exists()
    assert stopped(7, lambda: run(*args, "--out", tmp_path / "parts")).exit_code == 130
    last = run(*args, "--out", tmp_path / "parts")
    assert last.exit_code == 0
    assert "going on from step 7" in said(last)
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    weights = [(tmp_path / name / "result" / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert weights[0] == weights[1]
    llm = LLM(str(target), dtype="float32", drafter=f"draft_model:{tmp_path / 'whole' / 'result'}")
    assert llm.generate("What", SamplingParams(max_tokens=4, temperature=0))[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("change", "flags", "message"),
    [
        ({"kind": "straems"}, [], "Did you mean 'streams'"),
        ({"options": SHAPE | {"heads": 5}}, [], "heads=5, kv_heads=2: heads must divide d_model"),
        ({"kind": "streams", "options": {}}, ["--cache", "{out}"], "which are what a cache holds"),
        ({"stepss": 3}, [], "unknown entry 'stepss'"),
    ],
    ids=str,
)
def test_a_mistake_ends_in_one_line(
    change: dict[str, Any],
    flags: list[str],
    message: str,
    run: Callable[..., Result],
    data: Path,
    target: Path,
    tmp_path: Path,
) -> None:
    args = [write_recipe(tmp_path, **change), "--target", target, "--data", data.parent, "--out", tmp_path / "out"]
    done = run(*args, *(flag.replace("{out}", str(tmp_path / "cache")) for flag in flags))
    assert (done.exit_code, done.output[:7], message in said(done)) == (2, "error: ", True), done.output
    assert not (tmp_path / "out" / CHECKPOINT).exists()


def losses_with_steps(out: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text("utf-8").splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_a_signal_ends_the_run_with_a_checkpoint_and_the_command_that_goes_on(
    number: signal.Signals, run: Callable[..., Result], data: Path, target: Path, tmp_path: Path
) -> None:
    """A real process; what it left goes on to the losses of a run that was not stopped."""
    out, args = tmp_path / "out", [write_recipe(tmp_path, **ENDLESS), "--target", target, "--data", data.parent]
    work = process(*args, "--out", out)
    wait_for(lambda: (out / "log.jsonl").is_file() and len(losses_with_steps(out)) > 2, work)
    work.send_signal(number)
    _, errors = work.communicate(timeout=60)
    assert work.returncode == 130, errors
    step = torch.load(out / CHECKPOINT, weights_only=True)["step"]
    words = " ".join(errors.split())
    assert f"stopped after step {step} of 100000, checkpoint in {out}; continue: paceline train {tmp_path}" in words
    for folder in (out, tmp_path / "whole"):
        assert stopped(step + 3, lambda folder=folder: run(*args, "--out", folder)).exit_code == 130
    assert losses_with_steps(out).items() <= losses_with_steps(tmp_path / "whole").items()
