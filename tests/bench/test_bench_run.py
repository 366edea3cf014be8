"""A benchmark run: its order, its book-keeping, what is kept of a cut one, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.tiny import tiny_config, tiny_decoder

from paceline import LLM, zoo
from paceline.bench import measure
from paceline.bench import run as bench
from paceline.bench.measure import Builder, Group, kv_bytes
from paceline.bench.methods import parse_method, parse_methods
from paceline.bench.models import materialised
from paceline.bench.records import Cell, PromptIds, Trial
from paceline.bench.report import load_report
from paceline.bench.run import BenchConfig, Run, cells_of, groups_of, interleaved
from paceline.bench.workloads import load
from paceline.core.errors import ConfigError
from paceline.core.model_spec import parse_model
from paceline.network.loader import read_config

MODEL = "paceline-small"
RANDOM = "random:1x64x64x64"


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


class Seen:
    """Takes down what a run tells."""

    def __init__(self) -> None:
        self.trials: list[str] = []
        self.counts: list[tuple[int, int]] = []

    def __call__(self, text: str, trials: tuple[int, int] | None) -> None:
        if trials is not None:
            self.trials.append(text)
            self.counts.append(trials)


class CutShort(Seen):
    """Presses Ctrl-C when so many trials are behind, or lets another error happen."""

    def __init__(self, after: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        super().__init__()
        self.after, self.error = after, error

    def __call__(self, text: str, trials: tuple[int, int] | None) -> None:
        super().__call__(text, trials)
        if trials and trials[0] == self.after:
            raise self.error


def key(trial: Trial) -> tuple[str, str, int, int]:
    return trial.method, trial.cell.workload, trial.group, trial.repeat


class TestOrder:
    def test_workloads_advance_together_and_repeats_are_neighbours(self) -> None:
        cells = [Cell(workload=w) for w in ("x", "y")]
        groups = {c: groups_of(c, prompts_of(2 if c.workload == "x" else 1), 0) for c in cells}
        [point] = interleaved(groups, 2)
        assert [(g.cell.workload, g.index, r) for g, r in point] == [
            ("x", 0, 0), ("x", 0, 1), ("y", 0, 0), ("y", 0, 1), ("x", 1, 0), ("x", 1, 1),
        ]  # fmt: skip

    def test_batches_and_temperatures_are_points_of_their_own(self) -> None:
        cells = [Cell(workload="x", batch=b, temperature=t) for t in (0.0, 1.0) for b in (1, 2)]
        groups = {c: groups_of(c, prompts_of(2), 0) for c in cells}
        assert [len(point) for point in interleaved(groups, 1)] == [2, 1, 2, 1]

    def test_cells_are_the_product_of_what_is_swept(self) -> None:
        asked = config(batches=(1, 2), temperatures=(0.0, 1.0), contexts=(None, 64))
        cells = cells_of(asked, [load("wikisql", limit=2), load("books", limit=2)])
        assert len(cells) == len(set(cells)) == 2 * 2 * 2 * 2

    def test_the_last_group_is_filled_from_the_front_without_a_prompt_twice(self) -> None:
        groups = groups_of(Cell(workload="x", batch=4), prompts_of(6), 0)
        ids = [[p.id for p in g.prompts] for g in groups]
        assert ids == [["p0", "p1", "p2", "p3"], ["p4", "p5", "p0", "p1"]]

    def test_waves_are_prompts_of_one_group(self) -> None:
        groups = groups_of(Cell(workload="x", batch=2), prompts_of(6), 0, waves=2)
        ids = [[p.id for p in g.prompts] for g in groups]
        assert ids == [["p0", "p1", "p2", "p3"], ["p4", "p5", "p0", "p1"]]

    def test_a_batch_that_cannot_be_filled_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="3 prompts"):
            cells_of(config(batches=(4,)), [load("wikisql", limit=3)])
        with pytest.raises(ConfigError, match="2 waves of batch 2"):
            cells_of(config(batches=(2,), waves=2), [load("wikisql", limit=3)])

    def test_the_trials_of_a_run_are_interleaved(self) -> None:
        seen = Seen()
        Run(config(check=False), progress=seen).execute()
        blocks = [[text.split(", ")[1] for text in seen.trials[i : i + 3]] for i in range(0, len(seen.trials), 3)]
        assert [block[0] for block in blocks] == ["plain", "ngram", "suffix", "plain"]
        assert all(sorted(block) == ["ngram", "plain", "suffix"] for block in blocks)
        assert seen.counts == [(i, 12) for i in range(12)]


@pytest.fixture(scope="module")
def trials() -> list[Trial]:
    """Two batch sizes, greedy and sampled; all ids are as plain decoding's."""
    asked = config(
        batches=(1, 2), temperatures=(0.0, 0.8), methods=tuple(parse_methods(["plain", "suffix=suffix;budget=4"]))
    )
    report = Run(asked).execute()
    assert all(e.passed for e in report.exactness) and report.exactness
    return report.trials


