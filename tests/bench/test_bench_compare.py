"""Two reports side by side."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kits.reports import TRUTHS, World
from rich.console import Console

from paceline.bench.compare import ComparedRow, compare, differences, only, render_terminal, verdict
from paceline.bench.records import Report
from paceline.bench.summary import Interval


def total(rows: list[ComparedRow], method: str) -> ComparedRow:
    return next(row for row in rows if row.cell is None and row.method == method)


def shown(a: Report, b: Report, width: int = 80) -> str:
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(render_terminal(a, b))
    return capture.get()


def slowed(report: Report, method: str | None, factor: float) -> Report:
    for trial in report.trials:
        trial.wall_ms *= factor if method in (None, trial.method) else 1
    return report


def test_a_report_is_the_same_as_itself() -> None:
    report = World().report()
    found = compare(report, report)
    assert differences(report, report) == [] and only(report, report) == []
    assert len(found) == 9 + 9 * 5
    assert all(row.ratio.value == pytest.approx(1.0) and verdict(row.ratio) == "same" for row in found)


def test_two_runs_of_one_thing_are_mostly_the_same() -> None:
    found = compare(World(seed=1).report(), World(seed=2).report())
    judged = [verdict(row.ratio) for row in found if row.cell is not None]
    assert judged.count("same") >= 0.85 * len(judged)  # 95 % by chance, a little less for few groups


def test_a_method_that_became_slower_is_found_with_its_size() -> None:
    found = compare(World(seed=1).report(), slowed(World(seed=2).report(), "hybrid", 1.25))
    row = total(found, "hybrid")
    assert (verdict(row.ratio), verdict(row.speedup_ratio)) == ("slower", "slower")
    assert row.speedup_ratio is not None
    assert all(ratio.low <= 0.8 <= ratio.high for ratio in (row.ratio, row.speedup_ratio))
    assert verdict(total(found, "plain").ratio) == "same"
    back = compare(slowed(World(seed=2).report(), "hybrid", 1.25), World(seed=1).report())
    assert verdict(total(back, "hybrid").ratio) == "faster"


def test_a_slower_machine_moves_speeds_and_not_speedups() -> None:
    found = compare(World(seed=1).report(), slowed(World(seed=1).report(), None, 1.5))
    for row in found:
        assert verdict(row.ratio) == "slower" and row.ratio.value == pytest.approx(1 / 1.5)
        assert verdict(row.speedup_ratio) in ("same", "unknown")
    assert total(found, "plain").speedup_ratio is None


def test_other_prompts_are_compared_unmatched_with_a_wider_interval() -> None:
    a, b = World(seed=1).report(), World(seed=2).report()
    other = World(seed=2).report()
    for trial in other.trials:
        trial.prompts = [f"other {name}" for name in trial.prompts]
    matched, unmatched = total(compare(a, b), "hybrid").ratio, total(compare(a, other), "hybrid").ratio
    assert unmatched.value == pytest.approx(matched.value)  # all groups on both sides
    assert unmatched.high - unmatched.low > matched.high - matched.low


def test_only_common_prompts_count_where_there_are_any() -> None:
    a, b = World(seed=1, noise=0.0).report(), World(seed=1, noise=0.0).report()
    for trial in b.trials:
        if trial.group == 4:  # another prompt, and a much slower one
            trial.prompts, trial.wall_ms = ["new"], trial.wall_ms * 50
    row = total(compare(a, b), "plain")
    assert row.ratio.value == pytest.approx(1.0)


def test_what_differs_comes_first() -> None:
    a, b = World().report(), World().report()
    b.machine["cores"] = 64
    b.versions["torch"] = "2.12.0"
    b.commit = None
    b.settings["seed"] = 7
    b.methods[1] = replace(b.methods[1], settings={"depth": 3})
    found = differences(a, b)
    assert {what for what, _, _ in found} == {
        "commit",
        "machine.cores",
        "method ngram.settings.depth",
        "settings.seed",
        "versions.torch",
    }
    assert ("machine.cores", "2", "64") in found
    text = shown(a, b)
    assert text.index("machine.cores") < text.index("tok/s B/A")


def test_what_only_one_has_is_listed() -> None:
    a, b = World().report(), World(truths=TRUTHS[:3], workloads={"gsm8k": "GSM8K", "new": "New"}).report()
    found = compare(a, b)
    assert {row.cell.workload for row in found if row.cell} == {"gsm8k"}
    assert {row.method for row in found} == {"plain", "ngram", "draft_model depth=4"}
    assert "hybrid, gsm8k, batch 1, greedy, EOS ignored" in only(a, b)
    assert only(b, a) == [f"{m}, new, batch 1, greedy, EOS ignored" for m in ("plain", "ngram", "draft_model depth=4")]


def test_nothing_in_common_is_said() -> None:
    a, b = World(workloads={"x": "X"}).report(), World(workloads={"y": "Y"}).report()
    assert compare(a, b) == []
    assert "no method ran in the same cell in both" in shown(a, b)


def test_failed_trials_are_no_common_cell() -> None:
    a, b = World().report(), World().report()
    for trial in b.trials:
        if trial.method == "ngram":
            trial.error, trial.outputs = "broken", []
    assert "ngram" not in {row.method for row in compare(a, b)}
    assert any(line.startswith("ngram, ") for line in only(a, b))


@pytest.mark.parametrize(
    ("low", "high", "pairs", "expected"),
    [(1.01, 1.2, 9, "faster"), (0.7, 0.99, 9, "slower"), (0.9, 1.1, 9, "same"), (2.0, 2.0, 1, "unknown")],
)
def test_verdict(low: float, high: float, pairs: int, expected: str) -> None:
    assert verdict(Interval(value=(low + high) / 2, low=low, high=high, pairs=pairs)) == expected
    assert verdict(None) == "unknown"


def test_a_table_fits_80_columns_and_cuts_nothing() -> None:
    text = shown(World(seed=1).report(), World(seed=2).report())
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert "synthetic" in text
