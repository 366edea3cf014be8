"""Measuring speculative streams: plans, the yardstick of an application, verdicts, counts of parameters, files."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers  # noqa: F401  (first loaded in a command, its log would go to a stream that is closed afterwards)
from reports import Truth, World
from typer.testing import CliRunner

from paceline.bench import applications, figures, streams_overhead, streams_similarity
from paceline.bench import streams_plans as plans
from paceline.bench import streams_report as made
from paceline.bench.figures import Panel, Series
from paceline.bench.methods import parse_method, with_plain
from paceline.bench.records import Cell, Method, Trial
from paceline.bench.report import load_report, markdown
from paceline.bench.run import BenchConfig, Run
from paceline.bench.streams_plans import TrainedSet
from paceline.bench.summary import Index, summarise
from paceline.cli import app
from paceline.core.errors import CapabilityError, ConfigError
from paceline.target.adapters import AdapterConfig, linear_shapes
from paceline.target.loader import read_config, resolve_folder
from paceline.target.streams import StreamConfig, StreamSet, fingerprint

pytestmark = pytest.mark.timeout(120)

MODEL = "paceline-small-draft"  # the smaller of the embedded two


def save_set(folder: Path, *, mode: str = "lossless", gamma: int = 2, layers: int = 1, **options: Any) -> str:
    """A set for `MODEL` that changes little: adapters of a shared one by a hair."""
    place = Path(resolve_folder(MODEL))
    shape = read_config(place)
    total = max(shape.num_layers, layers + 1)  # with more than the target has it can be read, not run
    low = total - layers if mode == "lossless" else 0
    config = StreamConfig(
        **{"prune_rank": 4 if gamma else 0} | options,
        mode=mode,  # type: ignore[arg-type]
        gamma=gamma,
        msa_layers=layers if gamma else 0,
        num_layers=total,
        d_model=shape.d_model,
        vocab_size=shape.vocab_size,
        adapter=AdapterConfig(rank=2, layers=tuple(range(low, total))),
        target=MODEL,
        fingerprint=fingerprint(place),
    )
    generator = torch.Generator().manual_seed(3)
    trained = StreamSet.fresh(config, linear_shapes(shape), generator)
    assert trained.adapters is not None
    for up in trained.adapters.up.values():
        up.data.copy_(0.1 * torch.randn(up.shape, generator=generator))
    trained.save(folder)
    return str(folder)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("sets")
    return {
        "lossless": save_set(root / "lossless"),
        "deeper": save_set(root / "deeper", layers=2),
        "shared": save_set(root / "shared", mode="shared"),
        "adapter": save_set(root / "adapter", mode="shared", gamma=0),
        "unpruned": save_set(root / "unpruned", prune_rank=0),
    }


def small(**changes: Any) -> dict[str, Any]:
    values = {
        "model": MODEL,
        "workloads": ("wikisql",),
        "prompts": 1,
        "repeats": 1,
        "max_new_tokens": (6,),
        "threads": 1,
    }
    return values | changes


# -- counts in trials


def test_reports_of_older_versions_are_read() -> None:
    report = World(groups=1, repeats=1).report()
    values = json.loads(json.dumps(report.as_dict()))
    for trial in values["trials"]:
        for name in ("row_layers", "upper_row_layers", "pruned"):
            del trial[name]
        del trial["cell"]["top_k"]
    for method in values["methods"]:
        del method["application"]
    again = type(report).from_dict(values)
    assert again.as_dict() == report.as_dict()


def test_call_reduction_is_tokens_a_pass_and_row_layers_are_a_pass() -> None:
    cell = Cell(workload="w")
    counts = {"passes": 5, "row_layers": 200, "upper_row_layers": 50, "pruned": 10}
    base = {"cell": cell, "group": 0, "repeat": 0, "prompts": ["p"], "prompt_tokens": [3], "finish": ["stop"]}
    base |= {"wall_ms": 1.0, "ttft_ms": [1.0]}
    trials = [
        Trial(method="plain", outputs=[list(range(12))], passes=12, row_layers=144, **base),
        Trial(method="streams", outputs=[list(range(12))], **counts, **base),
    ]
    report = World(groups=1, repeats=1).report()
    report.methods, report.trials = [Method(name="plain"), Method(name="streams", drafter="streams:x")], trials
    report.exactness = []
    plain, streams = (row.figures for row in summarise(report).rows)
    assert streams.call_reduction == 12 / 5 and plain.call_reduction == 1
    assert (streams.row_layers, streams.upper_row_layers, streams.pruned) == (40, 10, 2)
    assert (plain.row_layers, plain.upper_row_layers, plain.pruned) == (12, None, None)
    assert "| streams | 2.40 | 40.0 | 10.0 | 2.00 |" in markdown.render(report)


# -- the yardstick of an application


def test_an_application_is_held_against_its_own_plain_decoding(sets: dict[str, str]) -> None:
    methods = [
        parse_method("ngram"),
        parse_method("a=ngram;application=adapter"),
        parse_method("s=streams,k=2;application=shared;budget=4"),
    ]
    base, adapter, shared, *rest = with_plain(methods, sets)
    assert rest == methods
    assert (base.drafter, base.application, base.plain) == ("none", None, True)
    assert (adapter.drafter, adapter.application, adapter.plain) == ("none", "adapter", True)
    assert (shared.drafter, shared.settings, shared.application) == ("streams,k=2", {"budget": 0}, "shared")
    assert shared.plain and not methods[2].plain
    assert not Method(name="x", drafter="ngram", settings={"budget": 0}).plain  # switched off is no yardstick
    report = World(groups=1, repeats=1).report()
    report.methods = [base, adapter, shared, *methods]
    report.trials, report.exactness = [], []
    index = Index(report)
    assert [index.reference(m) for m in methods] == [base.name, adapter.name, shared.name]


def test_an_application_of_no_folder_is_refused(sets: dict[str, str]) -> None:
    method = parse_method("ngram;application=sql")
    with pytest.raises(ConfigError, match="no folder is given"):
        with_plain([method], {})
    with pytest.raises(ConfigError, match="no folder is given"):
        BenchConfig(model=MODEL, methods=(method,))


def test_methods_that_make_an_application_answer_differently_are_refused(sets: dict[str, str]) -> None:
    texts = ["a=streams;application=shared", "b=streams,at=nodes,attention_limit=4;application=shared;kernels=torch"]
    with pytest.raises(ConfigError, match="attention_limit"):
        with_plain([parse_method(text) for text in texts], sets)


def test_a_run_gives_applications_their_own_ids_and_compares_within_them(sets: dict[str, str]) -> None:
    folders = {name: sets[name] for name in ("adapter", "shared")}
    texts = ["ngram", "a=ngram;application=adapter", "s=streams,k=2;application=shared;budget=3"]
    methods = with_plain([parse_method(text) for text in texts], folders)
    report = Run(BenchConfig(methods=tuple(methods), applications=folders, **small())).execute().report
    assert not [t.error for t in report.trials if t.error]
    assert {e.method: e.reference for e in report.exactness} == {
        "ngram": "plain",
        "a": "plain application=adapter",
        "s": "plain application=shared",
    }
    assert all(e.passed and e.sequences for e in report.exactness)
    answers = {t.method: t.outputs for t in report.trials}
    assert answers["ngram"] != answers["s"]  # the set changes the answer, so the test is worth something
    assert answers["a"] != answers["ngram"]


# -- plans


def test_the_ablation_has_every_component_wherever_streams_ride(sets: dict[str, str]) -> None:
    lossless = plans.ablation(TrainedSet.read(sets["lossless"]))
    names = [entry.method.name for entry in lossless.entries]
    assert {"chain", "tree", "threshold 0.01", "count 8", "best 8", "auto budget"} <= {*names}
    assert {f"{name}{plans.FRONTIER}" for name in names if plans.FRONTIER not in name and name != "auto budget"} <= {
        *names
    }
    shared = plans.ablation(TrainedSet.read(sets["shared"]))
    assert not [entry for entry in shared.entries if plans.FRONTIER in entry.method.name]
    assert all(entry.method.application == "set" for entry in shared.entries)
    unpruned = plans.ablation(TrainedSet.read(sets["unpruned"]))
    assert "pruned" not in {entry.series for entry in unpruned.entries}


def test_the_ablations_tree_can_be_chosen(sets: dict[str, str], run: Any, tmp_path: Path) -> None:
    wide = plans.ablation(TrainedSet.read(sets["lossless"]), k=6, nodes=20)
    methods = {entry.method.name: entry.method for entry in wide.entries}
    assert methods["tree"].settings["budget"] == 20 and "k=6,nodes=20" in str(methods["tree"].drafter)
    assert {"count 16", "best 16"} <= {*methods} and not {"count 32", "best 32"} & {*methods}
    assert "k=6, gamma=2, 20 nodes" in wide.title
    refused = run("streams", "--set", sets["lossless"], "--sweep", "k", "--k", "4", "--out", str(tmp_path))
    assert refused.exit_code and "a sweep has its own" in refused.output.replace("\n", " ")


def test_budgets_let_whole_trees_through(sets: dict[str, str]) -> None:
    methods = {e.method.name: e.method for e in plans.ablation(TrainedSet.read(sets["lossless"])).entries}
    assert methods["tree"].settings["budget"] == 3 + 9
    assert methods["chain"].settings["budget"] == 2
    assert methods["best 8"].settings["budget"] == 8


@pytest.mark.parametrize(("k", "gamma", "expected"), [(3, 6, 4), (2, 6, 6), (1, 5, 5), (6, 3, 2)])
def test_full_trees_stay_small(sets: dict[str, str], k: int, gamma: int, expected: int) -> None:
    trained = TrainedSet.read(sets["lossless"])
    assert trained.tree(k, gamma) == {"k": k, "gamma": expected}


def test_every_sweep_makes_methods_that_the_bench_takes(sets: dict[str, str]) -> None:
    trained = TrainedSet.read(sets["lossless"])
    for name in plans.SWEEPS:
        plan = plans.sweep_plan(name, trained, [])
        config = plan.bench_config(small())
        assert all(entry.method in config.methods for entry in plan.entries) and plan.x_label
        assert config.methods[0].plain and config.prompts >= plan.prompts
    assert plans.sweep_plan("batch", trained, []).bench_config(small()).batches == plans.SWEPT_BATCHES
    sampled = plans.sweep_plan("temperature", trained, []).bench_config(small())
    assert sampled.temperatures == (1.0,) and sampled.top_ks == plans.SWEPT_TOP_KS
    assert {m.dtype for m in plans.sweep_plan("int8", trained, []).bench_config(small()).methods} == {"auto", "int8"}


def test_sweeps_over_sets_go_by_their_layers(sets: dict[str, str]) -> None:
    several = plans.read_sets({"2": sets["deeper"], "1": sets["lossless"]})
    assert [trained.config.msa_layers for trained in several] == [1, 2]
    layers = plans.sweep_plan("layers", None, several)
    assert {entry.x for entry in layers.entries} == {1, 2}
    pruning = plans.sweep_plan("pruning-layer", None, several)
    assert {entry.x for entry in pruning.entries} == {trained.config.insertion for trained in several}


@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        (lambda s: plans.read_sets({"3": s["lossless"]}), "go through 1 layers"),
        (lambda s: plans.sweep_plan("layers", None, plans.read_sets({"2": s["deeper"]})), "1 sets"),
        (lambda s: plans.sweep_plan("gamma", None, []), "no trained set"),
        (lambda s: plans.sweep_plan("colour", None, []), "no such sweep"),
        (lambda s: plans.sweep_plan("threshold", TrainedSet.read(s["unpruned"]), []), "cannot prune"),
        (lambda s: TrainedSet.read(s["adapter"]), "adapters alone"),
    ],
)  # fmt: skip
def test_plans_that_cannot_be_are_refused(sets: dict[str, str], call: Any, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        call(sets)


# -- verdicts


def line(method: str, series: str, calls: float, upper: float, speed: float, task: str = made.ALL) -> made.Line:
    return made.Line(
        task=task,
        method=method,
        series=series,
        x=None,
        call_reduction=calls,
        accepted_length=calls,
        row_layers=2 * upper,
        upper_row_layers=upper,
        pruned=None,
        tokens_per_s=100 * speed,
        speedup=speed,
        speedup_low=speed - 0.1,
        speedup_high=speed + 0.1,
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
    found = {p.method: p for p in made.pruning(LINES)}
    assert set(found) == {"threshold 0.01", "threshold 0.1", "count 8"}
    assert found["threshold 0.01"].kept == pytest.approx(2.95 / 3) and found["threshold 0.01"].spent == 0.39
    assert [p.good for p in found.values()] == [True, False, False]


def test_verdicts_name_the_best_for_calls_and_for_speed() -> None:
    calls, fast, pruning = made.verdicts(LINES)
    assert calls == "all: highest call reduction: tree, 3.00"
    assert fast.startswith("all: fastest: threshold 0.01 at frontier, 2.40")
    assert "threshold 0.01 keeps 98.3% with 39.0%" in pruning and "no pruning" not in pruning
    bad = made.verdicts([entry for entry in LINES if not entry.method.startswith("threshold 0.01")])
    assert bad[-1].startswith("all: no pruning keeps") and "threshold 0.1 keeps 83.3% with 12.0%" in bad[-1]


def test_means_over_tasks_are_geometric(sets: dict[str, str]) -> None:
    truths = [
        Truth(method=Method(name="plain")),
        Truth(method=Method(name="chain", drafter="ngram"), accept=0.6, depth=3),
    ]
    report = World(truths=truths, workloads={"a": "A", "b": "B"}, groups=2, repeats=1).report()
    plan = replace(
        plans.ablation(TrainedSet.read(sets["lossless"])),
        entries=(plans.Entry(method=truths[1].method, series="chain"),),
    )
    lines = made.lines_of(plan, report)
    tasks = {ln.task: ln for ln in lines}
    assert set(tasks) == {"a", "b", made.ALL} and made.whole(lines) == [tasks[made.ALL]]
    each = [tasks[name].metric("call_reduction") for name in "ab"]
    assert tasks[made.ALL].metric("call_reduction") == pytest.approx(math.sqrt(each[0] * each[1]))


# -- parameters


def test_formulas_give_the_published_counts() -> None:
    published = streams_overhead.of_published()
    assert [f"{o.streams_formula:.1e}" for o in published] == ["8.2e+04", "6.1e+04", "8.2e+04"]
    assert [f"{o.medusa:.1e}" for o in published] == ["5.9e+08", "4.3e+08", "5.9e+08"]
    assert all(o.agrees for o in published)
    assert not replace(published[0], streams_published=8.3e4).agrees


def test_a_set_is_counted_by_its_own_tensors(sets: dict[str, str]) -> None:
    trained = StreamSet.load(sets["lossless"])
    found = streams_overhead.of_set(trained, MODEL)
    d = trained.config.d_model
    assert found.streams_counted == found.streams_formula == 2 * d + 2 * 4 * d and found.agrees
    assert found.medusa == 2 * (d * d + d + d * trained.config.vocab_size)
    assert found.adapters == sum(v.numel() for k, v in trained.tensors().items() if k.startswith("adapters"))
    assert not replace(found, streams_counted=1).agrees


# -- figures


def test_figures_are_the_same_file_from_the_same_values(tmp_path: Path) -> None:
    series = [Series(label="a", x=[1, 2], y=[1.0, math.nan], low=[0.5, math.nan], high=[1.5, math.nan])]
    panel = Panel(title="t", x_label="x", y_label="y", series=series, line_at=1.0)
    for draw in (figures.lines, figures.points, figures.bars):
        first, second = (draw([panel, panel], tmp_path / name) for name in ("a.svg", "b.svg"))  # type: ignore[operator]
        assert first.read_bytes() == second.read_bytes() and b"<svg" in first.read_bytes()


def test_without_matplotlib_figures_say_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CapabilityError, match=r"paceline\[bench\]"):
        figures.lines([], tmp_path / "a.svg")


# -- states


@pytest.mark.parametrize("name", ["lossless", "shared"])
def test_similarity_has_a_row_a_layer_and_a_column_a_stream(sets: dict[str, str], name: str, tmp_path: Path) -> None:
    trained = TrainedSet.read(sets[name])
    options = {"threads": 1, "dtype": "float32"}
    found = streams_similarity.measure(MODEL, trained, ["sql"], None, prompts=2, max_new_tokens=8, options=options)
    layers, gamma = trained.config.msa_layers, trained.config.gamma
    assert found.layers == [*range(trained.config.insertion, trained.config.num_layers + 1)]
    for rows in (found.streams, found.main):
        assert len(rows) == layers + 1 and all(len(row) == gamma for row in rows)
        assert all(-1 <= value <= 1 for row in rows for value in row)
    assert 0 < found.rows <= 2 * 8
    # Streams start as the main state and a small embedding: at first both are about as far from what comes later.
    assert found.streams[0] == pytest.approx(found.main[0], abs=0.1)
    assert streams_similarity.plot(found, tmp_path / "s.svg").is_file()


# -- applications


def test_pairs_are_what_they_are_taken_for(sets: dict[str, str]) -> None:
    pair = applications.Pair.read("sql", sets["adapter"], sets["shared"])
    names = [method.name for method in pair.methods()]
    assert names[0] == applications.BASELINE and "streams, plain" in names and "adapter, ngram" in names
    with pytest.raises(ConfigError, match="no task"):
        applications.Pair.read("poetry", sets["adapter"], sets["shared"])
    for wrong in (("shared", "shared"), ("adapter", "adapter"), ("adapter", "lossless")):
        with pytest.raises(ConfigError, match="set with"):
            applications.Pair.read("sql", *(sets[name] for name in wrong))


# -- on the command line


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs ``paceline bench ARGS`` in this process: wide lines, no colours."""
    monkeypatch.setenv("COLUMNS", "220")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    return lambda *args: CliRunner().invoke(app, ["bench", *map(str, args)])


