"""Planted faults: a whole run in which one thing is wrong must say so, and say what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from kit.synthetic import write_answers
from kits.verdicts import choices, match

from paceline.bench import machine
from paceline.bench.measure import EngineRunner, Group
from paceline.bench.methods import parse_methods
from paceline.bench.records import Exactness, Report, Trial
from paceline.bench.run import BenchConfig, Run
from paceline.core.tree import TokenTree
from paceline.core.verify import Accepted
from paceline.engine.verification import DEFAULT_VERIFIER, VERIFIERS, VerifierKind

MODEL = "paceline-small-draft"
FAST = "fast"
LENGTH = 12


@pytest.fixture(autouse=True)
def known_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring it takes longer than everything else here."""
    monkeypatch.setattr(machine, "read_bandwidth", lambda *_: 1e10)


def bench(dtype: str, kernels: str = "auto", **changes: Any) -> Report:
    """Plain decoding and a drafter that is often right, two prompts at a time; a run before it records answers."""
    plain = f"plain=none;kernels={kernels}"
    with TemporaryDirectory() as folder:
        first = run_of([plain], dtype, **changes | {"out": None})
        said = first.execute().trials[0].outputs
        [group] = next(iter(first.groups.values()))
        write_answers(answers := Path(folder, "answers"), zip([p.ids for p in group.prompts], said, strict=True))
        fast = f"{FAST}=synthetic,answers={answers},accept=0.6,depth=3;budget=3;kernels={kernels}"
        return run_of([plain, fast], dtype, **changes).execute()


def run_of(methods: list[str], dtype: str, out: Path | None = None, **changes: Any) -> Run:
    values: dict[str, Any] = {
        "model": MODEL,
        "methods": tuple(parse_methods(methods, dtype)),
        "prompts": 2,
        "batches": (2,),
        "workloads": ("wikisql",),
        "ignore_eos": True,
        "max_new_tokens": LENGTH,
        "repeats": 1,
        "threads": 1,
    }
    return Run(BenchConfig(**(values | changes)), out=out)


def verdict(report: Report) -> Exactness:
    """Of the one method that is held against plain decoding."""
    assert all(trial.error is None for trial in report.trials)
    assert [(e.method, e.reference, e.sequences) for e in report.exactness] == [(FAST, "plain", 2)]
    return report.exactness[0]


def output_of(report: Report, method: str) -> list[list[int]]:
    return next(trial.outputs for trial in report.trials if trial.method == method)


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any], str], None]:
    """Replace a method of `EngineRunner`, for the drafting method alone."""

    def planted(fault: Callable[..., Any], name: str) -> None:
        right = getattr(EngineRunner, name)

        def either(runner: EngineRunner, *args: Any) -> Any:
            return right(runner, *args) if runner.method.name == "plain" else fault(right, runner, *args)

        monkeypatch.setattr(EngineRunner, name, either)

    return planted


class OneWrongToken:
    """A verifier that once takes a drafted token which the target did not choose, in the first output."""

    def __init__(self) -> None:
        self.armed = False

    def run(self, right: Any, runner: EngineRunner, group: Group, repeat: int) -> Trial:
        """A trial, in which it is to happen; the warm-up before it goes as it should."""
        self.armed = True
        trial = right(runner, group, repeat)
        assert not self.armed, "the fault never came to pass"
        return trial

    def verify(self, sequences: Any, trees: list[TokenTree], logits: torch.Tensor) -> list[Accepted]:
        outcome = match(sequences, trees, logits)
        refused = not outcome[0][0] and len(trees[0]) > 0
        if not (self.armed and refused and len(sequences[0].sampler.output_ids) > 1):
            return outcome
        self.armed = False
        return [([1], choices(sequences, trees, logits)[0][1]), *outcome[1:]]


@pytest.fixture
def one_wrong_token(monkeypatch: pytest.MonkeyPatch, plant: Any) -> None:
    fault = OneWrongToken()
    monkeypatch.setitem(VERIFIERS, DEFAULT_VERIFIER, VerifierKind(fault.verify))
    plant(fault.run, "run")


@pytest.mark.parametrize(("dtype", "kernels", "temperature"), [("bfloat16", "auto", 0.8), ("float32", "torch", 0.0)])
def test_one_wrong_token_is_caught(one_wrong_token: None, dtype: str, kernels: str, temperature: float):
    report = bench(dtype, kernels, temperatures=(temperature,))
    found = verdict(report)
    assert not found.passed and len(found.failures) == 1
    failure = found.failures[0]
    plain, other = (output_of(report, name)[0] for name in ("plain", FAST))
    at = next(i for i, (a, b) in enumerate(zip(plain, other, strict=True)) if a != b)
    assert (failure["what"], failure["position"]) == ("wrong token", at)
    assert (failure["expected"], failure["got"]) == (plain[at], other[at])


@pytest.mark.parametrize("dtype", ["float32"])
def test_an_output_one_token_short_is_caught(plant: Any, dtype: str):
    """An engine whose stop rule counts one too many."""

    def drive(right: Any, runner: EngineRunner, group: Group, *rest: Any) -> Any:
        cell = replace(group.cell, max_new_tokens=group.cell.max_new_tokens - 1)
        return right(runner, replace(group, cell=cell), *rest)

    plant(drive, "_drive")
    report = bench(dtype)
    assert [len(ids) for ids in output_of(report, FAST)] == [LENGTH - 1] * 2
    assert [failure["what"] for failure in verdict(report).failures] == ["one token short"] * 2
