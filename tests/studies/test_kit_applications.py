"""Applications in a benchmark, and what streams are counted by: the yardstick, row-layers, call reduction."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from kit.applications import with_plain
from kit.grid import Entry, Grid, lines_of
from kits.reports import World
from kits.stream_sets import MODEL, save_all

from paceline.bench.methods import parse_method
from paceline.bench.records import Cell, Method, Trial
from paceline.bench.run import BenchConfig, Run
from paceline.bench.summary import Summary
from paceline.core.errors import ConfigError

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return save_all(tmp_path_factory.mktemp("sets"))


def small(**changes: Any) -> dict[str, Any]:
    values = {
        "model": MODEL,
        "workloads": ("wikisql",),
        "prompts": 1,
        "repeats": 1,
        "max_new_tokens": 6,
        "threads": 1,
    }
    return values | changes


# -- counts in trials


def test_reports_of_older_versions_are_read() -> None:
    report = World(groups=1, repeats=1).report()
    values = json.loads(report.as_json())
    for trial in values["trials"]:
        for name in ("row_layers", "upper_row_layers", "pruned", "stream_drafts", "rode"):
            del trial[name]
        del trial["cell"]["top_k"]
    for method in values["methods"]:
        del method["application"]
    again = type(report).from_dict(values)
    assert again.as_json() == report.as_json()


def test_call_reduction_is_tokens_a_pass_and_row_layers_are_a_pass() -> None:
    cell = Cell(workload="w")
    counts = {"passes": 5, "row_layers": 200, "upper_row_layers": 50, "pruned": 10, "stream_drafts": 4, "rode": 1}
    base = {"cell": cell, "group": 0, "repeat": 0, "prompts": ["p"], "prompt_tokens": [3], "finish": ["stop"]}
    base |= {"wall_ms": 1.0, "ttft_ms": [1.0]}
    trials = [
        Trial(method="plain", outputs=[list(range(12))], passes=12, row_layers=144, **base),
        Trial(method="streams", outputs=[list(range(12))], **counts, **base),
    ]
    report = World(groups=1, repeats=1).report()
    report.methods, report.trials = [Method(name="plain"), Method(name="streams", drafter="streams:x")], trials
    report.exactness = []
    grid = Grid(title="", entries=[Entry(method, method.name) for method in report.methods])
    plain, streams = lines_of(grid, report)
    assert (streams.call_reduction, plain.call_reduction) == pytest.approx((12 / 5, 1))
    assert (streams.row_layers, streams.upper_row_layers, streams.pruned) == pytest.approx((40, 10, 2))
    assert (plain.row_layers, plain.upper_row_layers, plain.pruned) == (pytest.approx(12), None, None)


# -- the yardstick of an application


def test_an_application_is_held_against_its_own_plain_decoding(sets: dict[str, str]) -> None:
    methods = [
        parse_method("ngram"),
        replace(parse_method("a=ngram"), application="adapter"),
        replace(parse_method("s=streams,k=2;budget=4"), application="shared"),
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
    index = Summary(report)
    assert [index.reference(m) for m in methods] == [base.name, adapter.name, shared.name]


def test_an_application_of_no_folder_is_refused(sets: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="no folder is given"):
        with_plain([replace(parse_method("ngram"), application="sql")], {})


def test_methods_that_make_an_application_answer_differently_are_refused(sets: dict[str, str]) -> None:
    texts = ["a=streams", "b=streams,at=nodes,attention_limit=4;kernels=torch"]
    with pytest.raises(ConfigError, match="attention_limit"):
        with_plain([replace(parse_method(text), application="shared") for text in texts], sets)


def test_a_run_gives_applications_their_own_ids_and_compares_within_them(sets: dict[str, str]) -> None:
    folders = {name: sets[name] for name in ("adapter", "shared")}
    texts = {"ngram": None, "a=ngram": "adapter", "s=streams,k=2;budget=3": "shared"}
    methods = with_plain([replace(parse_method(text), application=own) for text, own in texts.items()], folders)
    report = Run(BenchConfig(methods=tuple(methods), applications=folders, **small())).execute()
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
