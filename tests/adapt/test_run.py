"""A whole run with a tiny random model: what it leaves, killed at any phase, refused in words."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toolkit import largest_file

from paceline import LLM, SamplingParams
from paceline.adapt import run as whole
from paceline.adapt import training
from paceline.adapt.config import AdaptConfig
from paceline.adapt.run import adapt
from paceline.adapt.training import train
from paceline.adapt.verdict import LOOK_UPS, NEW, PRESENT, _words, choose
from paceline.adapt.work import STATE, RunFolder
from paceline.bench.records import PLAIN, REPORT
from paceline.bench.summary import Interval
from paceline.core.errors import ConfigError
from paceline.draft import adapted

HOT = 32  # tokens that are drafted, of a vocabulary of more than four times as many
HOURS = 0.5  # enough on any machine: what is done is bounded by what `few_answers` sets


@pytest.fixture(scope="module", autouse=True)
def few_answers() -> Iterator[None]:
    """Enough for every phase, and no more than a test has time for."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(whole, "LEAST_ANSWERS", 200)
        changed.setattr(whole, "MOST_ANSWERS", 1500)
        changed.setattr(whole, "EPOCHS", 0.5)
        changed.setattr(training, "HOT_TOKENS", HOT)
        yield


def config(target: Path, prompts: Path, out: Path, **changes: Any) -> AdaptConfig:
    given = {"model": str(target), "prompts": prompts, "out": out, "hours": HOURS, "threads": 1}
    return AdaptConfig(**(given | changes))


def quiet(text: str) -> None:
    """Nobody is told."""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the run that the first test makes."""
    return tmp_path_factory.mktemp("adapted") / "out"


def test_a_run_leaves_a_drafter_that_every_command_takes(target: Path, prompts: Path, out: Path) -> None:
    """To the end: folder, card, page, report, `--drafter` and `auto`."""
    said: list[str] = []
    shown: list[str] = []
    asked = config(target, prompts, out)
    made = adapt(asked, said.append, shown.append)
    assert any("tokens of answers" in line for line in said)
    assert shown and all(line.split(", ")[-1] <= "0:30:00 left" for line in shown)
    assert made.trials == 4 * 5
    assert (made.sequences, made.equal) == (15, 15)
    assert {*made.times_plain} == {"look-ups", "new", "hybrid"}
    card = json.loads((out / "drafter" / "zoo.json").read_text())
    assert (card["role"], card["read_by"]) == ("head", "eagle") and card["parameters"] > 1000
    facts = json.loads((out / "drafter" / "training.json").read_text())
    assert facts["tokens_seen"] > 0 and sum(facts["tokens_by_file"].values()) > 0
    assert len(json.loads((out / "drafter" / "hot.json").read_text())["tokens"]) == HOT
    report = REPORT.validate_json((out / "report" / "report.json").read_bytes())
    assert len(report.trials) == 20 and "# " in (out / "report" / "report.md").read_text()
    params = SamplingParams(temperature=0, max_tokens=16)
    plain = LLM(str(target), threads=1)
    for drafter in (str(out), "auto", f"eagle:{out}/drafter"):
        llm = LLM(str(target), share=plain, drafter=drafter, threads=1)
        assert (
            llm.generate("red", params)[0].outputs[0].token_ids == plain.generate("red", params)[0].outputs[0].token_ids
        )
    state = json.loads((out / STATE).read_text())
    (out / STATE).write_text(json.dumps(state | {"spent_s": 1e6}))
    again = adapt(asked, said.append, quiet)  # all is done, also where the time is over
    assert again == made


def test_another_models_folder_and_a_second_run_in_one_are_refused(target: Path, prompts: Path, tmp_path: Path) -> None:
    work = RunFolder(tmp_path / "out", {"model": "another"}, 1.0)
    with pytest.raises(ConfigError, match="another run is under way"):
        adapt(config(target, prompts, tmp_path / "out"), quiet, quiet)
    work.close()
    with pytest.raises(ConfigError, match="it holds a run of something else"):
        adapt(config(target, prompts, tmp_path / "out"), quiet, quiet)
    (tmp_path / "out" / STATE).write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be read"):
        adapt(config(target, prompts, tmp_path / "out"), quiet, quiet)
    with pytest.raises(ConfigError, match="its path holds ','"):
        adapt(config(target, prompts, tmp_path / "a,b"), quiet, quiet)


def test_too_short_a_time_and_too_large_a_model_are_refused_with_what_would_do(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = config(target, prompts, tmp_path / "short", hours=1e-6)
    wrong = r"0 tokens of answers are too few to learn from\. Give --hours ([\d.]+) or"
    with pytest.raises(ConfigError, match=wrong) as refused:
        adapt(short, quiet, quiet)
    assert not adapted.is_adapted(str(tmp_path / "short"))
    found = re.search(wrong, str(refused.value))
    assert found is not None
    enough = adapt(replace(short, hours=float(found[1])), quiet, quiet)  # goes on, and ends in time
    assert enough.trials >= 12
    assert json.loads((tmp_path / "short" / STATE).read_text())["spent_s"] < 1.5 * 3600 * float(found[1])
    monkeypatch.setattr(whole, "free_bytes", lambda device: 1000)
    with pytest.raises(ConfigError, match=r"learning from it takes about .* GiB, .* --drafter suffix"):
        adapt(config(target, prompts, tmp_path / "large"), quiet, quiet)


def test_a_full_disk_in_mid_training_loses_nothing(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint does not fit; with room again the same command goes on from its answers."""
    asked = config(target, prompts, tmp_path / "out")

    def on_a_full_disk(*given: Any) -> Any:
        with largest_file(40_000):
            return train(*given)

    monkeypatch.setattr(whole, "train", on_a_full_disk)
    with pytest.raises(ConfigError, match=r"cannot be written .* repeat the command"):
        adapt(asked, quiet, quiet)
    answers = {f.name: f.read_bytes() for f in (tmp_path / "out" / "answers").glob("*.jsonl")}
    monkeypatch.setattr(whole, "train", train)
    assert adapt(asked, quiet, quiet).trials
    assert answers == {f.name: f.read_bytes() for f in (tmp_path / "out" / "answers").glob("*.jsonl")}


