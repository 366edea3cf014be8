"""The report's views: what they say is what the summary says, whatever the names are."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from kits.reports import TRUTHS, Truth, World, differ, fail
from rich.console import Console
from rich.markdown import Markdown

from paceline.bench import report as say
from paceline.bench.records import REPORT, Method, Report
from paceline.bench.report import page, write_text
from paceline.bench.summary import Summary

EVIL = '<img src="http://evil.example/x" onerror=alert(1)> | `*_[x](y) & "quotes"'


def cells(text: str) -> list[list[list[str]]]:
    """Return the tables of a page: of each its rows, of each its cells."""
    tables: list[list[list[str]]] = []
    for block in text.split("\n\n"):
        if block.startswith("|"):
            rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in block.splitlines()]
            tables.append([[cell.strip() for cell in row] for row in rows])
    return tables


def troubled() -> Report:
    """A report with everything that can be shown."""
    report = World(batches=(1, 32), temperatures=(0.0, 1.0), groups=3, repeats=2).report()
    fail(report, "ngram", "gsm8k", "RuntimeError: pool is full")
    differ(report, "draft_model depth=4", "wikisql")
    report.notes.append("the machine was busy")
    return report


def evil() -> Report:
    """A report in which every name is out to break something."""
    truths = [TRUTHS[0], Truth(method=Method(name=EVIL, drafter=EVIL, settings={EVIL: EVIL}), accept=0.5, depth=3)]
    report = World(truths=truths, workloads={EVIL: EVIL, "b": "B"}, batches=(1, 4), groups=2).report()
    report.title, report.commit, report.command = EVIL, EVIL, ["paceline", EVIL, "```"]
    report.machine["processor"] = report.model["name"] = report.versions[EVIL] = report.settings[EVIL] = EVIL
    report.unavailable, report.notes = {EVIL: EVIL}, [EVIL]
    fail(report, EVIL, "b", EVIL)
    report.exactness[0].failures = [{"prompt": EVIL, "what": EVIL}]
    return report


CASES = {
    "many": troubled,
    "evil names": evil,
    "no plain": lambda: World(truths=TRUTHS[1:4]).report(),
    "nothing": lambda: World(workloads={}).report(),
    "all failed": lambda: all_failed(),
    "bare": lambda: bare(),
}


def all_failed() -> Report:
    report = World(groups=1, repeats=1).report()
    report.trials = [replace(t, error="no luck", outputs=[], finish=[], ttft_ms=[]) for t in report.trials]
    return report


def bare() -> Report:
    report = World(groups=1).report()
    return replace(
        report, model={}, machine={}, versions={}, commit=None, settings={}, workloads={}, exactness=[], unavailable={}
    )


@cache
def made(case: str) -> Report:
    """One of `CASES`, which no view may change."""
    return CASES[case]()


@pytest.fixture(params=CASES, ids=str)
def report(request: pytest.FixtureRequest) -> Report:
    return made(request.param)


def on_terminal(report: Report, width: int = 80) -> str:
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(Markdown(say.figures_page(Summary(report))))
    return capture.get()


@pytest.mark.parametrize("case", CASES)
def test_tables_are_whole_and_names_are_text(case: str) -> None:
    text = page(Summary(made(case)))
    for table in cells(text):
        assert {len(row) for row in table} == {8}
    assert not re.search(r"(?<!\\)<img", text.partition("To repeat it:")[0])


def test_json_comes_back(report: Report, tmp_path: Path) -> None:
    path = write_text(tmp_path / "r.json", report.as_json())
    assert REPORT.validate_json(path.read_bytes()).as_json() == report.as_json()


def test_the_page_says_what_the_summary_says() -> None:
    report = World().report()
    summary = Summary(report)
    section = summary.sections[0]
    total, *each = cells(page(summary))
    console = on_terminal(report, 160)
    for row, found in zip(summary.total(section), total[2:], strict=True):
        expected = [say.number(row.speed), say.COLUMNS["speed-up"](row), say.length(row.figures["accepted_length"])]
        assert found[0].replace("\\", "") == row.method.name and found[1:4] == expected
        assert re.search(re.escape(row.method.name) + r".* +" + " +".join(map(re.escape, expected)), console)
    own = [row for row in summary.of(section) if row.workload == "books"]
    [shown] = [found for found in each[-1] if found[0] == "hybrid"]
    [row] = [row for row in own if row.method.name == "hybrid"]
    assert row.speedup is not None and shown == [
        "hybrid",
        say.number(row.speed),
        say.interval(row.speedup),
        say.length(row.figures["accepted_length"]),
        say.number(row.figures["ttft_ms"]),
        say.number(row.figures["wait_p90_ms"]),
        say.share(row.figures["floor_share"]),
        "yes",
    ]


def test_the_headline_names_the_best_method_with_its_interval() -> None:
    report = World().report()
    summary = Summary(report)
    row = next(r for r in summary.overall if r.method.name == "hybrid")
    line = say.headline(summary)
    assert line.startswith(f"Best method: hybrid, {say.interval(row.speedup)} times plain decoding over 5 workloads")
    assert line in " ".join(on_terminal(report).split()) and say.text(line) in page(summary)


def test_trouble_is_told() -> None:
    report = troubled()
    flat = " ".join(on_terminal(report, 200).split())
    for words in (
        "vllm did not run: not built",
        "1 of 6 trials failed: RuntimeError: pool is full",
        "draft_model depth=4, wikisql, batch 1, greedy, EOS ignored: 1 sequence of 3 failed; first: wikisql-3 another",
        "position 17",
        "1 FAILED",
        "the machine was busy",
    ):
        assert words in flat
