"""Figures from trials: against hand-made trials with known answers, and against their own definitions."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from kits.reports import World, fail

from paceline.bench.records import Cell, Method, Report, Trial
from paceline.bench.summary import Row, Summary, bootstrap, overall_ratio, percentile_bounds

CELL = Cell(workload="w")


def trial(method: str, group: int, repeat: int, wall_ms: float, tokens: int = 10, **facts: object) -> Trial:
    values = {"cell": CELL, "outputs": [[1] * tokens], "finish": ["length"], "ttft_ms": [1.0], **facts}
    return Trial(
        method=method,
        group=group,
        repeat=repeat,
        prompts=[f"p{group}"],
        prompt_tokens=[3],
        wall_ms=wall_ms,
        **values,  # type: ignore[arg-type]
    )


def report_of(trials: list[Trial], *methods: Method) -> Report:
    empty = World(workloads={}).report()
    return replace(empty, methods=list(methods), trials=trials, exactness=[])


PLAIN, FAST = Method(name="plain"), Method(name="fast", drafter="ngram")


def row_of(report: Report, method: str, workload: str | None) -> Row:
    summary = Summary(report)
    found = [r for r in (*summary.rows, *summary.overall) if (r.method.name, r.workload) == (method, workload)]
    assert len(found) == 1
    return found[0]


def test_speedup_is_the_geometric_mean_over_groups_of_the_median_over_repeats() -> None:
    ratios = [[2.0, 4.0, 100.0], [8.0, 8.0, 1.0]]  # medians 4 and 8
    trials = [trial("plain", g, r, 100.0) for g in range(2) for r in range(3)]
    trials += [trial("fast", g, r, 100.0 / ratios[g][r]) for g in range(2) for r in range(3)]
    found = overall_ratio(Summary(report_of(trials, PLAIN, FAST)), "fast", "plain", [CELL])
    assert found is not None
    assert found.value == pytest.approx(math.sqrt(4 * 8))
    assert found.pairs == 6
    assert found.low <= found.value <= found.high


def test_overall_is_the_geometric_mean_of_the_workloads() -> None:
    report = World().report()
    summary = Summary(report)
    each = [r.speedup.value for r in summary.rows if r.method.name == "hybrid" and r.speedup]
    total = row_of(report, "hybrid", None)
    assert total.speedup is not None and total.workloads == len(each) == 5
    assert total.speedup.value == pytest.approx(math.exp(np.mean(np.log(each))))
    medians = [r.speed for r in summary.rows if r.method.name == "hybrid" and r.speed]
    assert total.speed == pytest.approx(math.exp(np.mean(np.log(medians))))


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """400 made-up cells of 16 groups and 3 repeats: 95 % are to cover. A percentile bootstrap of so few groups
    is a little narrow; below 90 % would be wrong (12 standard errors from a 70 % interval, 3 from 93 %)."""
    generator = np.random.default_rng(1)
    covered = 0
    for _ in range(400):
        logs = 0.7 + generator.normal(0, 0.2, (16, 1)) + generator.normal(0, 0.05, (16, 3))
        low, high = percentile_bounds(bootstrap(logs.tolist(), generator, 500))
        covered += low <= 0.7 <= high
    assert 0.90 <= covered / 400 <= 0.99


def test_the_interval_of_a_single_group_holds_its_value() -> None:
    logs = [[0.0] * 8 + [50.0] * 7]  # whose mean is 23
    low, high = percentile_bounds(bootstrap(logs, np.random.default_rng(2)))
    assert low <= 0.0 <= high


def test_the_reference_is_plain_decoding_of_the_same_engine_and_dtype() -> None:
    methods = [
        PLAIN,
        Method(name="plain f32", dtype="float32"),
        Method(name="plain exact", settings={"exact": True}),
        FAST,
        Method(name="fast f32", drafter="ngram", dtype="float32"),
        Method(name="fast bf16", drafter="ngram", dtype="bfloat16"),
        Method(name="fast exact", drafter="ngram", settings={"exact": True, "budget": 4}),
        Method(name="fast int8", drafter="ngram", dtype="int8"),
        Method(name="llama.cpp/plain", engine="llama.cpp", drafter="plain"),
        Method(name="llama.cpp/ngram", engine="llama.cpp", drafter="ngram"),
        Method(name="vllm/ngram", engine="vllm", drafter="ngram"),
    ]
    index = Summary(report_of([], *methods))
    assert {m.name: index.reference(m) for m in methods} == {
        "plain": "plain",
        "plain f32": "plain f32",
        "plain exact": "plain exact",
        "fast": "plain",
        "fast f32": "plain f32",
        "fast bf16": "plain",  # auto is the checkpoint's: bfloat16
        "fast exact": "plain exact",
        "fast int8": None,
        "llama.cpp/plain": "llama.cpp/plain",
        "llama.cpp/ngram": "llama.cpp/plain",
        "vllm/ngram": None,
    }


def test_failed_trials_are_left_out_and_counted() -> None:
    report = World().report()
    before = row_of(report, "ngram", "gsm8k")
    fail(report, "ngram", "gsm8k", "RuntimeError: pool is full")
    after = row_of(report, "ngram", "gsm8k")
    assert (len(before.failed), len(after.failed), len(after.trials)) == (0, 1, len(before.trials))
    assert after.failed[0].error == "RuntimeError: pool is full"
    assert before.speedup and after.speedup and after.speedup.pairs == before.speedup.pairs - 1
