"""The frame of studies: what is asked, what is run, what is written, and how it ends."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import transformers  # noqa: F401  (first loaded in a run, its log would go to a stream that is closed afterwards)
from kit import study
from kit.grid import ALL
from kit.study import Entry, Grid, Options, Study, Table, asked
from kits.reports import Truth, World, differ

from paceline.bench.methods import parse_method
from paceline.bench.records import Method, Report
from paceline.bench.report import load_report
from paceline.core.errors import CapabilityError

pytestmark = pytest.mark.timeout(120)
SMALL = ("--model", "paceline-small-draft", "--prompts", 1, "--repeats", 1, "--max-new-tokens", 6, "--threads", 1)


@dataclass(frozen=True, kw_only=True)
class Asked(Options):
    """With questions of its own."""

    depth: int = asked(2, "Most tokens drafted.", "N")
    sets: dict[str, str] = asked({}, "Trained sets.", "NAME=FOLDER")
    files: list[str] = asked([], "Texts.", "FILE")


def ngram_grid(title: str = "Look-ups") -> Grid:
    methods = {depth: parse_method(f"ngram {depth}=ngram,depth={depth};budget={depth}") for depth in (2, 4)}
    return Grid(title=title, entries=[Entry(m, "ngram", d) for d, m in methods.items()], x_label="depth")


def example(seen: list[Any] | None = None) -> Study:
    """A grid, a grid that needs sets, and a table."""
    made = Study("An example.", Asked, quick={"prompts": 1, "depth": 3})

    @made.figure(repeats=5, quick={"repeats": 1})
    def figure_1(ask: Asked) -> Grid:
        """Depths of look-ups.

        More of it.
        """
        if seen is not None:
            seen.append(ask)
        return ngram_grid()

    @made.figure(needs=("sets",), takes=("depth",))
    def figure_2(ask: Asked) -> Grid:
        """Depths of sets."""
        return ngram_grid(str(ask.sets))

    @made.table(takes=("files",))
    def table_1(ask: Asked) -> Iterator[Table | None]:
        """What was asked."""
        if ask.files == ["unfit"]:
            raise CapabilityError("table_1", "this file does not fit", "give another")
        yield None
        yield Table(title="Asked [all]", head=("a", "b"), parts={"": [["x|y", "[1, 2]"]]}, values={"seed": ask.seed})

    return made


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "argv", ["studies/example.py"])
    return lambda *given, of=None: (of or example()).run([*map(str, given)])


# -- what is run and written


def test_a_grid_is_run_and_written(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("figure_1", "table_1", "--tasks", "sql,gsm8k", *SMALL, "--out", tmp_path)
    assert run(*given) == 0
    values = json.loads((tmp_path / "figure_1.json").read_text())
    assert {(line["task"], line["method"], line["x"]) for line in values["lines"]} == {
        (task, f"ngram {depth}", depth) for task in ("wikisql", "gsm8k", ALL) for depth in (2, 4)
    }
    assert all(line["exact"] == "yes" and line["call_reduction"] >= 1 for line in values["lines"])
    assert values["command"] == ["python", "studies/example.py", *map(str, given)]
    page, said = (tmp_path / "figure_1.md").read_text(), capsys.readouterr()
    assert "## All tasks (geometric means)" in page and "## WikiSQL" in page and "ids equal plain" in page
    assert "python studies/example.py figure_1" in page and "ngram 4: paceline, ngram,depth=4" in page
    assert "Look-ups" in said.out and "speed-up over plain" in said.out and str(tmp_path / "figure_1.svg") in said.out
    assert load_report(tmp_path / "figure_1").methods[0].plain
    assert json.loads((tmp_path / "table_1.json").read_text())["seed"] == 0
    assert r"| x\|y | [1, 2] |" in (tmp_path / "table_1.md").read_text() and "[1, 2]" in said.out
    assert run(*given) == study.WRONG and "--overwrite" in capsys.readouterr().err
    assert run(*given, "--overwrite") == 0
    assert "--overwrite" not in json.loads((tmp_path / "figure_1.json").read_text())["command"]


def made_up(grid: Grid) -> Report:
    methods = [Method(name="plain"), *(entry.method for entry in grid.entries)]
    truths = [Truth(method=method, accept=0.5 * bool(place), depth=2) for place, method in enumerate(methods)]
    return World(truths=truths, workloads={"a": "A"}, groups=2, repeats=1).report()


def test_ids_that_differ_are_a_failure(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(grid: Grid, options: Options, folder: Path) -> Report:
        report = made_up(grid)
        differ(report, "ngram 4", "a")
        return report

    monkeypatch.setattr(study, "measure", measured)
    assert run("figure_1", "--out", tmp_path) == study.DIFFERENT
    lines = json.loads((tmp_path / "figure_1.json").read_text())["lines"]
    assert [line["exact"] for line in lines] == ["yes", "NO"]