SMALL = ("--model", MODEL, "--prompts", 1, "--repeats", 1, "--max-new-tokens", 6, "--threads", 1)


def test_a_sweep_writes_tables_and_figures(run: Any, sets: dict[str, str], tmp_path: Path) -> None:
    result = run("streams", "--set", sets["lossless"], "--sweep", "gamma", "--tasks", "sql", "--out", tmp_path, *SMALL)
    assert result.exit_code == 0, result.output
    values = json.loads((tmp_path / "gamma.json").read_text())
    assert {(ln["series"], ln["x"]) for ln in values["lines"]} == {
        (series, gamma) for series in ("chain", f"best {plans.CUT} nodes") for gamma in (1, 2)
    }
    assert all(ln["exact"] == "yes" and ln["row_layers"] for ln in values["lines"])
    assert (tmp_path / "gamma.svg").is_file() and "ids equal plain" in (tmp_path / "gamma.md").read_text()
    assert load_report(tmp_path / "gamma").methods[0].plain
    again = run("streams", "--set", sets["lossless"], "--sweep", "gamma", "--tasks", "sql", "--out", tmp_path, *SMALL)
    assert again.exit_code and "--overwrite" in again.output + again.stderr


def test_the_ablation_of_a_shared_set_runs(
    run: Any, sets: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "THRESHOLDS", (0.01,))
    monkeypatch.setattr(plans, "COUNTS", (4,))
    result = run("streams", "--set", sets["shared"], "--tasks", "sql", "--out", tmp_path, *SMALL)
    assert result.exit_code == 0, result.output
    values = json.loads((tmp_path / "ablation.json").read_text())
    assert {ln["method"] for ln in values["lines"]} == {
        "chain",
        "tree",
        "threshold 0.01",
        "count 4",
        "best 4",
        "auto budget",
    }
    assert all(ln["exact"] == "yes" and not ln["error"] for ln in values["lines"])
    assert len(values["pruning"]) == 2 and values["verdicts"]
    assert (tmp_path / "ablation.svg").is_file() and (tmp_path / "ablation-pruning.svg").is_file()


