"""The frame of studies: what is asked, what is run, what is written, and how it ends."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import transformers  # noqa: F401  (first loaded in a run, its log would go to a stream that is closed afterwards)
from kit import figures, grid, study
from kit.figures import Panel, Series
from kit.grid import ALL, apart, lines_of, table_of, whole
from kit.study import Entry, Grid, GridLine, Options, Study, Table, asked
from kits.reports import Truth, World, differ

from paceline.bench.methods import parse_method
from paceline.bench.records import Method, Report
from paceline.bench.report import load_report
from paceline.core.errors import CapabilityError, ConfigError

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "extending.md"
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


# -- what is asked


def test_help_lists_what_there_is_and_what_it_needs(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run("--help")
    said = capsys.readouterr().out
    assert not end.value.code
    for line in (
        "figure_1 +Depths of look-ups.$",
        r"figure_2 +Depths of sets. \[--sets\]$",
        "table_1 +What was asked.$",
    ):
        assert re.search(line, said, re.MULTILINE), line
    for flag in ("--model", "--data", "--tasks", "--prompts", "--repeats", "--max-new-tokens", "--dtype", "--threads"):
        assert flag in said
    assert all(flag in said for flag in ("--seed", "--overwrite", "--quick", "--depth", "--sets NAME=FOLDER"))


def test_a_figure_has_defaults_of_its_own_and_the_user_the_last_word(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for: list[Asked] = []
    monkeypatch.setattr(study, "measure", lambda grid, options, folder: World(groups=1, repeats=1).report())
    monkeypatch.setattr(Study, "_finish", lambda *_: True)
    of = example(asked_for)
    assert run("figure_1", "--out", "x", of=of) == 0
    assert run("figure_1", "--out", "x", "--quick", of=of) == 0
    assert run("figure_1", "--out", "x", "--quick", "--repeats", 7, "--data", "here", of=of) == 0
    assert [(a.prompts, a.repeats, a.depth) for a in asked_for] == [(4, 5, 2), (1, 1, 3), (1, 7, 3)]
    assert asked_for[-1].data == Path("here")
    assert asked_for[-1].command[:3] == ("python", "studies/example.py", "figure_1")


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        (("figure_1",), "no folder is named"),
        (("figure_3", "--out", "x"), "there is none of that name"),
        (("figure_2", "--out", "x"), "--sets is not given"),
        (("figure_2", "--sets", "a", "--out", "x"), "not a name and a value"),
        (("figure_2", "--sets", "a=b", "--sets", "a=c", "--out", "x"), "there twice"),
        (("figure_1", "--depth", "3", "--out", "x"), "means nothing to figure_1"),
        (("figure_1", "--prompts", "many", "--out", "x"), "invalid int value"),
        (("figure_1", "--prompts", "0", "--out", "x"), "prompts must be 1 or more"),
        (("figure_1", "--colour", "red", "--out", "x"), "--colour"),
        (("figure_1", "--tasks", "sql,sql", "--out", "x"), "one twice"),
        (("table_1", "--files", "unfit", "--out", "x"), "does not fit"),
    ],
)
def test_mistakes_end_in_one_line(
    run: Any,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: Any,
    wrong: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*given) == study.WRONG
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and wrong in said.err and len(said.err.splitlines()) == 1
    assert not said.out and not [*tmp_path.iterdir()]


def test_a_mistake_in_the_last_is_found_before_the_first_runs(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "measure", lambda *_: pytest.fail("something ran"))
    assert run("figure_1", "table_1", "--files", "unfit", "--out", "x") == study.WRONG


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


def test_a_stretched_target_is_in_every_title(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["figure_1", "table_1", *SMALL, "--out", tmp_path]
    given[given.index("paceline-small-draft")] = "stretch:paceline-small-draft,times=2"
    assert run(*given) == 0
    label = "paceline-small-draft, stretched 2x"
    for name in ("figure_1", "table_1"):
        values = json.loads((tmp_path / f"{name}.json").read_text())
        assert values["title"].endswith(f"({label})") and (values["target"], values["stretched"]) == (label, 2)
        assert (tmp_path / f"{name}.md").read_text().splitlines()[0].endswith(f"({label})")
    assert load_report(tmp_path / "figure_1").model["name"] == label and label in capsys.readouterr().out
    assert run("table_1", "--model", "stretch:x,times=1", "--out", tmp_path) == study.WRONG


def test_ctrl_c_keeps_what_was_measured(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(text: str, trials: tuple[int, int] | None) -> None:
        if trials and trials[0] == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(grid, "log_lines", lambda *_: stop)
    assert run("figure_1", *SMALL, "--out", tmp_path) == study.INTERRUPTED
    assert "interrupted" in capsys.readouterr().err and not (tmp_path / "figure_1.json").exists()
    kept = load_report(tmp_path / "figure_1")
    assert kept.interrupted and len(kept.trials) == 2


def test_all_that_can_be_made_is_made_where_nothing_is_named(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def measured(grid: Grid, options: Options, folder: Path) -> Report:
        ran.append(folder.name)
        return made_up(grid)

    monkeypatch.setattr(study, "measure", measured)
    assert run("--out", tmp_path) == 0
    assert ran == ["figure_1"] and (tmp_path / "table_1.json").is_file()
    assert "left out: figure_2: --sets is not given" in capsys.readouterr().err
    assert run("--out", tmp_path, "--sets", "a=b", "--files", "unfit") == 0
    assert ran == ["figure_1"] * 2 + ["figure_2"] and "left out: table_1" in capsys.readouterr().err


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


def test_without_matplotlib_figures_are_refused_and_tables_made(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run("figure_1", "--out", tmp_path) == study.WRONG
    assert "paceline[bench]" in capsys.readouterr().err
    assert run("--out", tmp_path) == 0 and (tmp_path / "table_1.md").is_file()


# -- from a report to lines


def chain_grid(**more: Any) -> tuple[Grid, Report]:
    method = Method(name="chain", drafter="ngram")
    truths = [Truth(method=Method(name="plain")), Truth(method=method, accept=0.6, depth=3)]
    report = World(truths=truths, workloads={"a": "A", "b": "B"}, groups=2, repeats=1).report()
    return Grid(title="t", entries=[Entry(method, "chain", 1)], **more), report


def test_means_over_tasks_are_geometric() -> None:
    lines = lines_of(*chain_grid())
    tasks = {line.task: line for line in lines}
    assert set(tasks) == {"a", "b", ALL} and whole(lines) == [tasks[ALL]]
    each = [tasks[name].metric("call_reduction") for name in "ab"]
    assert tasks[ALL].metric("call_reduction") == pytest.approx(math.sqrt(each[0] * each[1]))


def test_speed_ups_may_be_over_another_method() -> None:
    made, report = chain_grid(over="chain")
    made = replace(made, entries=[*made.entries, Entry(report.methods[0], "plain", 0)])
    lines = {(line.task, line.method): line for line in lines_of(made, report)}
    plain = lines_of(*chain_grid())
    assert lines["a", "chain"].speedup is None
    assert lines["a", "plain"].metric("speedup") == pytest.approx(1 / plain[0].metric("speedup"))
    assert lines["a", "plain"].metric("speedup_low") < 1 < lines["a", "chain"].metric("call_reduction")


def test_a_grid_has_the_last_word_on_its_table() -> None:
    def finish(table: Table, lines: Sequence[GridLine], choosing: Sequence[GridLine]) -> Table:
        return replace(table, remarks=[f"{len(lines)} lines", *choosing])

    made = table_of(*chain_grid(finish=finish, facts=["a fact"]))
    page = made.markdown(["python", "x y"])
    assert "- 3 lines\n" in page and "- a fact\n" in page and "python 'x y'" in page
    assert not made.plots  # nothing is swept


def test_a_single_pair_has_no_interval() -> None:
    line = lines_of(*chain_grid())[0]
    assert re.fullmatch(r"\d\.\d\d \[\d\.\d\d, \d\.\d\d\]", line.bracketed)
    assert replace(line, pairs=1).bracketed.endswith("[1 pair]")
    assert replace(line, speedup=None).bracketed == "–"


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


# -- processes of their own


def refuse(what: str) -> None:
    raise ConfigError(what, "it cannot be", "leave it")


def test_a_function_may_run_in_a_process_of_its_own() -> None:
    assert apart(os.getpid) != os.getpid()
    with pytest.raises(ConfigError, match="this: it cannot be"):
        apart(refuse, "this")
    with pytest.raises(ConfigError, match="its process died"):
        apart(os._exit, 3)


# -- the page


def test_the_page_makes_a_table(tmp_path: Path) -> None:
    """Followed word by word: the file it shows, then the command it shows."""
    page = PAGE.read_text(encoding="utf-8")
    name, code = re.findall(r"`studies/(\w+\.py)`:\n\n```python\n(.*?)```", page, re.DOTALL)[0]
    command = re.findall(r"```sh\n(python studies/.*?)\n", page)[0].split()
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies" / "kit").symlink_to(ROOT / "studies" / "kit")
    (tmp_path / "studies" / name).write_text(code, encoding="utf-8")
    assert command[1] == f"studies/{name}" and command[-2] == "--out"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, *command[1:]], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path / command[-1]
    assert "speed-up over plain" in done.stdout
    made = {file.name for file in folder.iterdir() if file.is_file()}
    assert made == {f"{figure}.{kind}" for figure in ("figure_1", "table_1") for kind in ("json", "md", "svg")} - {
        "table_1.svg"
    }
