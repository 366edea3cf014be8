"""A benchmark run: its order, its book-keeping, what is kept of a cut one, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.bench import measure
from paceline.bench.measure import Builder, Group
from paceline.bench.methods import parse_method, parse_methods
from paceline.bench.records import Cell, PromptIds, Trial
from paceline.bench.run import BenchConfig, Run, cells_of, groups_of, interleaved
from paceline.bench.workloads import load
from paceline.core.errors import ConfigError

MODEL = "paceline-small"


def config(**changes: Any) -> BenchConfig:
    """Seconds of work: plain decoding and two drafters on two short prompts."""
    values: dict[str, Any] = {
        "model": MODEL,
        "methods": tuple(parse_methods(["plain", "ngram", "suffix"])),
        "workloads": ("wikisql",),
        "prompts": 2,
        "repeats": 2,
        "max_new_tokens": 8,
        "threads": 1,
    }
    return BenchConfig(**{**values, **changes})


def prompts_of(count: int) -> list[PromptIds]:
    return [PromptIds(id=f"p{i}", ids=(i + 2, i + 3, i + 4)) for i in range(count)]


class TestOrder:
    def test_workloads_advance_together_and_repeats_are_neighbours(self) -> None:
        cells = [Cell(workload=w) for w in ("x", "y")]
        groups = {c: groups_of(c, prompts_of(2 if c.workload == "x" else 1), 0) for c in cells}
        [point] = interleaved(groups, 2)
        assert [(g.cell.workload, g.index, r) for g, r in point] == [
            ("x", 0, 0), ("x", 0, 1), ("y", 0, 0), ("y", 0, 1), ("x", 1, 0), ("x", 1, 1),
        ]  # fmt: skip

    def test_the_last_group_is_filled_from_the_front_without_a_prompt_twice(self) -> None:
        groups = groups_of(Cell(workload="x", batch=4), prompts_of(6), 0)
        ids = [[p.id for p in g.prompts] for g in groups]
        assert ids == [["p0", "p1", "p2", "p3"], ["p4", "p5", "p0", "p1"]]

    def test_a_batch_that_cannot_be_filled_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="3 prompts"):
            cells_of(config(batches=(4,)), [load("wikisql", limit=3)])
        with pytest.raises(ConfigError, match="2 waves of batch 2"):
            cells_of(config(batches=(2,), waves=2), [load("wikisql", limit=3)])


def test_a_time_limit_leaves_the_first_group_whole() -> None:
    report = Run(config(time_limit_s=1e-9)).execute()
    assert [trial.method for trial in report.trials] == ["plain", "ngram", "suffix"]
    assert "stopped after 1e-09 s, with 3 of 12 trials done" in report.notes


@pytest.fixture(scope="module")
def trials() -> list[Trial]:
    """Two batch sizes, greedy and sampled; all ids are as plain decoding's."""
    asked = config(
        batches=(1, 2), temperatures=(0.0, 0.8), methods=tuple(parse_methods(["plain", "suffix=suffix;budget=4"]))
    )
    report = Run(asked).execute()
    assert all(e.passed for e in report.exactness) and report.exactness
    return report.trials


class TestMeasure:
    def runner(self, drafter: str, **settings: Any) -> measure.EngineRunner:
        method = replace(parse_method(drafter), settings=settings)
        return measure.EngineRunner(method, Builder(MODEL, "cpu", 1).llm(method, [[128, 128]]))

    def group(self, batch: int = 1, **cell: Any) -> Group:
        kind = Cell(workload="x", batch=batch, **{"max_new_tokens": 12, **cell})
        prompts = [PromptIds(id=f"p{i}", ids=tuple(range(20, 60 + i))) for i in range(batch)]
        return Group(cell=kind, index=0, prompts=tuple(prompts), seed=0)

    def test_a_trial_finds_nothing_of_the_one_before(self) -> None:
        runner = self.runner("suffix", budget=8)
        first, second = (runner.run(self.group(ignore_eos=True), r) for r in range(2))
        assert first.outputs == second.outputs
        # Neither the prompt's K/V (one prefill step and the same reads) nor the output it would copy from.
        assert (first.steps, first.bytes_read, first.passes) == (second.steps, second.bytes_read, second.passes)
        assert first.drafted == second.drafted

    def test_a_place_that_falls_free_goes_to_the_next_prompt(self) -> None:
        """Four prompts, two at once, whose answers end at different times: never more, and less at the end alone."""
        runner, group = self.runner("suffix", budget=8), self.group(batch=4, ignore_eos=True)
        engine, at_work = runner.llm.engine, []
        step = engine.step

        def watched() -> Any:
            at_work.append(len(engine.live))
            return step()

        engine.step = watched  # type: ignore[method-assign]
        waves = replace(group, cell=replace(group.cell, batch=2))
        trial = runner.run(waves, 0)
        assert trial.error is None and trial.outputs == runner.run(group, 0).outputs
        own = at_work[: trial.steps]
        assert max(own) == 2 and own == sorted(own, reverse=True) and len(trial.ttft_ms) == 4
        assert max(trial.ttft_ms) < trial.wall_ms / 2  # each counts from its own beginning
        assert waves.lengths == [55, 54] and len(group.lengths) == 4

    def test_an_error_becomes_the_trial_s_and_the_engine_goes_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        runner = self.runner("ngram")
        step = runner.llm.engine.step
        calls = iter(range(100))

        def failing() -> Any:
            if next(calls) == 3:
                raise RuntimeError("planted")
            return step()

        monkeypatch.setattr(runner.llm.engine, "step", failing)
        bad = runner.run(self.group(), 0)
        assert bad.error == "RuntimeError: planted" and not bad.outputs and bad.tokens_per_s == 0
        good = runner.run(self.group(), 1)
        assert good.error is None and good.tokens
        runner.llm.engine.pool.check_integrity()
