"""The report's views: what they say is what the summary says, whatever the names are."""

from __future__ import annotations

import gzip
import http.server
import json
import math
import os
import re
import shutil
import stat
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from html.parser import HTMLParser
from pathlib import Path

import pytest
from kits.reports import TRUTHS, Truth, World, differ, fail
from matplotlib.figure import Figure
from rich.console import Console

from paceline.bench import figures
from paceline.bench import report as say
from paceline.bench.records import Method, Report
from paceline.bench.report import load_report, page, write_report, write_text
from paceline.bench.summary import Summary
from paceline.core.errors import ConfigError

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
    "one cell": lambda: World(workloads={"gsm8k": "GSM8K"}).report(),
    "many": troubled,
    "evil names": evil,
    "plain alone": lambda: World(truths=TRUTHS[:1]).report(),
    "peers alone": lambda: World(truths=TRUTHS[4:]).report(),
    "no plain": lambda: World(truths=TRUTHS[1:4]).report(),
    "one pair": lambda: World(groups=1, repeats=1).report(),
    "no bandwidth": lambda: World(bandwidth=None).report(),
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


# -- every view of every report


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


@pytest.mark.parametrize("case", CASES)
def test_no_plot_has_a_place_outside_of_it(case: str) -> None:
    """Every mark lies within its picture, every figure is a number."""
    text = rendered(case)
    assert not re.search(r"""["'> ](nan|-?inf)\b""", text, re.I)
    for width, height, plot in re.findall(r'<svg[^>]*viewBox="0 0 ([0-9.]+) ([0-9.]+)"[^>]*>(.*?)</svg>', text, re.S):
        for x, y in re.findall(r'<use [^>]*x="(-?[0-9.]+)" y="(-?[0-9.]+)"', plot):
            assert 0 <= float(x) <= float(width) and 0 <= float(y) <= float(height)


def test_terminal_fits_80_columns_and_cuts_nothing(report: Report) -> None:
    text = on_terminal(report)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text


def test_json_comes_back(report: Report, tmp_path: Path) -> None:
    path = write_text(tmp_path / "r.json", report.as_json())
    assert load_report(path).as_json() == report.as_json()
    assert write_text(tmp_path / "again.json", load_report(path).as_json()).read_text() == path.read_text()


# -- what they say


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


def test_the_headline_admits_that_the_best_method_is_not_exact() -> None:
    report = World().report()
    assert "differ" not in say.headline(Summary(report))
    differ(report, "hybrid", "wikisql")
    assert say.headline(Summary(report)).endswith("Its ids differ from plain decoding's.")


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


def test_unavailable_methods_with_one_reason_share_a_line() -> None:
    report = replace(World().report(), unavailable={"a": "not built", "b": "too old", "c": "not built"})
    lines = say.troubles(Summary(report))
    assert [line for line in lines if "run" in line] == ["a, c did not run: not built", "b did not run: too old"]


def test_peers_differences_are_no_failures_of_this_engine() -> None:
    report = World().report()
    found = replace(report.exactness[0], method="llama.cpp", identical=2, failures=[{"prompt": "x", "what": "y"}])
    report.exactness.append(found)
    summary = Summary(report)
    assert not any("failed" in line for line in say.troubles(summary))
    assert summary.exact and all(compared.passed for compared in summary.exact)


def test_settings_are_words_and_prompts_are_those_that_were_asked() -> None:
    report = World().report()
    report.trials = [trial for trial in report.trials if trial.group < 3]
    report.settings |= {"batches": [1, 4], "top_ks": [0], "contexts": [None], "ignore_eos": True, "time_limit_s": 110.0}
    found = page(Summary(report))
    assert "3 prompts used" in found and "5 prompts used" not in found
    for line in (
        "prompts of each workload, at most: 5",
        "prompts at once: 1, 4",
        "likeliest tokens that sampling chooses from (0: all): 0",
        "answers continue after the end-of-text token: yes",
        "seconds after which no trial begins: 110.0",
    ):
        assert f"<li>{line}</li>" in found
    how = found.partition("How it was measured")[2].partition("All raw trials")[0]
    assert "contexts" not in how and not re.search(r"\w_(bytes|ks|tokens|trials)\b", how)
    assert "K/V of a token 6.14 kB" in how and "weights of a pass 113 MB" in how


