"""The study of Speculative Streaming: what it measures, verdicts, counts of parameters, files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import speculative_streaming  # noqa: F401  (all its figures are known from then on)
import torch
import transformers  # noqa: F401  (first loaded in a run, its log would go to a stream that is closed afterwards)
from kit.grid import ALL
from kit.study import Grid, GridLine
from kits.reports import World
from kits.stream_sets import MODEL, save_all
from streaming import acceptance, applications, two_models
from streaming.common import CUT, StreamingFlags, study

from paceline.bench.records import Cell, Method, Trial
from paceline.bench.report import load_report
from paceline.bench.run import BenchConfig
from paceline.papers.streaming.model import StreamSet

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return save_all(tmp_path_factory.mktemp("sets"))


def grid(name: str, **options: Any) -> Grid:
    """What a figure would run."""
    found = study.items[name].make(StreamingFlags(**options))
    assert isinstance(found, Grid)
    return found


def small(found: Grid) -> BenchConfig:
    return found.config(StreamingFlags(model=MODEL, tasks="sql", prompts=1, repeats=1, max_new_tokens=6, threads=1))


# -- what is measured


# The sweeps of which a reader takes a setting: half of the prompts choose it.


# -- verdicts


def line(method: str, series: str, calls: float, upper: float, speed: float) -> GridLine:
    return GridLine(
        task=ALL,
        method=method,
        series=series,
        x=None,
        call_reduction=calls,
        accepted_length=calls,
        drafted=None,
        row_layers=2 * upper,
        upper_row_layers=upper,
        pruned=None,
        tokens_per_s=100 * speed,
        speedup=speed,
        speedup_low=speed - 0.1,
        speedup_high=speed + 0.1,
        pairs=4,
        exact="yes",
        error=None,
    )


# -- parameters


def test_formulas_give_the_published_counts(sets: dict[str, str]) -> None:
    published = parameters(sets["lossless"])[1:]
    assert [f"{o['formula']:.1e}" for o in published] == ["8.2e+04", "6.1e+04", "8.2e+04"]
    assert [f"{o['medusa']:.1e}" for o in published] == ["5.9e+08", "4.3e+08", "5.9e+08"]
    assert all(o["agrees"] for o in published)
    # A lossless set with its adapters (rank 8, four layers): 557,056 a layer of Mistral, by hand.
    assert published[0]["in_all"] == 81_920 + 4 * 557_056 and published[0]["medusa"] / published[0]["in_all"] > 250
    assert not applications.overhead("x", 4, 8, 4096, 32000, 4, published=8.3e4)["agrees"]


def parameters(folder: str) -> list[dict[str, Any]]:
    steps = study.items["table_3_parameters"].make(StreamingFlags(set=folder))
    assert not isinstance(steps, Grid) and next(steps) is None
    table = next(steps)
    assert table is not None and table.same
    return table.values["overhead"]


# -- two models


def test_costs_are_those_of_the_trials() -> None:
    def trial(method: str, passes: int, drafted: int, tokens: int, verify: float, draft: float) -> Trial:
        outputs, cell = [[1] * tokens], Cell(workload="a")
        counts = {
            "passes": passes,
            "drafted": drafted,
            "verify_ms": verify,
            "draft_ms": draft,
            "wall_ms": verify + draft,
        }
        lists: dict[str, Any] = {"prompts": ["p"], "prompt_tokens": [3], "outputs": outputs, "finish": ["stop"]}
        return Trial(method=method, cell=cell, group=0, repeat=0, ttft_ms=[1.0], **lists, **counts)

    trials = [
        trial("plain", 24, 0, 24, 240.0, 0.0),
        trial("two", 8, 32, 24, 96.0, 64.0),
        trial("one", 12, 48, 24, 144.0, 24.0),
    ]
    methods = [Method(name=name, drafter=drafter) for name, drafter in (("plain", "none"), ("two", "x"), ("one", "y"))]
    report = replace(World(groups=1, repeats=1).report(), methods=methods, trials=trials)
    found = two_models.costs_of(report, methods[1], methods[2], "a")
    assert (found.target_ms, found.draft_ms, found.streams_ms) == (10.0, 2.0, 14.0)
    assert (found.gamma, found.zeta, found.beta) == (4.0, 3.0, 2.0)
    assert found.expected == pytest.approx((4 * 2 + 10) / 3 / (14 / 2))
    assert found.measured == pytest.approx(160 / 168)
    answer = two_models.per_answer(trials[1:2], True)
    assert answer == {"target_calls": 8, "draft_calls": 32, "latency_ms": 160.0}
    assert two_models.per_answer(trials[2:], False)["draft_calls"] == 0


# -- equation 9


@pytest.mark.parametrize(("p", "q"), [(0.3, 0.6), (0.5, 0.2), (0.1, 0.9)])
def test_the_distance_of_one_draft_is_the_formulas(p: float, q: float) -> None:
    """A token x that is drafted because it is likely comes out with a + (1 - a) p(x), a = min(1, p(x) / q(x))."""
    found = acceptance.Distance(draws=20_000)
    row = torch.tensor([p, *[(1 - p) / 7] * 7])
    found.add([5, 0], [-1, 0], [0.0, float(torch.tensor(q).log())], torch.stack((row, row.flip(0))))
    accepted = min(1.0, p / q)
    # The bonus behind the draft, where it is accepted, is p's own.
    tokens = 1 + accepted
    assert found.lossy.value == pytest.approx(accepted * (1 - p) / tokens, abs=0.01)
    assert found.lossy.tokens == pytest.approx(tokens, abs=0.02)
    assert found.exact.value < 0.01 and found.exact.tokens == pytest.approx(1 + p, abs=0.02)


def test_two_models_and_streams_answer_the_same_prompts(sets: dict[str, str], tmp_path: Path) -> None:
    given = ("--set", sets["lossless"], "--draft", MODEL, "--tasks", "sql", "--out", tmp_path, *SMALL)
    assert run("table_5", "figure_20", "--scored", 2, *given) == 0
    answers = json.loads((tmp_path / "table_5.json").read_text())["answers"]
    found = {answer["method"]: answer for answer in answers}
    assert found["plain"]["target_calls"] == 6 and found["plain"]["draft_calls"] == 0
    assert found["streams, chain"]["draft_calls"] == found["n-gram"]["draft_calls"] == 0
    drafts = [found[f"draft model, {depth}"] for depth in two_models.DEPTHS]
    assert all(d["draft_calls"] > 0 and d["target_calls"] < 6 for d in drafts)  # it is its own draft here
    assert "exact_match" in (tmp_path / "table_5.md").read_text()
    tasks = json.loads((tmp_path / "figure_20.json").read_text())["tasks"]
    assert [task["task"] for task in tasks] == ["wikisql"] and (tmp_path / "figure_20.svg").is_file()
    assert tasks[0]["zeta"] > 1.5 and tasks[0]["expected"] > 0


# -- on the command line


def run(*given: Any) -> int:
    return study.run([*map(str, given)])


SMALL = ("--model", MODEL, "--prompts", 1, "--repeats", 1, "--max-new-tokens", 6, "--threads", 1)


def test_a_sweep_writes_tables_and_figures(
    sets: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("appendix_e1", "--set", sets["lossless"], "--tasks", "sql", "--out", tmp_path, *SMALL)
    assert run(*given) == 0
    values = json.loads((tmp_path / "appendix_e1.json").read_text())
    assert {(ln["series"], ln["x"]) for ln in values["lines"]} == {
        (series, gamma) for series in ("chain", f"best {CUT} nodes") for gamma in (1, 2)
    }
    assert all(ln["exact"] == "yes" and ln["row_layers"] for ln in values["lines"])
    assert values["sets"][0]["gamma"] == 2
    assert (tmp_path / "appendix_e1.svg").is_file() and "ids equal plain" in (tmp_path / "appendix_e1.md").read_text()
    assert load_report(tmp_path / "appendix_e1").methods[0].plain
    assert run(*given) == 2 and "--overwrite" in capsys.readouterr().err


def test_tables_without_a_run_are_written(
    sets: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("table_3_parameters", "--set", sets["lossless"], "--out", tmp_path) == 0
    assert "81,920" in capsys.readouterr().out
    assert all(row["agrees"] for row in json.loads((tmp_path / "table_3_parameters.json").read_text())["overhead"])
    small = ("--model", MODEL, "--tasks", "sql", "--prompts", 1, "--max-new-tokens", 4, "--threads", 1)
    stored = tmp_path / "stored"
    StreamSet.load(sets["lossless"], dtype=torch.bfloat16).save(stored)  # as the zoo's sets are
    assert run("figure_5", "--set", stored, "--out", tmp_path, *small) == 0
    values = json.loads((tmp_path / "figure_5.json").read_text())
    assert values["layers"] == [1, 2] and len(values["streams"]) == 2 and (tmp_path / "figure_5.svg").is_file()