class TestTrials:
    def test_each_method_runs_each_group_once_a_repeat(self, trials: list[Trial]) -> None:
        counts = Counter((t.method, t.cell, t.group, t.repeat) for t in trials)
        assert set(counts.values()) == {1}
        assert len(trials) == 2 * 2 * 2 * (2 + 1)  # methods, repeats, temperatures; two groups and one

    def test_tokens_arrivals_and_passes_add_up(self, trials: list[Trial]) -> None:
        for t in trials:
            assert t.error is None and len(t.outputs) == len(t.prompts) == len(t.ttft_ms) == t.cell.batch
            assert len(t.waits_ms) == len(t.arrivals) and all(w >= 0 for w in t.waits_ms)
            # The pass over a prompt gives one token; every later one is in an arrival.
            assert sum(t.arrivals) + len(t.outputs) == t.tokens
            assert t.passes + t.accepted == t.tokens
            assert len(t.arrivals) + len(t.outputs) == t.passes
            assert max(t.ttft_ms) <= t.wall_ms and t.steps <= t.passes
            assert sum(t.depth_accepted) == t.accepted <= t.drafted
            assert t.prompt_tokens and all(len(o) <= t.cell.max_new_tokens for o in t.outputs)
            assert t.draft_ms + t.verify_ms + t.host_ms <= t.wall_ms * 1.01

    def test_plain_decoding_drafts_nothing(self, trials: list[Trial]) -> None:
        plain = [t for t in trials if t.method == "plain"]
        assert all(t.drafted == 0 and t.draft_ms < 0.2 * t.wall_ms and t.off_reason is None for t in plain)
        assert any(t.accepted for t in trials if t.method == "suffix")

    def test_repeats_give_the_same_ids(self, trials: list[Trial]) -> None:
        said: dict[Any, set[str]] = {}
        for t in trials:
            said.setdefault((t.cell, t.group), set()).add(json.dumps(t.outputs))
        assert all(len(found) == 1 for found in said.values())

    def test_bytes_are_those_of_the_passes(self, trials: list[Trial]) -> None:
        for t in trials:
            weights = t.steps * 34_603_008  # of paceline-small in bf16: 8 layers and the head
            assert weights < t.bytes_read < 1.5 * weights


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

    def test_without_forgetting_it_would(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The test above can fail: a drafter with a memory drafts the second answer from the first."""
        runner = self.runner("suffix", budget=8)
        first = runner.run(self.group(ignore_eos=True), 0)
        monkeypatch.setattr(runner.llm, "forget", lambda: None)
        second = runner.run(self.group(ignore_eos=True), 1)
        assert first.outputs == second.outputs and second.passes < first.passes

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

    def test_sampling_is_seeded_by_the_prompt(self) -> None:
        group = self.group(batch=2, temperature=0.8)
        seeds = [group.params(p).seed for p in group.prompts]
        assert len(set(seeds)) == 2 and seeds == [replace(group, index=5).params(p).seed for p in group.prompts]
        assert seeds != [replace(group, seed=1).params(p).seed for p in group.prompts]

    def test_methods_share_the_weights_of_one_target(self) -> None:
        builder = Builder(MODEL, "cpu", 1)
        plain, ngram = (builder.llm(parse_method(t)) for t in ("plain", "ngram"))
        other = builder.llm(parse_method("plain;dtype=float32"))
        assert plain.decoder is ngram.decoder and plain.engine is not ngram.engine
        assert other.decoder is not plain.decoder and other.decoder.dtype == torch.float32

    def test_shared_weights_must_be_of_the_same_target(self) -> None:
        from paceline import LLM

        llm = LLM(MODEL, kv_memory="64MiB")
        with pytest.raises(ConfigError, match="dtype='float32'"):
            LLM(MODEL, dtype="float32", share=llm)

    def test_kv_bytes_stop_at_the_window(self) -> None:
        shape = tiny_config()
        decoder = tiny_decoder(shape)
        a_key = 2 * shape.num_kv_heads * shape.head_dim * 8  # float64
        full, windows = 100, [w for w in shape.windows if w is not None]
        assert kv_bytes(decoder, full) == a_key * (full * (shape.num_layers - len(windows)) + sum(windows))


class TestConversations:
    def test_second_turns_follow_on_plain_answers_and_are_the_same_for_all(self, tmp_path: Path) -> None:
        turns = [["Say something about ships.", "And now shorter."], ["One turn only."]]
        lines = [json.dumps({"id": f"c{i}", "category": "x", "turns": t}) for i, t in enumerate(turns)]
        (tmp_path / "talk.jsonl").write_text("\n".join(lines))
        asked = config(workloads=(str(tmp_path / "talk.jsonl"),), repeats=1)
        report = Run(asked).execute()
        plain = {t.prompts[0]: t for t in report.trials if t.method == "plain"}
        assert sorted(plain) == ["c0", "c0/2", "c1"]
        assert plain["c0/2"].prompt_tokens[0] > plain["c0"].prompt_tokens[0] + 8  # the first turn, its answer, and more
        assert all(e.identical == e.sequences == 3 for e in report.exactness)


class TestCutShort:
    def test_an_interrupted_run_reports_what_it_measured(self, tmp_path: Path) -> None:
        report = Run(config(), out=tmp_path, progress=CutShort(5)).execute()
        assert report.interrupted and len(report.trials) == 5
        assert any("interrupted after 5 of 12" in note for note in report.notes)
        assert [key(t) for t in load_report(tmp_path).trials] == [key(t) for t in report.trials]

    def test_so_does_one_that_an_error_ends(self, tmp_path: Path) -> None:
        with pytest.raises(MemoryError):
            Run(config(), out=tmp_path, progress=CutShort(4, MemoryError)).execute()
        kept = load_report(tmp_path)
        assert kept.interrupted and len(kept.trials) == 4 and not kept.exactness

    def test_ctrl_c_ends_with_a_report_and_status_130(self, tmp_path: Path) -> None:
        often = "from paceline.bench import config; config.LINE_EVERY_S = 0.5; from paceline.cli import main; main()"
        command = [sys.executable, "-c", often, "bench", "--workload", "wikisql", "--method", "ngram"]
        command += ["--prompts", "8", "--repeats", "40", "--threads", "1", "--out", str(tmp_path)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said += line
            if re.search(r"\b[1-9]\d* of \d+ trials, wikisql, ", line):
                process.send_signal(signal.SIGINT)
                break
        stdout, stderr = process.communicate(timeout=120)
        assert process.returncode == 130, said + stderr
        assert "measured so far" in stderr and "report.html" in stdout
        report = load_report(tmp_path)
        assert 1 <= len(report.trials) < 640 and report.interrupted

    def test_what_is_there_is_not_spoilt(self, tmp_path: Path) -> None:
        Run(config(prompts=1, repeats=1), out=tmp_path).execute()
        with pytest.raises(ConfigError, match="it holds the report"):
            Run(config(prompts=1, repeats=1), out=tmp_path).execute()
        again = Run(config(prompts=1, repeats=2), out=tmp_path, overwrite=True).execute()
        assert len(again.trials) == len(load_report(tmp_path).trials) == 6

    def test_a_time_limit_ends_a_run_between_comparisons(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = iter(range(0, 100_000, 10))
        monkeypatch.setattr(bench, "perf_counter", lambda: float(next(clock)))
        report = Run(config(time_limit_s=25.0)).execute()
        assert 0 < len(report.trials) < 12 and len(report.trials) % 3 == 0
        assert any("stopped after 25 s" in note for note in report.notes)


class TestRandom:
    def test_a_random_model_goes_on_to_the_full_length(self) -> None:
        report = Run(config(model=RANDOM, workloads=(), batches=(1, 2), max_new_tokens=21)).execute()
        assert all(t.cell.ignore_eos and set(map(len, t.outputs)) == {21} for t in report.trials)
        assert report.exactness and all(e.passed for e in report.exactness)
        assert report.workloads["random"]["prompts"] == 2

    def test_text_is_refused_for_it(self) -> None:
        with pytest.raises(ConfigError, match="no tokenizer"):
            config(model=RANDOM)


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"prompts": 0}, "prompts=0"),
            ({"repeats": 0}, "repeats=0"),
            ({"batches": (0,)}, "batches must be 1 or more"),
            ({"batches": (1, 1)}, "batches=.* twice"),
            ({"batches": ()}, "or none is"),
            ({"contexts": (0,)}, "contexts must be 1 or more"),
            ({"max_new_tokens": 0}, "max_new_tokens=0"),
            ({"temperatures": (-1.0,)}, "temperatures must be 0 or more"),
            ({"methods": ()}, "no method"),
            ({"workloads": ("books", "books")}, "there twice"),
        ],
    )
    def test_settings_that_cannot_be(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            config(**changes)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"workloads": ("boks",)}, "books"),
            ({"batches": (4,)}, "batch 4 of wikisql"),
            ({"model": "./nowhere"}, "nowhere"),
            ({"methods": tuple(parse_methods(["plain", "draft_model:./nowhere"]))}, "nowhere"),
            ({"methods": tuple(parse_methods(["plain", "suffix;verifier=rejection"]))}, "rejection"),
        ],
    )
    def test_mistakes_are_found_before_the_first_trial(self, changes: dict[str, Any], message: str) -> None:
        seen = Seen()
        with pytest.raises(ConfigError, match=message):
            Run(config(**changes), progress=seen).execute()
        assert not seen.trials

    def test_a_folder_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match="cannot be written"):
            Run(config(), out=tmp_path / "file").execute()


def test_the_report_says_what_is_needed_to_repeat_it() -> None:
    report = Run(config(prompts=1, repeats=1), command=["paceline", "bench"]).execute()
    card = next(e for e in zoo.available() if e.name == MODEL)
    assert report.model["parameters"] == pytest.approx(card.parameters, rel=1e-3)  # norms are not counted
    assert report.machine["threads"] == 1 and report.machine["read_bandwidth_bytes_per_s"] > 1e8
    assert {"paceline", "torch", "transformers"} <= report.versions.keys()
    assert report.command == ["paceline", "bench"] and report.settings["seed"] == 0
    assert report.workloads["wikisql"]["licence"] and report.workloads["wikisql"]["prompts"] == 1
    assert json.loads(report.as_json())


class TestRandomModels:
    def test_heads_may_be_of_any_number(self) -> None:
        for spec, heads, kv_heads, head_dim in ((RANDOM, 1, 1, 64), ("random:1x24x10x32x3x1", 3, 1, 8)):
            with materialised(spec) as folder:
                found = read_config(Path(folder))
            assert (found.num_heads, found.num_kv_heads, found.head_dim) == (heads, kv_heads, head_dim)

    @pytest.mark.parametrize(
        "spec", ["1x24x10x32", "1x24x10x32x3", "1x24x10x32x5x5", "1x24x10x32x4x3", "1x24x10x0x3x1"]
    )
    def test_shapes_that_cannot_be(self, spec: str) -> None:
        with pytest.raises(ConfigError, match="Write random:12x768"), materialised(f"random:{spec}"):
            pass

    def test_they_may_be_stretched(self) -> None:
        with materialised(f"stretch:{RANDOM},times=3") as folder:
            spec = parse_model(folder)
            assert spec.stretch == 3 and read_config(Path(spec.name)).num_layers == 1
            assert LLM(folder, max_model_len=64).decoder.config.depth == 3
        assert BenchConfig(model=f"stretch:{RANDOM},times=3", methods=tuple(parse_methods(["plain"]))).random


class TestStretched:
    LABEL = "paceline-small, stretched 2x"

    def test_a_report_says_so_wherever_it_names_the_model(self, tmp_path: Path) -> None:
        methods = tuple(parse_methods(["plain", "ngram;budget=4"]))
        asked = config(model="stretch:paceline-small,times=2", methods=methods, prompts=1, repeats=1)
        report = Run(asked, out=tmp_path).execute()
        assert report.model["name"] == self.LABEL and report.model["stretched"] == 2
        assert report.model["layers"] == 12 and report.title.startswith(self.LABEL)
        plain = Builder(MODEL, "cpu", 1).llm(methods[0]).decoder
        assert report.model["pass_bytes"] > 1.5 * plain.pass_bytes
        assert report.model["kv_bytes_per_token"] == 2 * kv_bytes(plain, 1)
        assert report.exactness[0].passed and report.exactness[0].sequences == 1
        assert load_report(tmp_path).model == report.model
        assert (tmp_path / "report.html").read_text().count(self.LABEL) >= 2
