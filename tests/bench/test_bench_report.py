"""The report's views: what they say is what the summary says, whatever the names are."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest
from kits.reports import TRUTHS, Truth, World, differ, fail
from rich.console import Console

from paceline.bench import report as say
from paceline.bench.records import Method, Report
from paceline.bench.report import load_report, page, write_text
from paceline.bench.summary import Summary

EVIL = '<img src="http://evil.example/x" onerror=alert(1)> | `*_[x](y) & "quotes"'
VOID = {"meta", "link", "br", "img", "input", "hr", "wbr"}


class Page(HTMLParser):
    """What a page holds, and whether its tags are balanced."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.feed(text)
        self.close()
        assert self.open == [], "tags that are never closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self.tables and {"td", "th"} & set(self.open[-3:]):
            self.tables[-1][-1][-1] += data

    def table(self, *head: str) -> dict[str, list[str]]:
        """Rows by their first cells of the table whose head begins so."""
        found = next(t for t in self.tables if t[0][: len(head)] == list(head))
        return {" / ".join(row[: len(head) - 1]): row for row in found[1:]}


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
        console.print(say.render(Summary(report)))
    return capture.get()


@cache
def rendered(case: str) -> str:
    """The page of one of `CASES`."""
    return page(Summary(made(case)))


@pytest.mark.parametrize("case", CASES)
def test_page_is_whole_and_loads_nothing(case: str) -> None:
    found = Page(text := rendered(case))
    for tag, attrs in found.tags:
        assert tag not in ("img", "iframe", "object", "embed", "base", "form", "script")
        for name in ("src", "srcset", "action", "data", "poster", "background"):
            assert name not in attrs
        assert attrs.get("xlink:href", "#")[:1] == "#"  # a mark that is drawn again and again
        assert not any(name.startswith("on") for name in attrs)
        if "href" in attrs:
            assert attrs["href"] in ("report.json", "data:,")
    sheet = re.findall(r"<style>(.*?)</style>", text, re.S)
    assert len(sheet) == 1 and "url(" not in sheet[0] and "@import" not in sheet[0]
    assert [a["content"] for t, a in found.tags if t == "meta" and a.get("name") == "viewport"]


def test_json_comes_back(report: Report, tmp_path: Path) -> None:
    path = write_text(tmp_path / "r.json", report.as_json())
    assert load_report(path).as_json() == report.as_json()
    assert write_text(tmp_path / "again.json", load_report(path).as_json()).read_text() == path.read_text()


def test_every_view_says_what_the_summary_says() -> None:
    report = World().report()
    summary = Summary(report)
    section = summary.sections[0]
    total, *each = Page(page(summary)).tables
    console = on_terminal(report)
    for row, cells in zip(summary.total(section), total[1:], strict=True):
        expected = [say.number(row.speed), say.COLUMNS["speed-up"](row), say.length(row.figures["accepted_length"])]
        assert cells[:4] == [row.method.name, *expected]
        assert re.search(re.escape(row.method.name) + r".* +" + " +".join(map(re.escape, expected)), console)
    own = [row for row in summary.of(section) if row.workload == "books"]
    [shown] = [cells for cells, row in zip(each[-1][1:], own, strict=True) if row.method.name == "hybrid"]
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
    assert row.speedup is not None
    line = say.headline(summary)
    assert line.startswith(f"Best method: hybrid, {row.speedup.value:.2f}× plain decoding over 5 workloads")
    assert f"{row.speedup.low:.2f} to {row.speedup.high:.2f}" in line
    for text in (page(Summary(report)), " ".join(on_terminal(report).split())):
        assert line in text


def test_trouble_is_told_in_every_view() -> None:
    report = troubled()
    flat = " ".join(on_terminal(report, 200).split())
    for text in (flat, " ".join(Page(page(Summary(report))).words)):
        assert "vllm did not run: not built" in text
        assert "1 of 6 trials failed: RuntimeError: pool is full" in text
        where = "draft_model depth=4, wikisql, batch 1, greedy, EOS ignored"
        assert f"{where}: 1 sequence of 3 failed; first: wikisql-3 another" in text
        assert "position 17" in text and "1 FAILED" in text
        assert "ngram" in text and re.search(r"Slower than plain decoding: (\d+|none) of \d+ rows", text)
        assert "the machine was busy" in text
