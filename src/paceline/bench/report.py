"""Write the report of a benchmark: JSON with all raw trials, and one page of Markdown, which a terminal shows, too."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from ..train.files import replacing, writing
from .records import Cell, Exactness, Method, Report
from .summary import CONFIDENCE, RESAMPLES, Interval, Row, Summary, best

FILES = JSON_NAME, PAGE_NAME = "report.json", "report.md"
NOTHING = "–"  # where there is no figure
DEFINITIONS = {
    "tok/s": "new tokens over the time from submission to the last token; the median of a workload's trials, and the "
    "geometric mean over workloads",
    "speed-up": "paired ratio of tok/s to plain decoding on the same prompts, with a "
    f"{CONFIDENCE:.0%} bootstrap interval of {RESAMPLES:,} resamples",
    "length": "1 + accepted drafted tokens / target passes",
    "TTFT": "median ms from submission to a request's first token",
    "p90": "90th percentile of the waits between arrivals, ms",
    "floor": "time that reading weights and K/V takes at the machine's bandwidth, of the wall time",
    "exact": "token ids equal plain decoding's; yes*: the first differences are near ties",
}


# -- files


def write_report(report: Report, folder: Path) -> None:
    """Write JSON and page into a folder, which is created where it is missing.

    Raises:
        ConfigError: a file that cannot be written.
    """
    write_text(folder / JSON_NAME, report.as_json() + "\n")
    write_text(folder / PAGE_NAME, page(Summary(report)))


def write_text(path: Path, text: str, what: str = "report") -> Path:
    """Write a file, and its folder where it is missing; a reader never meets half a file.

    Raises:
        ConfigError: it cannot be written; ``what`` is what the message calls it.
    """
    with writing(f"{what} {path}", "name a folder that you can write to"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as fresh:
            fresh.write_text(text, encoding="utf-8")
    return path


# -- figures in words


def interval(ratio: Interval | None) -> str:
    """Format a ratio as ``2.31 [2.20, 2.43]``; a single pair has no spread, which it shows."""
    if ratio is None:
        return NOTHING
    return f"{ratio.value:.2f} [" + ("1 pair]" if ratio.pairs < 2 else f"{ratio.low:.2f}, {ratio.high:.2f}]")


def number(value: float | None) -> str:
    """Format a number with three significant digits and no exponent."""
    if value is None:
        return NOTHING
    places = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{min(places, 3)}f}"


def share(value: float | None) -> str:
    """Format a share as ``83 %``."""
    return NOTHING if value is None else f"{100 * value:.0f} %"


def length(value: float | None) -> str:
    """Format an accepted length as ``2.84``."""
    return NOTHING if value is None else f"{value:.2f}"


def exact_mark(compared: Sequence[Exactness]) -> str:
    """Return ``yes``, ``yes*`` where differences were explained, ``NO``, or nothing where nothing was compared."""
    if not all(comparison.passed for comparison in compared):
        return "NO"
    return "yes*" if any(comparison.explained for comparison in compared) else "yes" if compared else NOTHING


def method_detail(method: Method) -> str:
    """Describe what the name of a method stands for."""
    parts = [method.engine, method.drafter, f"round {method.round}" if method.ours else ""]
    parts += [f"{key}={value}" for key, value in sorted(method.settings.items())]
    parts += [f"application {method.application}" if method.application else ""]
    parts += [f"dtype {method.dtype}" if method.dtype != "auto" else ""]
    return ", ".join(filter(None, parts))


def workload_title(report: Report, name: str | None) -> str:
    """Return the title of a workload; of None: of all of them."""
    return "all workloads" if name is None else str(report.workloads.get(name, {}).get("title") or name)


def cell_label(cell: Cell) -> str:
    """Describe a cell, or a section, which has no workload."""
    parts = [cell.workload] if cell.workload else []
    parts += [f"batch {cell.batch}", f"temperature {cell.temperature:g}" if cell.temperature else "greedy"]
    parts += [f"top {cell.top_k}"] if cell.top_k else []
    parts += [f"context {cell.context}"] if cell.context is not None else []
    return ", ".join(parts + (["EOS ignored"] if cell.ignore_eos else []))


def count_of(amount: int, noun: str) -> str:
    """Format a count as ``1 pair`` or ``2 pairs``."""
    return f"{amount:,} {noun}" + ("" if amount == 1 else "s")


def how_lines(report: Report, facts: Iterable[str] = ()) -> list[str]:
    """Describe how a run was measured: model, machine, versions, ``facts``, settings."""
    parts = {name: getattr(report, name) for name in ("model", "machine", "versions", "settings")}
    lines = [f"commit {report.commit or 'unknown'}, {report.created}", *facts]
    for what, values in parts.items():
        named = [f"{name} {value}" for name, value in values.items() if value not in (None, [], {}, ())]
        lines.append(f"{what}: {', '.join(named)}")
    return lines


# -- findings


def headline(summary: Summary) -> str:
    """Name the best method and its speed-up over all workloads."""
    row = best(summary.total(summary.main))
    if row is None or row.speedup is None:
        return "No speculative method was compared with plain decoding."
    where = "over " + count_of(row.workloads, "workload") if row.workloads > 1 else "on the one workload that was run"
    first = f"Best method: {row.method.name}, {interval(row.speedup)} times plain decoding {where}"
    broken = "" if all(one.passed for one in row.exact) else " Its ids differ from plain decoding's."
    return f"{first} ({cell_label(row.section)}).{broken}"


def findings(summary: Summary) -> list[str]:
    """List whether ids are equal, and how much was measured."""
    compared = summary.exact
    ids = f"Ids equal plain decoding: {sum(e.identical for e in compared):,} of "
    ids += count_of(sum(e.sequences for e in compared), "sequence")
    counts = (sum(e.explained for e in compared), sum(len(e.failures) for e in compared))
    words = ("explained by near ties", "FAILED")
    ids += "".join(f"; {many:,} {what}" for many, what in zip(counts, words, strict=True) if many)
    trials = summary.report.trials
    done, repeats = sum(trial.error is None for trial in trials), len({trial.repeat for trial in trials})
    return [
        ids if compared else "Ids were not compared with plain decoding's",
        f"{count_of(done, 'trial')}, {count_of(repeats, 'repeat')}, methods in turns on the same prompts",
    ]


def troubles(summary: Summary) -> list[str]:
    """List ids that differ, trials that failed, methods that did not run, and cells slower than plain decoding."""

    def where(row: Row) -> str:
        return f"{row.method.name}, {cell_label(row.cell or row.section)}"

    lines, reasons = [], dict[str, list[str]]()
    for check in (e for e in summary.exact if not e.passed):
        first, many = dict(check.failures[0]), count_of(len(check.failures), "sequence")
        lead = " ".join(str(first.pop(key)) for key in ("prompt", "what") if key in first)
        rest = ", ".join(f"{key} {first[key]}" for key in ("position", "gap") if first.get(key) is not None)
        line = f"{check.method}, {cell_label(check.cell)}: {many} of {check.sequences:,} failed; first: {lead}"
        lines.append(line + (f" ({rest})" if rest else ""))
    for row in (row for row in summary.rows if row.failed):
        failed = f"{len(row.failed)} of {count_of(len(row.trials), 'trial')} failed"
        lines.append(f"{where(row)}: {failed}: {row.failed[0].error}")
    for name, why in summary.report.unavailable.items():
        reasons.setdefault(why, []).append(name)
    lines += [f"{', '.join(names)} did not run: {why}" for why, names in reasons.items()]
    slower = [row for row in summary.rows if row.speedup and row.speedup.high < 1 and row.method.ours]
    return lines + [f"slower than plain: {where(row)}: {interval(row.speedup)}" for row in slower]


COLUMNS: dict[str, Callable[[Row], str]] = {
    "tok/s": lambda row: "failed" if row.speed is None and row.failed else number(row.speed),
    "speed-up": lambda row: "1" if row.is_reference and row.speed is not None else interval(row.speedup),
    "length": lambda row: length(row.figures["accepted_length"]),
    "TTFT": lambda row: number(row.figures["ttft_ms"]),
    "p90": lambda row: number(row.figures["wait_p90_ms"]),
    "floor": lambda row: share(row.figures["floor_share"]),
    "exact": lambda row: exact_mark(row.exact),
}


def _cells(row: Row) -> list[str]:
    failed = f" ({len(row.failed)} failed)" if row.failed else ""
    return [row.method.name + failed, *(show(row) for show in COLUMNS.values())]


def _groups(summary: Summary, section: Cell) -> dict[str, list[Row]]:
    """Return the rows of a section under titles: over all workloads, where there are several, and of each."""
    names, rows = summary.workloads(section), summary.of(section)
    total = {f"all {len(names)} workloads": summary.total(section)} if len(names) > 1 else {}
    return total | {workload_title(summary.report, n): [r for r in rows if r.workload == n] for n in names}


# -- Markdown


def text(value: object) -> str:
    """Return text that Markdown shows as it is, in a table cell too."""
    flat = re.sub(r"\s+", " ", str(value)).strip()
    return re.sub(r"([\\`*\[\]<>|#~&]|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z]))", r"\\\1", flat)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table, the first column to the left and figures to the right."""
    plain = re.compile(r"[0-9., \[\]pair]+")  # an interval's brackets need no backslash: nothing follows them
    cells = ([cell if plain.fullmatch(cell) else text(cell) for cell in row] for row in rows)
    lines = [[*map(text, head)], [":--"] + ["--:"] * (len(head) - 1), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def bullets(lines: Iterable[str]) -> str:
    """Return a list."""
    return "\n".join(f"- {text(line)}" for line in lines)


def page(summary: Summary) -> str:
    """Return the page."""
    report, prompts_of = summary.report, dict[str, set[str]]()
    for trial in report.trials:
        prompts_of.setdefault(trial.cell.workload, set()).update(trial.prompts)
    details = [f"{m.name}: {method_detail(m)}" for m in report.methods if not m.plain]
    details += [
        f"{workload_title(report, name)}: source {of.get('source', NOTHING)}; licence {of.get('licence', NOTHING)}; "
        f"{count_of(len(prompts_of.get(name, ())), 'prompt')} used"
        for name, of in report.workloads.items()
    ]
    command = shlex.join(report.command).replace("```", "` ` `")
    repeat = f"All raw trials are in [{JSON_NAME}]({JSON_NAME}). To repeat it:\n\n```\n{command}\n```"
    blocks = [figures_page(summary), "## How it was measured", bullets([*how_lines(report), *details]), repeat]
    return "\n\n".join(blocks) + "\n"


def figures_page(summary: Summary) -> str:
    """Return findings, a table for each section and workload, what went wrong, and what columns mean."""
    title = text(summary.report.title)
    blocks = [f"# {title}", f"**{text(headline(summary))}**", bullets(findings(summary))]
    for section in summary.sections:
        blocks += [f"## {text(cell_label(section).replace('batch', 'Batch', 1))}"]
        for name, rows in _groups(summary, section).items():
            blocks += [f"### {text(name)}", table(["method", *COLUMNS], map(_cells, rows))]
    if wrong := troubles(summary):
        blocks += ["## What went wrong, was slower or did not run", bullets(wrong)]
    blocks += [bullets(summary.report.notes), bullets(f"{term}: {meaning}" for term, meaning in DEFINITIONS.items())]
    return "\n\n".join(filter(None, blocks))


def figures_table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> Table:
    """Return a table with so many columns of words on the left, then figures; a row of one cell is a title."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for place, name in enumerate(head):
        table.add_column(name, justify="left" if place < words else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row), style="bold" if len(row) == 1 else None)
    return table
