"""A study in which ids differ fails; that studies run and write is tested with each of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import transformers  # noqa: F401  (first loaded in a run, its log would go to a stream that is closed afterwards)
from kit import study
from kit.study import Entry, Grid, Options, Study
from kits.reports import Truth, World, differ

from paceline.bench.methods import parse_method
from paceline.bench.records import Method, Report

pytestmark = pytest.mark.timeout(120)


def example() -> Study:
    made = Study("An example.", Options)

    @made.figure()
    def figure_1(ask: Options) -> Grid:
        """Depths of look-ups."""
        methods = {depth: parse_method(f"ngram {depth}=ngram,depth={depth};budget={depth}") for depth in (2, 4)}
        entries = [Entry(m, "ngram", d) for d, m in methods.items()]
        return Grid(title="Look-ups", entries=entries, x_label="depth")

    return made


def made_up(grid: Grid) -> Report:
    methods = [Method(name="plain"), *(entry.method for entry in grid.entries)]
    truths = [Truth(method=method, accept=0.5 * bool(place), depth=2) for place, method in enumerate(methods)]
    return World(truths=truths, workloads={"a": "A"}, groups=2, repeats=1).report()


def test_ids_that_differ_are_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(grid: Grid, options: Options, folder: Path) -> Report:
        report = made_up(grid)
        differ(report, "ngram 4", "a")
        return report

    monkeypatch.setattr(study, "measure", measured)
    monkeypatch.setattr(sys, "argv", ["studies/example.py"])
    assert example().run(["figure_1", "--out", str(tmp_path)]) == study.DIFFERENT
    lines = json.loads((tmp_path / "figure_1.json").read_text())["lines"]
    assert [line["exact"] for line in lines] == ["yes", "NO"]
