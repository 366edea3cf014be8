"""Figures from trials: against hand-made trials with known answers, and against their own definitions."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from kits.reports import BANDWIDTH, TRUTHS, Truth, World, fail

from paceline.bench.records import Cell, Method, Report, Trial
from paceline.bench.report import cell_label
from paceline.bench.summary import (
    Row,
    Summary,
    best,
    bootstrap,
    draw_groups,
    figures_of,
    overall_ratio,
    percentile_bounds,
    slower_cells,
    speed_logs,
)

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


# -- speed-ups


def test_speedup_is_the_geometric_mean_over_groups_of_the_median_over_repeats() -> None:
    ratios = [[2.0, 4.0, 100.0], [8.0, 8.0, 1.0]]  # medians 4 and 8
    trials = [trial("plain", g, r, 100.0) for g in range(2) for r in range(3)]
    trials += [trial("fast", g, r, 100.0 / ratios[g][r]) for g in range(2) for r in range(3)]
    found = overall_ratio(Summary(report_of(trials, PLAIN, FAST)), "fast", "plain", [CELL])
    assert found is not None
    assert found.value == pytest.approx(math.sqrt(4 * 8))
    assert found.pairs == 6
    assert found.low <= found.value <= found.high


def test_an_even_number_of_repeats_takes_the_middle_of_the_logs() -> None:
    trials = [trial("plain", 0, r, 100.0) for r in range(2)] + [trial("fast", 0, r, 100 / (2, 8)[r]) for r in range(2)]
    found = overall_ratio(Summary(report_of(trials, PLAIN, FAST)), "fast", "plain", [CELL])
    assert found is not None and found.value == pytest.approx(4.0)


def test_a_slow_moment_that_hits_both_of_a_pair_changes_nothing() -> None:
    report = World().report()
    slow = World().report()
    for t in slow.trials:
        t.wall_ms *= 7 if t.repeat == 1 else 1
    cell = report.trials[0].cell
    before, after = (overall_ratio(Summary(r), "hybrid", "plain", [cell]) for r in (report, slow))
    assert before is not None and after is not None
    assert after.value == pytest.approx(before.value)
    assert after.low == pytest.approx(before.low)


def test_only_pairs_count() -> None:
    trials = [trial("plain", 0, 0, 100.0), trial("plain", 0, 1, 900.0), trial("plain", 1, 0, 100.0)]
    trials += [trial("fast", 0, 0, 50.0), trial("fast", 1, 0, 10.0, error="broken"), trial("fast", 2, 0, 1.0)]
    logs = speed_logs([t for t in trials if t.method == "fast"], [t for t in trials if t.method == "plain"])
    assert logs == {0: [pytest.approx(math.log(2))]}
    assert overall_ratio(Summary(report_of(trials, PLAIN, FAST)), "fast", "nobody", [CELL]) is None


def test_a_single_pair_has_no_spread_and_says_so() -> None:
    report = report_of([trial("plain", 0, 0, 100.0), trial("fast", 0, 0, 50.0)], PLAIN, FAST)
    found = overall_ratio(Summary(report), "fast", "plain", [CELL])
    assert found is not None and found.pairs == 1
    assert found.low == found.value == found.high


def test_a_trial_without_tokens_is_no_speed() -> None:
    trials = [trial("plain", 0, 0, 100.0), trial("fast", 0, 0, 50.0, tokens=0)]
    assert overall_ratio(Summary(report_of(trials, PLAIN, FAST)), "fast", "plain", [CELL]) is None


def test_overall_is_the_geometric_mean_of_the_workloads() -> None:
    report = World().report()
    summary = Summary(report)
    each = [r.speedup.value for r in summary.rows if r.method.name == "hybrid" and r.speedup]
    total = row_of(report, "hybrid", None)
    assert total.speedup is not None and total.workloads == len(each) == 5
    assert total.speedup.value == pytest.approx(math.exp(np.mean(np.log(each))))
    medians = [r.speed for r in summary.rows if r.method.name == "hybrid" and r.speed]
    assert total.speed == pytest.approx(math.exp(np.mean(np.log(medians))))


def test_the_same_report_gives_the_same_figures_in_any_order_of_trials() -> None:
    report = World().report()
    other = replace(report, trials=sorted(report.trials, key=lambda t: (t.method, t.repeat, t.cell.workload)))
    index, shuffled = Summary(report), Summary(other)
    for cell in {cell for cell, _ in index.trials}:
        assert overall_ratio(index, "ngram", "plain", [cell]) == overall_ratio(shuffled, "ngram", "plain", [cell])


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """400 made-up cells of 16 groups and 3 repeats: 95 % are to cover. A percentile bootstrap of so few groups
    is a little narrow; below 90 % would be wrong (12 standard errors from a 70 % interval, 3 from 93 %)."""
    generator = np.random.default_rng(1)
    covered = 0
    for _ in range(400):
        logs = 0.7 + generator.normal(0, 0.2, (16, 1)) + generator.normal(0, 0.05, (16, 3))
        low, high = percentile_bounds(bootstrap(logs.tolist(), generator, draw_groups(16, generator, 500)))
        covered += low <= 0.7 <= high
    assert 0.90 <= covered / 400 <= 0.99


def test_the_bootstrap_of_ragged_groups_agrees_with_a_plain_loop() -> None:
    logs = [[0.1, 0.9, 0.5], [2.0], [0.3, 0.7]]
    generator = np.random.default_rng(2)
    fast = bootstrap(logs, generator, draw_groups(3, generator, 10_000))
    slow = []
    for _ in range(10_000):
        chosen = [logs[g] for g in generator.integers(0, 3, 3)]
        slow.append(np.mean([np.median(generator.choice(group, len(group))) for group in chosen]))
    assert np.isfinite(fast).all()
    # 10,000 resamples each: the standard error of the mean is 1 % of the spread of 0.4, of the quantiles 2 to 3 %.
    assert fast.mean() == pytest.approx(np.mean(slow), abs=0.02)
    for q in (0.025, 0.25, 0.75, 0.975):
        assert np.quantile(fast, q) == pytest.approx(np.quantile(slow, q), abs=0.06)


def test_two_runs_of_the_same_comparison_overlap() -> None:
    first, second = (Summary(World(seed=seed, noise=0.1).report()) for seed in (1, 2))
    pairs = [(a.speedup, b.speedup) for a, b in zip(first.rows, second.rows, strict=True) if a.speedup and b.speedup]
    overlap = [a.low <= b.high and b.low <= a.high for a, b in pairs]
    assert len(overlap) == 25 and sum(overlap) >= 24  # two 95% intervals of the same ratio may miss each other


# -- who is compared with whom


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


def test_best_leaves_plain_decoding_and_peers_out() -> None:
    summary = Summary(World(truths=[TRUTHS[0], TRUTHS[1], *TRUTHS[4:]]).report())
    found = best(summary.total(summary.sections[0]))
    assert found is not None and found.method.name == "ngram"


def test_slower_is_what_surely_loses_and_best_what_the_table_has_on_top() -> None:
    summary = Summary(World(batches=(1, 32), noise=0.3).report())
    found = {(row.method.name, row.section.batch) for row in slower_cells(summary)}
    assert found == {("ngram", 32)}
    unsure = [row for row in summary.rows if row.speedup and row.speedup.low < 0.97 and row.speedup.value > 1]
    assert unsure  # faster by the value: not called slower
    fast = replace(TRUTHS[1], method=replace(TRUTHS[1].method, name="f32", dtype="float32"), accept=0.9, pass_ms=9.0)
    plain = Truth(method=Method(name="plain f32", dtype="float32"), pass_ms=9.0)
    summary = Summary(World(truths=(*TRUTHS[:3], plain, fast), groups=2).report())
    total = summary.total(summary.main)
    ours, top = best(total), max(total, key=lambda row: row.speedup.value if row.speedup else 0)
    assert ours is top and ours.method.name == "f32"
    assert ours.speed != max(row.speed or 0 for row in total)  # another one has more tokens a second


def test_sections_part_temperature_and_batch_and_no_more() -> None:
    truths = (*TRUTHS[:2], replace(TRUTHS[0], method=Method(name="plain f32", dtype="float32")))
    summary = Summary(World(truths=truths, batches=(1, 4), temperatures=(0.0, 1.0), groups=1).report())
    assert [cell_label(s) for s in summary.sections] == [
        f"batch {batch}, {heat}, EOS ignored" for heat in ("greedy", "temperature 1") for batch in (1, 4)
    ]
    assert {row.method.name for row in summary.of(summary.sections[0])} == {"plain", "ngram", "plain f32"}


# -- figures


def test_lengths_and_waits() -> None:
    a = trial("fast", 0, 0, 10.0, passes=4, accepted=3, waits_ms=[8.0, 2.0])
    found = figures_of([a, trial("fast", 1, 0, 10.0, passes=6, accepted=7)], None)
    assert found["accepted_length"] == pytest.approx(1 + 10 / 10)
    assert found["wait_p90_ms"] == pytest.approx(7.4)


def test_floor_is_the_reads_at_the_bandwidth() -> None:
    found = figures_of([trial("plain", 0, 0, 100.0, tokens=20, bytes_read=5_000_000_000)], 100e9)
    assert found["floor_share"] == pytest.approx(0.5)  # 50 ms of reads in 100 ms
    assert figures_of([trial("plain", 0, 0, 100.0)], 100e9)["floor_share"] is None
    assert figures_of([trial("plain", 0, 0, 100.0, bytes_read=5)], None)["floor_share"] is None


def test_speed_is_the_median() -> None:
    found = figures_of([trial("plain", g, 0, 1000 / (g + 1), tokens=10) for g in range(11)], None)
    assert found["tokens_per_s"] == pytest.approx(60.0)


def test_what_a_peer_does_not_tell_is_none_and_not_zero() -> None:
    row = row_of(World().report(), "llama.cpp/draft-simple", "gsm8k")
    told = {name for name, value in row.figures.items() if value is not None}
    assert told == {"tokens_per_s"}


def test_failed_trials_are_left_out_and_counted() -> None:
    report = World().report()
    before = row_of(report, "ngram", "gsm8k")
    fail(report, "ngram", "gsm8k", "RuntimeError: pool is full")
    after = row_of(report, "ngram", "gsm8k")
    assert (len(before.failed), len(after.failed), len(after.trials)) == (0, 1, len(before.trials))
    assert after.failed[0].error == "RuntimeError: pool is full"
    assert before.speedup and after.speedup and after.speedup.pairs == before.speedup.pairs - 1


def test_a_method_that_always_fails_has_no_figures() -> None:
    report = report_of([trial("plain", 0, 0, 9.0), trial("fast", 0, 0, 1.0, error="no", outputs=[])], PLAIN, FAST)
    row = row_of(report, "fast", "w")
    assert row.speed is None and row.speedup is None and len(row.failed) == 1


def test_the_made_up_world_reaches_its_truth() -> None:
    """The plain method's share of the floor follows from the world's own constants."""
    row = row_of(World(noise=0.0).report(), "plain", "gsm8k")
    wall = sum(t.wall_ms for t in row.trials) / sum(t.tokens for t in row.trials)
    assert row.figures["floor_share"] == pytest.approx(1000 * 113_000_000 / BANDWIDTH / wall)
    assert row.figures["accepted_length"] == 1.0


def test_nothing_measured_is_no_error() -> None:
    summary = Summary(report_of([], PLAIN, FAST))
    assert summary.sections == [] and summary.rows == [] and summary.exact == [] and slower_cells(summary) == []