def test_applications_are_compared_in_one_table(run: Any, sets: dict[str, str], tmp_path: Path) -> None:
    pair = ("--adapter", f"sql={sets['adapter']}", "--streams", f"sql={sets['shared']}")
    result = run("applications", *pair, "--scored", 2, "--out", tmp_path, *SMALL)
    assert result.exit_code == 0, result.output
    lines = {ln["method"]: ln for ln in json.loads((tmp_path / "applications.json").read_text())["lines"]}
    assert lines["adapter"]["speedup"] is None and lines["streams, chain"]["speedup"]["pairs"] == 1
    trained = StreamSet.load(sets["shared"]).parameters_by_part()
    assert lines["streams, chain"]["extra_parameters"] == trained["embeddings"] + trained["prune"]
    assert lines["adapter, ngram"]["extra_parameters"] == 0
    assert {"exact_match"} <= lines["adapter"]["scores"].keys()
    assert lines["streams, best 8"]["exact"] == lines["adapter, ngram"]["exact"] == "yes"
    assert "sql" in (tmp_path / "applications.md").read_text()


def test_overhead_and_similarity_have_commands(run: Any, sets: dict[str, str], tmp_path: Path) -> None:
    result = run("overhead", "--set", sets["lossless"], "--out", tmp_path / "overhead.json")
    assert result.exit_code == 0 and "81,920" in result.stdout
    assert all(row["agrees"] for row in json.loads((tmp_path / "overhead.json").read_text())["overhead"])
    options = ("--model", MODEL, "--tasks", "sql", "--prompts", 1, "--max-new-tokens", 4, "--threads", 1)
    result = run("similarity", "--set", sets["lossless"], "--out", tmp_path, *options)
    assert result.exit_code == 0 and (tmp_path / "similarity.svg").is_file()