def test_the_command_is_ready_for_a_shell() -> None:
    assert "paceline bench --model paceline-small --title 'a b' --out out" in page(Summary(World().report()))


def test_other_sections_show_their_totals_alone_on_the_terminal() -> None:
    text = on_terminal(World(batches=(1, 8)).report())
    assert text.count("GSM8K (school maths)") == 1
    assert text.count("all 5 workloads") == 2


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "–"), (0.0, "0"), (0.1234, "0.123"), (1.234, "1.23"), (12.34, "12.3"), (123.4, "123"), (12345.6, "12,346")],
)
def test_numbers_have_three_digits(value: float | None, shown: str) -> None:
    assert say.number(value) == shown


# -- plots


def test_a_plot_shows_the_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row for each workload and for all of them; the whiskers end where the intervals do."""
    drawn: list[Figure] = []
    monkeypatch.setattr(figures, "svg", lambda picture: drawn.append(picture) or "")
    summary = Summary(World().report())
    section = summary.sections[0]
    say.speedups(summary, section)
    [axis] = drawn[0].axes
    rows = {row.method.name: row for row in summary.total(section) if row.speedup}
    labels = axis.get_legend_handles_labels()[1]
    assert labels == [row.method.name for row in rows.values()]
    assert [1.0, 1.0] in [list(line.get_xdata()) for line in axis.lines]
    for container, row in zip(axis.containers, rows.values(), strict=True):
        ratios = [ratio for r in (row, *summary.of(section)) if r.method == row.method and (ratio := r.speedup)]
        assert len(ratios) == 6
        ends = [segment[:, 0].tolist() for segment in container[2][0].get_segments()]
        assert ends == [pytest.approx([ratio.low, ratio.high]) for ratio in ratios]


def test_without_matplotlib_the_page_is_written_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    with_plots = Page(page(Summary(World().report())))
    monkeypatch.setattr(figures, "drawable", lambda: False)
    without = Page(page(Summary(World().report())))
    assert without.tables == with_plots.tables and without.tables
    assert any(tag == "svg" for tag, _ in with_plots.tags) and not any(tag == "svg" for tag, _ in without.tags)
    assert "pip install 'paceline[bench]'" in " ".join(without.words)
    assert "pip install" not in " ".join(with_plots.words)


# -- files


def test_a_report_is_written(tmp_path: Path) -> None:
    report = World().report()
    files = write_report(report, tmp_path / "new" / "folder")
    assert [f.name for f in files] == ["report.json", "report.html"]
    assert load_report(tmp_path / "new" / "folder") == load_report(files[0])
    assert sorted(p.name for p in files[0].parent.iterdir()) == sorted(f.name for f in files)  # nothing left over
    assert stat.S_IMODE(files[0].stat().st_mode) & 0o044 == 0o044 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("paceline.bench.report.os.replace", full)
    with pytest.raises(ConfigError, match="No space left"):
        write_text(path, World().report().as_json())
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report(World().report(), tmp_path / "file" / "folder")


def test_infinities_are_none_in_json(tmp_path: Path) -> None:
    report = World(groups=1).report()
    report.trials[0].budget = {"why": "cheap", "costs": [1.0, math.inf, math.nan]}
    path = write_text(tmp_path / "r.json", report.as_json())
    text = path.read_text()
    assert "Infinity" not in text and "NaN" not in text
    assert load_report(path).trials[0].budget == {"why": "cheap", "costs": [1.0, None, None]}


def broken(change: str) -> str:
    values = json.loads(World(groups=1, repeats=1, workloads={"w": "W"}).report().as_json())
    if change == "schema":
        values["schema"] = 99
    elif change == "missing":
        del values["trials"]
    elif change == "unknown":
        values["colour"] = "blue"
    elif change == "stranger":
        values["trials"][0]["method"] = "nobody"
    elif change == "twins":
        values["methods"].append(values["methods"][0])
    elif change == "cell":
        values["trials"][0]["cell"] = 7
    return json.dumps(values)


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[1, 2]", "not a benchmark report"),
        (b'{"schema": 1}', "not a benchmark report"),
        (broken("schema").encode(), "schema 99"),
        (broken("missing").encode(), "not a benchmark report"),
        (broken("unknown").encode(), "colour"),
        (broken("stranger").encode(), "nobody"),
        (broken("twins").encode(), "two methods of one name"),
        (broken("cell").encode(), "not a benchmark report"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, content: bytes, wrong: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=wrong):
        load_report(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_report(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="No such file"):
        load_report(tmp_path)  # a folder without a report


# -- in a browser


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
PROBE = """<!DOCTYPE html><title>probe</title><pre id="found">unfinished</pre><script>
const found = {};
const frames = [360, 420, 1280].map((width) => {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width:${width}px;height:800px;border:0`;
  frame.src = "report.html";
  return [width, frame, new Promise((done) => frame.addEventListener("load", done))];
});
for (const [, frame] of frames) document.body.append(frame);
Promise.all(frames.map((entry) => entry[2])).then(() => {
  for (const [width, frame] of frames) {
    const page = frame.contentDocument;
    const outside = [...page.querySelectorAll(".plot, h1, h2, h3, p, li")].filter((element) => {
      const box = element.getBoundingClientRect();
      return box.width && (box.left < -0.5 || box.right > width + 0.5);
    });
    found[width] = {
      scroll: page.documentElement.scrollWidth,
      outside: outside.map((element) => element.outerHTML.slice(0, 80)),
      plots: [...page.querySelectorAll(".plot")].map((panel) => {
        const letters = [...panel.querySelectorAll("text")].map((text) => text.getBoundingClientRect().height);
        return Math.min(...letters);
      }),
      requests: frame.contentWindow.performance.getEntriesByType("resource").map((entry) => entry.name),
    };
  }
  document.getElementById("found").textContent = JSON.stringify(found);
});
</script>"""


def browser() -> str | None:
    return os.environ.get("CHROME") or next(filter(None, map(shutil.which, BROWSERS)), None)


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder and remembers what was asked for."""

    asked: list[str] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, list[str]]]:
    Handler.asked = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", Handler.asked
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.full
@pytest.mark.skipif(browser() is None, reason="no Chromium found (PATH, or the variable CHROME)")
@pytest.mark.parametrize("case", ["many", "evil names"])
def test_in_a_headless_browser(case: str, tmp_path: Path) -> None:
    """No request but for the page, nothing wider than the screen, and letters of plots that can be read."""
    report = CASES[case]()
    if case == "evil names":
        report.workloads[EVIL]["title"] = f"gsm8k hybrid {'very' * 30} {EVIL}"
    write_report(report, tmp_path)
    (tmp_path / "probe.html").write_text(PROBE, encoding="utf-8")
    flags = ["--headless=new", "--disable-gpu", "--no-first-run", f"--user-data-dir={tmp_path / 'profile'}"]
    flags += ["--no-sandbox"] if os.geteuid() == 0 else []
    with serving(tmp_path) as (address, asked):
        command = [str(browser()), *flags, "--virtual-time-budget=20000", "--dump-dom", f"{address}/probe.html"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    text = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)
    assert text is not None, done.stderr[-2000:]
    found = json.loads(text[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert set(found) == {"360", "420", "1280"}
    for width, seen in found.items():
        assert seen["scroll"] <= int(width), f"the page is wider than {width} px"
        assert seen["outside"] == []
        assert all(letters > 10 for letters in seen["plots"])
        assert seen["requests"] == []
    assert set(asked) <= {"/probe.html", "/report.html", "/favicon.ico"}


def test_a_packed_report_is_read(tmp_path: Path) -> None:
    report = World().report()
    plain = write_text(tmp_path / "report.json", report.as_json())
    packed = tmp_path / "report.json.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert load_report(packed) == load_report(plain)
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(ConfigError, match="cannot be read|not JSON"):
        load_report(packed)