SCRIPT = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from paceline.adapt import run as whole
from paceline.adapt import training
whole.LEAST_ANSWERS, whole.MOST_ANSWERS, whole.EPOCHS = 200, 1500, 0.5
from paceline.adapt.config import AdaptConfig
from paceline.draft import adapted
adapted.pointers = lambda: None
model, prompts, out = sys.argv[1:]
given = dict(model=model, prompts=Path(prompts), out=Path(out), hours=0.5, threads=1)
made = whole.adapt(AdaptConfig(**given), lambda text: None, lambda text: print(text, flush=True))
print("done", made.chosen, flush=True)
"""
PHASES = ["answering", "learning", "training", "judging"]


@pytest.mark.parametrize(
    "phases", [["answering"], pytest.param(PHASES, marks=[pytest.mark.full, pytest.mark.timeout(1800)])]
)
def test_a_run_that_is_killed_goes_on(target: Path, prompts: Path, tmp_path: Path, phases: list[str]) -> None:
    """kill -9 in each phase, one after the other in one folder; what was answered before stays as it was."""
    command = [sys.executable, "-c", SCRIPT, str(target), str(prompts), str(tmp_path / "out")]
    kept: dict[str, bytes] = {}
    for phase in [*phases, ""]:
        work = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
        assert work.stdout is not None
        met = any(phase and line.startswith(phase) for line in work.stdout)
        if phase and met:
            work.kill()
            work.wait()
        elif not phase:
            assert work.wait() == 0, work.stderr and work.stderr.read()
        for name, data in kept.items():
            assert (tmp_path / "out" / "answers" / name).read_bytes().startswith(data)
        kept = {f.name: f.read_bytes().rpartition(b"\n")[0] for f in (tmp_path / "out").glob("answers/*.jsonl")}
        assert met or not phase, f"it never was at {phase!r}"
    assert adapted.is_adapted(str(tmp_path / "out"))


def test_what_is_left_is_the_fastest_that_is_slower_nowhere() -> None:
    def ratio(value: float, spread: float = 0.1) -> Interval:
        return Interval(value=value, low=value - spread, high=value + spread, pairs=9)

    kinds = {"look-ups": {"a": 1.2}, "new": {"a": 1.5, "b": 1.1}, "hybrid": {"a": 1.9, "b": 0.9}}
    assert choose({"look-ups": ratio(1.2), "new": ratio(1.4), "hybrid": ratio(1.7)}, kinds) == NEW
    assert choose({"look-ups": ratio(1.5), "new": ratio(1.4)}, kinds) == LOOK_UPS
    assert choose({"look-ups": ratio(1.2), "new": ratio(1.4), "present": ratio(1.6)}, kinds) == PRESENT
    assert "which is left" in _words(PRESENT, {"present": ratio(1.6), "new": ratio(1.4)}, kinds)
    assert choose({"look-ups": ratio(0.97), "new": ratio(0.8)}, kinds) == LOOK_UPS
    assert choose({"look-ups": ratio(0.7), "new": ratio(0.8)}, kinds) == PLAIN
    single = Interval(value=1.7, low=1.7, high=1.7, pairs=2)  # of two kinds, a prompt each
    assert choose({"look-ups": ratio(1.2), "new": single}, kinds) == LOOK_UPS
    assert "there is no verdict: there was time for 2 prompts" in _words(LOOK_UPS, {"new": single}, kinds)
    assert choose({}, {}) == LOOK_UPS and "there was time for no prompt" in _words(LOOK_UPS, {}, {})
