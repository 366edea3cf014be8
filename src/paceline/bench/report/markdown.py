"""The report as Markdown: tables, what went wrong, the machine, definitions, the command that repeats it.

The page (see `page`) is this text with plots in it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from html import escape

from ..records import Cell
from ..summary import Interval, Row, Summary
from . import JSON_NAME
from . import wording as say

Plot = Callable[[Cell], str]  # HTML of a section's plot; empty: there is none


def _figure(name: str, show: Callable[[float | None], str] = say.number) -> Callable[[Row], str]:
    return lambda row: show(row.figures[name])


def _speed(row: Row) -> str:
    return "failed" if row.speed is None and row.failed else say.number(row.speed)


def _spread(row: Row) -> str:
    low, high = row.figures["speed_p10"], row.figures["speed_p90"]
    return say.NOTHING if low is None else f"{say.number(low)} to {say.number(high)}"


SPEEDS: dict[str, Callable[[Row], str]] = {
    "speed-up": say.speedup,
    "tokens/s": _speed,
    "p10 to p90": _spread,
    "accepted length": _figure("accepted_length", say.length),
    "of the floor": _figure("floor_share", say.share),
    "exact": lambda row: say.exact_mark(row.exact),
}
TIMES: dict[str, Callable[[Row], str]] = {
    "first token, ms": _figure("ttft_ms"),
    "a token, ms": _figure("wait_mean_ms"),
    "wait p50, ms": _figure("wait_p50_ms"),
    "p90, ms": _figure("wait_p90_ms"),
    "p99, ms": _figure("wait_p99_ms"),
    "draft": _figure("draft", say.share),
    "verify": _figure("verify", say.share),
    "host": _figure("host", say.share),
}


def render(summary: Summary, plot: Plot = lambda *_: "", lead: str = "") -> str:
    """The whole report; ends with a newline.

    Args:
        summary: of the report.
        plot: draws what only a page has.
        lead: Markdown that stands before the figures.
    """
    report = summary.report
    blocks = [f"# {text(report.title)}", f"**{text(say.headline(summary))}**", bullets(say.findings(summary)), lead]
    for section in summary.sections:
        blocks += _section(summary, section, plot)
    blocks += _batches(summary)
    if wrong := say.troubles(summary):
        blocks += ["## What went wrong, was slower or did not run", bullets(wrong)]
    command = shlex.join(report.command).replace("```", "` ` `")
    blocks += [
        "## How it was measured",
        bullets(say.how_lines(report)),
        bullets(f"{say.method_name(m)}: {say.method_detail(m)}" for m in report.methods if not m.plain),
        f"All raw trials are in [{JSON_NAME}]({JSON_NAME}), beside this report. To repeat it:\n\n```\n{command}\n```",
        _workloads(summary),
        "### What the words mean",
        "\n".join(f"- **{term}**: {text(meaning)}" for term, meaning in say.definitions(report)),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


# -- pieces that studies use as well


def text(value: object) -> str:
    """Text that Markdown shows as it is, in a table cell too."""
    flat = re.sub(r"\s+", " ", str(value)).strip()
    return re.sub(r"([\\`*\[\]<>|#~&]|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z]))", r"\\\1", flat)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of words, the first column to the left and figures to the right."""
    figures = re.compile(r"[0-9., \[\]pair]+")  # an interval's brackets need no backslash: nothing follows them
    cells = ([cell if figures.fullmatch(cell) else text(cell) for cell in row] for row in rows)
    lines = [[*map(text, head)], [":--"] + ["--:"] * (len(head) - 1), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def bullets(lines: Iterable[str]) -> str:
    """A list."""
    return "\n".join(f"- {text(line)}" for line in lines)


# -- the parts


def _section(summary: Summary, section: Cell, plot: Plot) -> list[str]:
    names, total = summary.workloads(section), summary.total(section)
    titles = {name: say.workload_title(summary.report, name) for name in names}
    each = {name: [row for row in summary.of(section) if row.workload == name] for name in names}
    blocks = [f"## {text(say.cell_label(section).replace('batch', 'Batch', 1))}", plot(section)]
    if len(names) == 1:
        return [*blocks, f"### {text(titles[names[0]])}", *_tables(each[names[0]])]
    blocks += [f"Over all {len(names)} workloads:", *_tables(total)]
    if methods := [row.method for row in total if row.speedup]:
        ratios = {name: {row.method.name: row.speedup for row in rows} for name, rows in each.items()}
        rows = ([titles[name], *(say.interval(of.get(m.name)) for m in methods)] for name, of in ratios.items())
        blocks += ["Speed-up by workload:", table(["workload", *map(say.method_name, methods)], rows)]
    for name, rows_of in each.items():
        # A line of HTML, in which no backslash shields a word.
        title, body = escape(" ".join(titles[name].split())), "\n\n".join(_tables(rows_of))
        blocks.append(f"<details><summary>{title}</summary>\n\n{body}\n\n</details>")
    return blocks


def name_of(row: Row) -> str:
    """The method, and how many of its trials failed."""
    return say.method_name(row.method) + (f" ({len(row.failed)} failed)" if row.failed else "")


def _tables(rows: Sequence[Row]) -> list[str]:
    """Speeds and times of methods, columns without a figure left out, and their acceptance by position."""
    found = []
    for kind in (SPEEDS, TIMES):
        columns = {name: [show(row) for row in rows] for name, show in kind.items()}
        told = {name: cells for name, cells in columns.items() if set(cells) != {say.NOTHING}}
        found.append(table(["method", *told], zip(map(name_of, rows), *told.values(), strict=True)) if told else "")
    shares = [[name_of(row), *map(say.share, row.acceptance)] for row in rows if row.acceptance]
    deep = max(map(len, shares), default=0)
    filled = (row + [say.NOTHING] * (deep - len(row)) for row in shares)
    head = ["method", *map(str, range(1, deep))]
    return [*found, *(["Acceptance by position:", table(head, filled)] if shares else [])]


def batch_curves(summary: Summary) -> dict[Cell, dict[str, dict[int, Interval]]]:
    """Speed-ups over all workloads by batch size, of the methods that were measured at several.

    The section is that of batch size 1; what else is not the same has a section of its own.
    """
    found: dict[Cell, dict[str, dict[int, Interval]]] = {}
    for row in summary.overall:
        if row.speedup is not None:
            curves = found.setdefault(replace(row.section, batch=1), {})
            curves.setdefault(row.method.name, {})[row.section.batch] = row.speedup
    several = {s: {name: points for name, points in of.items() if len(points) > 1} for s, of in found.items()}
    return {section: curves for section, curves in several.items() if curves}


def _batches(summary: Summary) -> list[str]:
    blocks = []
    for section, curves in batch_curves(summary).items():
        sizes = sorted({size for points in curves.values() for size in points})
        shown = {say.method_name(summary.methods[name]): points for name, points in curves.items()}
        rows = ([name, *(say.interval(points.get(size)) for size in sizes)] for name, points in shown.items())
        title = f"## Speed-up by batch size, {text(say.cell_label(section).removeprefix('batch 1, '))}"
        blocks += [title, table(["method", *map(str, sizes)], rows)]
    return blocks


def _workloads(summary: Summary) -> str:
    """Say where the prompts are from, and how many were asked before the run ended."""
    asked: dict[str, set[str]] = {}
    for trial in summary.report.trials:
        asked.setdefault(trial.cell.workload, set()).update(trial.prompts)
    return bullets(
        f"{say.workload_title(summary.report, name)}: source {of.get('source', say.NOTHING)}; "
        f"licence {of.get('licence', say.NOTHING)}; {say.count_of(len(asked.get(name, ())), 'prompt')} asked"
        for name, of in summary.report.workloads.items()
    )