def test_the_bench_takes_applications(run: Any, sets: dict[str, str], tmp_path: Path) -> None:
    method = ("--method", "a=ngram;application=mine", "--application", f"mine={sets['adapter']}")
    result = run(*method, "--workload", "wikisql", "--out", tmp_path, *SMALL)
    assert result.exit_code == 0, result.output
    report = load_report(tmp_path)
    assert [(m.name, m.application, m.plain) for m in report.methods] == [("plain", "mine", True), ("a", "mine", False)]
    assert report.exactness[0].passed and "application mine" in (tmp_path / "report.md").read_text()
    unnamed = run(*method[:2], "--workload", "wikisql", *SMALL)
    assert unnamed.exit_code and "no folder is given" in unnamed.output + unnamed.stderr


@pytest.mark.parametrize(
    ("args", "wrong"),
    [
        (("streams",), "no trained set"),
        (("streams", "--sets", "1=x=y", "--sweep", "layers"), "x=y"),
        (("streams", "--sets", "nonsense"), "not a name and a folder"),
        (("streams", "--set", "LOSSLESS", "--tasks", "sql,sql"), "one twice"),
        (("streams", "--set", "LOSSLESS", "--sweep", "all", "--sweep", "k"), "Name it alone"),
        (("streams", "--set", "LOSSLESS", "--sets", "1=LOSSLESS"), "of one set"),
        (("applications", "--adapter", "sql=ADAPTER", "--streams", "e2e=SHARED"), "only one of its two sets"),
    ],
)
def test_mistakes_end_in_one_line(
    run: Any, sets: dict[str, str], tmp_path: Path, args: tuple[str, ...], wrong: str
) -> None:
    filled = [
        arg.replace("LOSSLESS", sets["lossless"]).replace("ADAPTER", sets["adapter"]).replace("SHARED", sets["shared"])
        for arg in args
    ]
    result = run(*filled, "--out", tmp_path)
    assert result.exit_code and wrong in result.output + result.stderr
    assert "Traceback" not in result.output
