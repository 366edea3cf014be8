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
from kits.native import needs_kernels
from kits.reports import World
from kits.stream_sets import MODEL, save_all, save_set
from streaming import acceptance, applications, components, few_keys, segments, states, sweeps, two_models
from streaming.applications import STREAMS
from streaming.common import CUT, StreamingFlags, TrainedSet, read_sets, study
from streaming.components import FRONTIER

from paceline.bench.models import materialised
from paceline.bench.records import Cell, Method, Trial
from paceline.bench.report import load_report
from paceline.bench.run import BenchConfig
from paceline.core.errors import CapabilityError, ConfigError
from paceline.network.streams import StreamSet

pytestmark = pytest.mark.timeout(120)
SHAPE = "random:3x64x128x256"


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


def test_the_ablation_has_every_component_wherever_streams_ride(sets: dict[str, str]) -> None:
    names = [entry.method.name for entry in grid("figure_13", set=sets["lossless"]).entries]
    assert {"chain", "tree", "threshold 0.01", "count 8", "best 8", "auto budget"} <= {*names}
    assert {f"{name}{FRONTIER}" for name in names if FRONTIER not in name and name != "auto budget"} <= {*names}
    shared = grid("figure_13", set=sets["shared"])
    assert not [entry for entry in shared.entries if FRONTIER in entry.method.name]
    assert all(entry.method.application == "set" for entry in shared.entries)
    assert "pruned" not in {entry.series for entry in grid("figure_13", set=sets["unpruned"]).entries}


