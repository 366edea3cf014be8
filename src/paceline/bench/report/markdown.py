"""The report as Markdown: tables, what went wrong, the machine, definitions, the command that repeats it.

The page (see `page`) is this text with plots in it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from html import escape

from ..summary import Interval, Row, Section, Summary
from . import JSON_NAME
from . import wording as say

Plot = Callable[[str, Summary, Section], str]  # HTML of a kind of plot of a section; empty: there is none


def _figure(name: str, show: Callable[[float | None], str] = say.number) -> Callable[[Row], str]:
    """A figure by its name in `Figures`."""
    return lambda row: show(getattr(row.figures, name))


def _speed(row: Row) -> str:
    return "failed" if row.speed is None and row.figures.failed else say.number(row.speed)


def _spread(row: Row) -> str:
    low, high = row.figures.speed_p10, row.figures.speed_p90
    return say.NOTHING if low is None else f"{say.number(low)} to {say.number(high)}"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "tokens/s": _speed,
    "p10 to p90": _spread,
    "speed-up": say.speedup,
    "accepted length": _figure("accepted_length", say.length),
    "of the floor": _figure("floor_share", say.share),
    "exact": lambda row: say.exact_mark(row.exact),
    "first token, ms": _figure("ttft_ms"),
    "a token, ms": _figure("wait_mean_ms"),
    "wait p50, ms": _figure("wait_p50_ms"),
    "p90, ms": _figure("wait_p90_ms"),
    "p99, ms": _figure("wait_p99_ms"),
    "draft": _figure("draft", say.share),
    "verify": _figure("verify", say.share),
    "host": _figure("host", say.share),
    "call reduction": _figure("call_reduction", say.length),
    "row-layers a pass": _figure("row_layers"),
    "upper ones": _figure("upper_row_layers"),
    "nodes pruned a pass": _figure("pruned"),
    "streams that rode": _figure("rode", say.share),
}
SPEEDS, TIMES, WORK = list(COLUMNS)[:6], list(COLUMNS)[6:14], list(COLUMNS)[14:]


def render(summary: Summary, plot: Plot = lambda *_: "") -> str:
    """The whole report; ends with a newline.

    Args:
        summary: of the report.
        plot: draws what only a page has.
    """
    report = summary.report
    sections = sorted(summary.sections, key=lambda section: section != summary.main)  # the main one first
    blocks = [f"# {text(report.title)}", f"**{text(say.headline(summary))}**", bullets(say.findings(summary))]
    for section in sections:
        blocks += _section(summary, section, plot)
    blocks += [*_batches(summary, plot), *_problems(summary)]
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
    """A table, the first column to the left and figures to the right. Cells are Markdown already."""
    lines = [head, [":--"] + ["--:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def bullets(lines: Iterable[str]) -> str:
    """A list."""
    return "\n".join(f"- {text(line)}" for line in lines)


# -- the parts


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of words; an interval's brackets need no backslash, as nothing follows them."""
    plain = re.compile(r"[0-9., \[\]pair]+")
    cells = ([cell if plain.fullmatch(cell) else text(cell) for cell in row] for row in rows)
    return table(list(map(text, head)), cells)


def _problems(summary: Summary) -> list[str]:
    found = say.troubles(summary)
    slower = [f"slower than plain: {line}" for line in found["slower"]]
    lines = [*found["differing"], *found["failed"], *slower, *found["unavailable"]]
    return ["## What went wrong, was slower or did not run", bullets(lines)] if lines else []


def _section(summary: Summary, section: Section, plot: Plot) -> list[str]:
    names, total = summary.workloads(section), summary.total(section)
    each = {name: [row for row in summary.of(section) if row.workload == name] for name in names}
    blocks = [f"## {text(say.upper(section.label()))}", plot("speed-up", summary, section)]
    if len(names) == 1:
        return [*blocks, f"### {text(say.workload_title(summary.report, names[0]))}", *_tables(each[names[0]])]
    blocks += [f"Over all {len(names)} workloads:", *_tables(total), plot("acceptance", summary, section)]
    blocks += _by_workload(summary, total, each)
    for name, rows in each.items():
        # A line of HTML, in which no backslash shields a word.
        title, body = escape(" ".join(say.workload_title(summary.report, name).split())), "\n\n".join(_tables(rows))
        blocks.append(f"<details><summary>{title}</summary>\n\n{body}\n\n</details>")
    return blocks


def _name(row: Row) -> str:
    return say.method_name(row.method) + (f" ({row.figures.failed} failed)" if row.figures.failed else "")


def _tables(rows: Sequence[Row]) -> list[str]:
    """Speeds, times and work of methods, columns without a figure left out, and their acceptance by position."""
    found = []
    for kind in (SPEEDS, TIMES, WORK):
        columns = {name: [COLUMNS[name](row) for row in rows] for name in kind}
        told = {name: cells for name, cells in columns.items() if set(cells) != {say.NOTHING}}
        found.append(_table(["method", *told], zip(map(_name, rows), *told.values(), strict=True)) if told else "")
    deep = max((len(row.figures.acceptance) for row in rows), default=0)
    shares = [[_name(row), *map(say.share, row.figures.acceptance)] for row in rows if row.figures.acceptance]
    filled = (row + [say.NOTHING] * (deep + 1 - len(row)) for row in shares)
    head = ["method", *(str(depth + 1) for depth in range(deep))]
    return [*found, *(["Acceptance by position:", _table(head, filled)] if shares else [])]


def _by_workload(summary: Summary, total: Sequence[Row], each: dict[str, list[Row]]) -> list[str]:
    """Speed-up of every speculative method on every workload."""
    methods = [row.method for row in total if row.speedup]
    rows = []
    for name, own in each.items():
        found = {row.method.name: row.speedup for row in own}
        rows.append(
            [say.workload_title(summary.report, name), *(say.interval(found.get(method.name)) for method in methods)]
        )
    table = _table(["workload", *map(say.method_name, methods)], rows)
    return ["Speed-up by workload:", table] if methods else []


def batch_curves(summary: Summary) -> dict[Section, dict[str, dict[int, Interval]]]:
    """Speed-ups over all workloads by batch size, of the methods that were measured at several.

    The section is that of batch size 1; what else is not the same has a section of its own.
    """
    found: dict[Section, dict[str, dict[int, Interval]]] = {}
    for row in summary.overall:
        if row.speedup is not None:
            curves = found.setdefault(replace(row.section, batch=1), {})
            curves.setdefault(row.method.name, {})[row.section.batch] = row.speedup
    several = {s: {name: points for name, points in of.items() if len(points) > 1} for s, of in found.items()}
    return {section: curves for section, curves in several.items() if curves}


def _batches(summary: Summary, plot: Plot) -> list[str]:
    blocks = []
    for section, curves in batch_curves(summary).items():
        sizes = sorted({size for points in curves.values() for size in points})
        rows = [
            [say.method_name(summary.methods[name]), *(say.interval(points.get(size)) for size in sizes)]
            for name, points in curves.items()
        ]
        title = f"## Speed-up by batch size, {text(section.label().removeprefix('batch 1, '))}"
        blocks += [title, plot("batches", summary, section), _table(["method", *map(str, sizes)], rows)]
    return blocks


def _workloads(summary: Summary) -> str:
    """Where the prompts are from."""
    keys = ("source", "licence", "prompts")
    found = summary.report.workloads
    rows = [
        [say.workload_title(summary.report, name), *(say.setting(facts.get(key, say.NOTHING)) for key in keys)]
        for name, facts in found.items()
    ]
    return _table(["workload", *keys], rows) if rows else ""
