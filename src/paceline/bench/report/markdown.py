"""The report as Markdown, for READMEs: tables, the machine, definitions, the command that repeats it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..records import Report
from ..summary import Index, Row, Section, Summary, against, batch_curve, is_plain, slower_cells, summarise
from . import wording as say

SPEEDS = ("method", "tokens/s", "p10 to p90", "speed-up", "accepted length", "floor", "exact")
WORK = ("method", "call reduction", "row-layers a pass", "upper row-layers a pass", "nodes pruned a pass")
TIMES = (
    "method",
    "first token, ms",
    "a token, ms",
    "wait p50, ms",
    "p90, ms",
    "p99, ms",
    "draft",
    "verify",
    "host",
    "rest",
    "peak memory",
)


def render(report: Report | Summary) -> str:
    """The whole report; ends with a newline."""
    summary = report if isinstance(report, Summary) else summarise(report)
    index = Index(summary.report)
    blocks = [f"# {text(summary.report.title)}", f"**{text(say.headline(summary))}**", _findings(summary)]
    for section in summary.sections:
        blocks += _section(summary, index, section)
    blocks += [*_curves(summary), *_problems(summary), *_how(summary)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def text(value: object) -> str:
    """Text that Markdown shows as it is, in a table cell too."""
    flat = re.sub(r"\s+", " ", str(value)).strip()
    return re.sub(r"([\\`*\[\]<>|#~&]|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z]))", r"\\\1", flat)


def code(value: str) -> str:
    """A code span for text with any number of backquotes."""
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", value)), default=0))
    pad = " " if "`" in value else ""
    return f"{ticks}{pad}{value}{pad}{ticks}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, the first column to the left and figures to the right. Cells are Markdown already."""
    lines = [head, [":--"] + ["--:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _findings(summary: Summary) -> str:
    return "\n".join(f"- {text(line)}" for line in say.findings(summary))


def _section(summary: Summary, index: Index, section: Section) -> list[str]:
    names = summary.workloads(section)
    blocks = [f"## {text(_upper(section.label()))}"]
    if len(names) > 1:
        total = summary.total(section)
        blocks += [f"Over all {len(names)} workloads:", *_tables(total), *_acceptance(total)]
        blocks += _matrix(summary, section)
    for name in names:
        rows = [row for row in summary.of(section) if row.workload == name]
        title = text(say.workload_title(summary.report, name))
        body = "\n\n".join(_tables(rows))
        blocks.append(f"<details><summary>{title}</summary>\n\n{body}\n\n</details>" if len(names) > 1 else body)
        blocks += _acceptance(rows) if len(names) == 1 else []
    return blocks + _peers(index, section)


def _tables(rows: Sequence[Row]) -> list[str]:
    found = [table(SPEEDS, map(_speed_cells, rows)), table(TIMES, map(_time_cells, rows))]
    if any(row.figures.row_layers for row in rows):  # reports of older versions have none
        found.append(table(WORK, map(_work_cells, rows)))
    return found


def _work_cells(row: Row) -> list[str]:
    figures = row.figures
    return [
        text(say.method_name(row.method)),
        say.length(figures.call_reduction),
        *map(say.number, (figures.row_layers, figures.upper_row_layers, figures.pruned)),
    ]


def _speed_cells(row: Row) -> list[str]:
    figures, spread = row.figures, row.figures.speed
    failed = f" ({figures.failed} failed)" if figures.failed else ""
    return [
        text(say.method_name(row.method) + failed),
        say.number(row.speed),
        f"{say.number(spread.p10)} to {say.number(spread.p90)}" if spread else say.NOTHING,
        say.speedup(row),
        say.length(figures.accepted_length),
        say.share(figures.floor_share),
        say.exact_mark(row.exact).replace("*", "\\*"),
    ]


def _time_cells(row: Row) -> list[str]:
    waits, shares = row.figures.waits, row.figures.shares
    return [
        text(say.method_name(row.method)),
        say.number(row.figures.ttft_ms),
        *map(say.number, (waits.mean_ms, waits.p50_ms, waits.p90_ms, waits.p99_ms) if waits else [None] * 4),
        *map(say.share, (shares.draft, shares.verify, shares.host, shares.rest) if shares else [None] * 4),
        say.size(row.figures.peak_bytes),
    ]


def _acceptance(rows: Sequence[Row]) -> list[str]:
    """Share accepted at each depth."""
    found = [row for row in rows if row.figures.acceptance]
    depth = max((len(row.figures.acceptance) for row in found), default=0)
    body = [
        [text(say.method_name(row.method)), *(say.share(a) for a in row.figures.acceptance)]
        + [say.NOTHING] * (depth - len(row.figures.acceptance))
        for row in found
    ]
    if not body:
        return []
    return ["Acceptance by position:", table(["method", *map(str, range(1, depth + 1))], body)]


def _matrix(summary: Summary, section: Section) -> list[str]:
    """Speed-up of every speculative method on every workload."""
    rows = {(row.workload, row.method.name): row for row in summary.of(section)}
    methods = [row.method for row in summary.total(section) if row.speedup]
    if not methods:
        return []
    body = []
    for name in summary.workloads(section):
        found = [rows.get((name, method.name)) for method in methods]
        cells = [say.interval(row.speedup if row else None) for row in found]
        body.append([text(say.workload_title(summary.report, name)), *cells])
    return ["Speed-up by workload:", table(["workload", *(text(say.method_name(m)) for m in methods)], body)]


def _peers(index: Index, section: Section) -> list[str]:
    found = against(index, section)
    if not found:
        return []
    names = list(dict.fromkeys(name for ratios in found.values() for name in ratios))
    body = [
        [text(say.method_name(index.methods[n])), *(say.interval(ratios.get(n)) for ratios in found.values())]
        for n in names
    ]
    head = ["method", *(f"over {text(peer)}" for peer in found)]
    return ["Beside other engines' plain decoding:", table(head, body)]


def _curves(summary: Summary) -> list[str]:
    curves, blocks = batch_curve(summary), []
    for section in dict.fromkeys(curve.section for curve in curves):
        here = [curve for curve in curves if curve.section == section]
        batches = sorted({batch for curve in here for batch, _ in curve.points})
        body = [
            [text(say.method_name(c.method)), *(say.interval(dict(c.points).get(b)) for b in batches)] for c in here
        ]
        label = say.without_batch(section)
        blocks += [f"## Speed-up by batch size, {text(label)}", table(["method", *map(str, batches)], body)]
    return blocks


def _problems(summary: Summary) -> list[str]:
    report = summary.report
    lines = [say.failure_line(found) for found in say.failures(report)]
    lines += [
        f"slower than plain: {say.method_name(row.method)}, {say.row_label(row)}: {say.interval(row.speedup)}"
        for row in slower_cells(summary)
    ]
    lines += say.failed_trials(summary)
    lines += say.unavailable_lines(report)
    if not lines:
        return []
    return ["## What went wrong or did not run", "\n".join(f"- {text(line)}" for line in lines)]


def _how(summary: Summary) -> list[str]:
    report = summary.report
    lines = [say.model_line(report), say.machine_line(report), say.run_line(report)]
    lines += [f"{key}: {say.setting(value)}" for key, value in report.settings.items()]
    methods = [f"- {text(say.method_name(m))}: {text(say.method_detail(m))}" for m in report.methods if not is_plain(m)]
    defined = [f"- **{term}**: {text(meaning)}" for term, meaning in say.definitions(report)]
    return [
        "## How it was measured",
        "\n".join(f"- {text(line)}" for line in (*lines, *report.notes)),
        "\n".join(methods),
        f"To repeat it:\n\n```\n{_fenced(say.command_line(report))}\n```",
        _workloads(report),
        "### What the words mean",
        "\n".join(defined),
    ]


def _workloads(report: Report) -> str:
    keys = ("source", "licence", "prompts")
    body = [
        [text(say.workload_title(report, name)), *(text(facts.get(key, say.NOTHING)) for key in keys)]
        for name, facts in report.workloads.items()
    ]
    return table(["workload", *keys], body) if body else ""


def _fenced(command: str) -> str:
    return command.replace("```", "` ` `")


def _upper(label: str) -> str:
    return label[:1].upper() + label[1:]