def test_the_ablations_tree_can_be_chosen(
    sets: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = grid("figure_13", set=sets["lossless"], k=6, nodes=20)
    methods = {entry.method.name: entry.method for entry in wide.entries}
    assert methods["tree"].settings["budget"] == 20 and "k=6,nodes=20" in str(methods["tree"].drafter)
    assert {"count 16", "best 16"} <= {*methods} and not {"count 32", "best 32"} & {*methods}
    assert "k=6, gamma=2, 20 nodes" in wide.title
    assert run("figure_10", "--set", sets["lossless"], "--k", "4", "--out", tmp_path) == 2
    assert "means nothing to figure_10" in capsys.readouterr().err


def test_budgets_let_whole_trees_through(sets: dict[str, str]) -> None:
    methods = {e.method.name: e.method for e in grid("figure_13", set=sets["lossless"]).entries}
    assert methods["tree"].settings["budget"] == 3 + 9
    assert methods["chain"].settings["budget"] == 2
    assert methods["best 8"].settings["budget"] == 8


@pytest.mark.parametrize(("k", "gamma", "expected"), [(3, 6, 4), (2, 6, 6), (1, 5, 5), (6, 3, 2)])
def test_full_trees_stay_small(sets: dict[str, str], k: int, gamma: int, expected: int) -> None:
    trained = TrainedSet.read(sets["lossless"])
    assert trained.tree(k, gamma) == {"k": k, "gamma": expected}


SWEEPS = ("appendix_e1", "figure_10", "appendix_g1", "figure_12b", "figure_18", "table_4")


def test_every_sweep_makes_methods_that_the_bench_takes(sets: dict[str, str]) -> None:
    grids = {name: grid(name, set=sets["lossless"]) for name in SWEEPS}
    for found in grids.values():
        config = small(found)
        assert all(entry.method in config.methods for entry in found.entries) and found.x_label
        assert config.methods[0].plain and config.prompts >= found.prompts
    assert small(grids["figure_18"]).batches == (1, 2, 4, 8, 16)
    sampled = small(grids["figure_12b"])
    assert sampled.temperatures == (1.0,) and sampled.top_ks == sweeps.SWEPT_TOP_KS
    assert {m.dtype for m in small(grids["table_4"]).methods} == {"auto", "int8"}


def test_quick_sweeps_have_two_values(sets: dict[str, str]) -> None:
    for name in ("figure_10", "figure_13", "appendix_g1", "section_2_3"):
        whole, few = (len(grid(name, set=sets["lossless"], quick=quick).entries) for quick in (False, True))
        assert few < whole or name == "section_2_3"
    assert small(grid("figure_18", set=sets["lossless"], batches="2,8,16", quick=True)).batches == (2, 8)
    assert small(grid("figure_12b", set=sets["lossless"], quick=True)).top_ks == sweeps.SWEPT_TOP_KS[:2]


def test_a_dtype_is_that_of_all_methods_but_those_that_name_one(sets: dict[str, str]) -> None:
    found = grid("table_4", set=sets["lossless"])
    config = found.config(StreamingFlags(model=MODEL, tasks="sql", dtype="float32"))
    assert {m.dtype for m in config.methods} == {"float32", "int8"}


def test_sweeps_over_sets_go_by_their_layers(sets: dict[str, str]) -> None:
    folders = {"2": sets["deeper"], "1": sets["lossless"]}
    several = read_sets(folders)
    assert [trained.config.msa_layers for trained in several] == [1, 2]
    assert {entry.x for entry in grid("figure_11", sets=folders).entries} == {1, 2}


def test_trees_of_any_k_are_held_against_each_other_at_equal_nodes(sets: dict[str, str]) -> None:
    found = grid("figure_10", set=sets["lossless"])
    assert all("at=nodes" in entry.method.drafter for entry in found.entries)
    equal = [entry for entry in found.entries if entry.series == "best 6 nodes"]
    assert [entry.x for entry in equal] == [2, 3, 4, 5, 6]
    assert {entry.method.settings["budget"] for entry in equal} == {2 + 2 * 2}
    whole = {entry.x: entry.method.settings["budget"] for entry in found.entries if entry.series == "whole tree"}
    assert whole == {k: k + k * k for k in range(1, 7)}


def test_pruning_is_swept_over_all_depths(sets: dict[str, str], tmp_path: Path) -> None:
    """By the exits that a set has and by none, beside the whole tree."""
    layers = TrainedSet.read(sets["lossless"]).config.num_layers
    found = grid("section_2_3", set=save_set(tmp_path / "exits", exits=(1,)) if layers > 2 else sets["lossless"])
    by = {series: [e.x for e in found.entries if e.series == series] for series in {e.series for e in found.entries}}
    assert by["whole tree"] == [layers] and by["untrained exit (head)"] == [*range(1, layers)]
    assert by["trained exit"] == sorted({1, layers - 1})
    assert {e.series for e in grid("section_2_3", set=sets["unpruned"]).entries} == {*by} - {"trained exit"}


def test_batches_have_the_papers_rule_beside_ours(sets: dict[str, str]) -> None:
    found = {entry.series: entry.method.drafter for entry in grid("figure_18", set=sets["lossless"]).entries}
    assert "prune_threshold" in found["as in the paper"] and "best_path_batch=2" in found["as in the paper"]
    assert "prune_threshold" in found["pruned tree at any size"] and len(found) == 5
    assert len(grid("figure_18", set=sets["unpruned"]).entries) == 3


# The sweeps of which a reader takes a setting: half of the prompts choose it.
CHOSEN = ("figure_13", "figure_10", "appendix_e1", "appendix_g1", "section_2_3")


@pytest.mark.parametrize("name", CHOSEN)
def test_settings_are_chosen_on_prompts_that_are_not_reported(sets: dict[str, str], name: str) -> None:
    assert grid(name, set=sets["lossless"]).choose == "speedup"
    assert not grid("figure_18", set=sets["lossless"]).choose  # nothing is chosen there


@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        (lambda s: read_sets({"3": s["lossless"]}), "go through 1 layers"),
        (lambda s: read_sets({"2": s["deeper"]}), "1 sets"),
        (lambda s: TrainedSet.read(s["adapter"]), "adapters alone"),
    ],
)  # fmt: skip
def test_sets_that_cannot_be_are_refused(sets: dict[str, str], call: Any, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        call(sets)


def test_a_set_without_early_exit_has_no_thresholds(sets: dict[str, str]) -> None:
    with pytest.raises(CapabilityError, match="cannot prune"):
        grid("appendix_g1", set=sets["unpruned"])


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


LINES = [
    line("chain", "chain", 2.0, 10, 1.9),
    line("tree", "tree", 3.0, 100, 1.2),
    line("threshold 0.01", "pruned", 2.95, 39, 1.8),
    line("threshold 0.1", "pruned", 2.5, 12, 1.7),
    line("count 8", "pruned", 2.99, 41, 1.6),
    line("threshold 0.01 at frontier", "pruned", 2.95, 5, 2.4),
]


def test_pruning_is_held_against_the_whole_tree_of_the_same_kind() -> None:
    found = {p["method"]: p for p in components.pruning(LINES)}
    assert set(found) == {"threshold 0.01", "threshold 0.1", "count 8"}
    assert found["threshold 0.01"]["kept"] == pytest.approx(2.95 / 3) and found["threshold 0.01"]["spent"] == 0.39
    assert [p["good"] for p in found.values()] == [True, False, False]


def test_verdicts_choose_on_one_half_and_report_the_other() -> None:
    """What is fastest where nothing is chosen is not asked: the figure is of the setting that the other half chose."""
    choosing = [*LINES[:3], line("threshold 0.1", "pruned", 3.2, 12, 9.0)]
    calls, fast, pruning = components.verdicts(LINES, choosing)
    assert calls == "all: chosen on other prompts for its call reduction: threshold 0.1, here 2.50"
    assert fast.startswith("all: chosen on other prompts for its speed: threshold 0.1, here 1.70")
    assert "pruning does not keep" in pruning and "threshold 0.1 keeps 83.3% with 12.0%" in pruning
    good = components.verdicts(LINES, LINES)
    assert good[0] == "all: chosen on other prompts for its call reduction: tree, here 3.00"
    assert "threshold 0.01 keeps 98.3% with 39.0%" in good[-1] and "does not" not in good[-1]
    assert not components.verdicts(LINES, [])


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


def test_a_set_is_counted_by_its_own_tensors(sets: dict[str, str]) -> None:
    trained = StreamSet.load(sets["lossless"])
    found = applications.overhead_of_set(trained, MODEL)
    d = trained.config.d_model
    assert found["counted"] == found["formula"] == 2 * d + 2 * 4 * d and found["agrees"]
    assert found["medusa"] == 2 * (d * d + d + d * trained.config.vocab_size)
    assert found["adapters"] == sum(v.numel() for k, v in trained.tensors().items() if k.startswith("adapters"))
    assert not applications.overhead("x", 2, 4, d, 8, 2, counted=1)["agrees"]


# -- states


@pytest.mark.parametrize("name", ["lossless", "shared"])
def test_similarity_has_a_row_a_layer_and_a_column_a_stream(sets: dict[str, str], name: str) -> None:
    trained = TrainedSet.read(sets[name])
    ask = StreamingFlags(model=MODEL, tasks="sql", prompts=2, max_new_tokens=8, threads=1, dtype="float32")
    streams, main, counts = states.states(ask, trained)
    for found in (streams, main):
        assert found.shape == (1 + trained.config.msa_layers, trained.config.gamma) and found.abs().max() <= 1
    assert counts["prompts"] == 2 and 0 < counts["rows"] <= 2 * 8
    # Streams start as the main state and a small embedding: at first both are about as far from what comes later.
    assert streams[0].tolist() == pytest.approx(main[0].tolist(), abs=0.1)


# -- two models


def test_equation_10_gives_the_papers_parity() -> None:
    """gamma = 4 and a ratio of 10: the two models must advance 1.4 times as far."""
    assert two_models.advantage(4, 10, 1.4) == pytest.approx(1.0)
    assert two_models.advantage(4, 10, 1.0) == pytest.approx(1.4)
    assert two_models.advantage(4, 50, 1.4) < 1 < two_models.advantage(4, 2, 1.4)
    assert two_models.advantage(4, 10, 1.4, cost=2.0) == pytest.approx(0.5)


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


def test_distances_do_not_depend_on_tokens_outside_of_the_tree() -> None:
    """However their share is spread, and whatever the drafted ones are called."""
    tokens, parents, scores = [9, 4, 7, 4], [-1, 0, 0, 1], [0.0, -0.4, -1.5, -1.1]
    p = torch.rand(4, 30, generator=torch.Generator().manual_seed(3), dtype=torch.float64).softmax(-1)
    few, small = acceptance.condensed(tokens, p)
    assert few == [0, 1, 2, 1] and small[:, 1].tolist() == pytest.approx(p[:, 4].tolist())
    assert small.sum(1).tolist() == pytest.approx([1.0] * 4) and small.shape == (4, 3)
    whole, merged = acceptance.Distance(draws=4000), acceptance.Distance(draws=4000)
    whole.add(tokens, parents, scores, p)
    merged.add([0, 1, 2, 1], parents, scores, small)
    assert whole.lossy.value == pytest.approx(merged.lossy.value, abs=1e-6)
    assert whole.lossy.value > 0.05 > 0.03 > whole.exact.value


def test_the_lossy_rule_is_watched_on_real_prompts(sets: dict[str, str], tmp_path: Path) -> None:
    assert run("equation_9", "--set", sets["lossless"], "--tasks", "sql", "--out", tmp_path, *SMALL) == 0
    values = json.loads((tmp_path / "equation_9.json").read_text())
    lines = {line["method"]: line for line in values["lines"]}
    assert [line["exact"] for line in lines.values()] == ["yes", "yes", "–", "–", "–"]
    lossy = {name: value for name, value in values["distance"].items() if lines[name]["series"] == "lossy"}
    assert len(lossy) == 2 and all({*v} == {"wikisql", ALL} and v[ALL] == v["wikisql"] for v in lossy.values())
    advanced = [(v[ALL]["lossy"]["tokens"], v[ALL]["exact"]["tokens"]) for v in lossy.values()]
    assert all(ours > exact - 0.02 > 0 for ours, exact in advanced)  # of 2,048 draws each: noise aside
    assert any(ours > exact + 0.05 for ours, exact in advanced)


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


def test_a_draft_model_that_is_not_named_is_the_zoos_for_the_target(
    sets: dict[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert StreamingFlags(model="stretch:paceline-small,times=2").draft_model == "paceline-small-draft"
    assert StreamingFlags(model=MODEL, draft="mine").draft_model == "mine"
    assert run("table_5", "--set", sets["lossless"], "--tasks", "sql", "--out", tmp_path, *SMALL) == 2
    assert "the zoo has none" in capsys.readouterr().err


def test_answers_are_scored_only_if_asked_for(sets: dict[str, str], tmp_path: Path) -> None:
    given = ("--set", sets["lossless"], "--draft", MODEL, "--tasks", "sql", "--out", tmp_path, *SMALL)
    assert run("table_5", "--scored", 0, *given) == 0
    page = (tmp_path / "table_5.md").read_text()
    assert "exact_match" not in page and "suffix" in page


# -- applications


def test_sets_of_an_application_are_what_they_are_taken_for(sets: dict[str, str]) -> None:
    found = applications.application_grid("sql", {"adapter": sets["adapter"], STREAMS: sets["shared"]}, MODEL)
    names = [entry.method.name for entry in found.entries]
    assert names[0] == found.over == "adapter" and "streams, plain" in names and "adapter, ngram" in names
    alone = applications.application_grid("sql", {STREAMS: sets["shared"]}, MODEL)
    assert alone.over == "streams, plain" and {entry.method.application for entry in alone.entries} == {STREAMS}
    with pytest.raises(ConfigError, match="poetry"):
        applications.application_grid("poetry", {STREAMS: sets["shared"]}, MODEL)
    for adapter, streams in (("shared", "shared"), ("adapter", "adapter"), ("adapter", "lossless")):
        with pytest.raises(ConfigError, match="set with"):
            applications.application_grid("sql", {"adapter": sets[adapter], STREAMS: sets[streams]}, MODEL)


# -- other ways to tell streams apart, and through what they go


def test_sets_of_other_kinds_stand_beside_the_usual_one(sets: dict[str, str], tmp_path: Path) -> None:
    rotated = save_set(tmp_path / "rotated", value_rotation=0.001)
    own_mlp = save_set(tmp_path / "own_mlp", linears=("qkv", "mlp"))
    turned = grid("figure_12a", set=sets["lossless"], rotated=rotated)
    assert {entry.x for entry in turned.entries} == {"plain", "as usual", "values rotated"}
    run_alike = {(entry.method.settings["kernels"], entry.method.dtype) for entry in turned.entries}
    assert run_alike == {("torch", "float32")} and turned.entries[0].method.plain
    assert all(entry.method.settings["kernels"] == "torch" for entry in turned.entries)
    small(turned)
    replaced = grid("appendix_h2", set=sets["lossless"], own_mlp=own_mlp)
    assert {entry.x for entry in replaced.entries} == {"as usual", "MLP replaced"}
    assert not any("kernels" in entry.method.settings for entry in replaced.entries)
    with pytest.raises(ConfigError, match="has stream embeddings"):
        grid("figure_12a", set=sets["lossless"], rotated=own_mlp)
    with pytest.raises(ConfigError, match="have the target's MLP"):
        grid("appendix_h2", set=sets["lossless"], own_mlp=rotated)
    with pytest.raises(ConfigError, match="Train both alike"):
        grid("figure_12a", set=sets["deeper"], rotated=rotated)


# -- attention over few keys


@needs_kernels
def test_a_step_whose_streams_see_few_keys(
    sets: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(few_keys, "CONTEXTS", (70, 10**6))
    assert run("appendix_h1", "--model", MODEL, "--set", sets["lossless"], "--repeats", 2, "--out", tmp_path) == 0
    costs = json.loads((tmp_path / "appendix_h1.json").read_text("utf-8"))["costs"]
    assert [(c["context"], c["nodes"], c["rows"]) for c in costs] == [(70, 8, 2 * 9), (70, 32, 2 * 33)]
    assert all(c["few_ms"] > 0 and c["ratio"] == pytest.approx(c["few_ms"] / c["all_ms"]) for c in costs)
    assert run("appendix_h1", "--model", MODEL, "--set", sets["shared"], "--out", tmp_path / "shared") == 2
    assert "Name a lossless set" in capsys.readouterr().err


# -- segment attention


def segment_costs(tmp_path: Path, **settings: Any) -> list[dict[str, Any]]:
    given = [part for name, value in settings.items() for part in ("--segment", f"{name}={value}")]
    assert run("appendix_i", "--model", SHAPE, "--threads", 1, *given, "--out", tmp_path) == 0
    return json.loads((tmp_path / "appendix_i.json").read_text("utf-8"))["costs"]


def test_segments_need_less_memory_and_have_the_same_loss(tmp_path: Path) -> None:
    """Scores of 768 x 768 rows are kept for the dense attention's backward pass; of segments, those of 16 carriers."""
    naive, cut = segment_costs(
        tmp_path, segments="naive+16", gamma=4, layers=1, rows=4, length=256, prompt=128, steps=1
    )
    assert (naive["way"], cut["way"]) == ("naive", "16")
    assert naive["loss"] == pytest.approx(cut["loss"], rel=0.01)
    assert cut["peak_mib"] < 0.7 * naive["peak_mib"]
    assert cut["tokens_per_s"] > 0


def test_segments_of_streams_that_see_few_keys() -> None:
    small = {"rows": "1", "length": "96", "prompt": "8", "gamma": "2", "layers": "1", "steps": "1"}
    every, few = segments.segment_task(small), segments.segment_task({**small, "limit": "3"})
    with materialised(SHAPE) as folder:
        ways = (("naive", few), ("16", few), ("16", every))
        naive, cut, free = (segments.segment_cost(way, folder, task, "cpu", 1)["loss"] for way, task in ways)
    assert naive == pytest.approx(cut, rel=1e-3)
    assert cut != pytest.approx(free, rel=1e-6)


def test_segments_of_a_shared_set(tmp_path: Path) -> None:
    small = {"rows": 1, "length": 32, "prompt": 8, "gamma": 2, "layers": 1, "steps": 1}
    assert [cost["way"] for cost in segment_costs(tmp_path, segments="all", mode="shared", **small)] == ["all"]
    assert "shared" in (tmp_path / "appendix_i.md").read_text()


@pytest.mark.parametrize(
    ("setting", "wrong"),
    [
        ("rows=0", "nothing would be measured"),
        ("prompt=511", "no token is left"),
        ("colour=1", "colour"),
        ("segments=naive+0", "segments=0"),
        ("mode=other", "mode"),
        ("layers=3", "msa_layers"),
    ],
)
def test_steps_that_cannot_be_measured_are_refused(
    setting: str, wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--model", SHAPE, "--threads", 1, "--segment", setting)
    assert run("appendix_i", *given, "--segment", "steps=1", "--out", tmp_path)
    assert wrong in capsys.readouterr().err


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


def test_the_ablation_of_a_shared_set_runs(
    sets: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(components, "THRESHOLDS", (0.01,))
    monkeypatch.setattr(components, "COUNTS", (4,))
    assert run("figure_13", "--set", sets["shared"], "--tasks", "sql", "--out", tmp_path, *SMALL) == 0
    values = json.loads((tmp_path / "figure_13.json").read_text())
    names = {"chain", "tree", "threshold 0.01", "count 4", "best 4", "auto budget"}
    assert {ln["method"] for ln in values["lines"]} == names
    assert all(ln["exact"] == "yes" and not ln["error"] for ln in values["lines"])
    assert len(values["pruning"]) == 2 and values["remarks"]
    assert (tmp_path / "figure_13.svg").is_file() and (tmp_path / "figure_13-pruning.svg").is_file()


def test_applications_are_compared_in_one_table(sets: dict[str, str], tmp_path: Path) -> None:
    pair = ("--adapter", f"sql={sets['adapter']}", "--streams", f"sql={sets['shared']}", "--draft", MODEL)
    assert run("table_3", *pair, "--scored", 2, "--out", tmp_path, *SMALL) == 0
    lines = {ln["method"]: ln for ln in json.loads((tmp_path / "table_3.json").read_text())["lines"]}
    assert lines["base model"]["scores"].keys() == lines["adapter"]["scores"].keys()
    assert "[" in (tmp_path / "table_3.md").read_text().partition("exact_match")[2].partition("|")[0]  # an interval
    assert lines["adapter"]["speedup"] is None and lines["streams, chain"]["pairs"] == 1
    trained = StreamSet.load(sets["shared"]).parameters_by_part()
    assert lines["streams, chain"]["extra_parameters"] == trained["embeddings"] + trained["prune"]
    assert lines["adapter, ngram"]["extra_parameters"] == 0
    assert lines["streams, chain"]["parameters"] == sum(trained.values())
    assert lines["adapter, draft model"]["exact"] == "yes"
    assert {"exact_match"} <= lines["adapter"]["scores"].keys()
    assert lines["streams, best 8"]["exact"] == lines["adapter, ngram"]["exact"] == "yes"
    assert "sql" in (tmp_path / "table_3.md").read_text()


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


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        (("figure_13",), "--set is not given"),
        (("figure_11", "--sets", "1=x=y"), "x=y"),
        (("figure_11", "--sets", "nonsense"), "not a name and a value"),
        (("figure_13", "--set", "LOSSLESS", "--tasks", "sql,sql"), "one twice"),
        (("figure_13", "--set", "LOSSLESS", "--sets", "1=LOSSLESS"), "means nothing to figure_13"),
        (("table_3", "--adapter", "sql=ADAPTER", "--streams", "e2e=SHARED"), "only one of its two sets"),
    ],
)
def test_mistakes_end_in_one_line(
    sets: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], given: tuple[str, ...], wrong: str
) -> None:
    folders = {name.upper(): folder for name, folder in sets.items()}
    filled = [folders.get(flag, flag) for flag in given]
    for name, folder in folders.items():
        filled = [flag.replace(f"={name}", f"={folder}") for flag in filled]
    assert run(*filled, "--out", tmp_path) == 2
    said = capsys.readouterr().err
    assert wrong in said and len(said.splitlines()) == 1
