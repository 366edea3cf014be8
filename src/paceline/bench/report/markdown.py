"""The report as Markdown, for READMEs: tables, the machine, definitions, the command that repeats it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..records import Report
from ..summary import Row, Section, Summary, summarise
from . import tables
from . import wording as say
from .tables import FigureTable

SPEEDS = tables.columns("tokens/s | p10 to p90 | speed-up | accepted length | of the floor | exact")
WORK = tables.columns("call reduction | row-layers a pass | upper ones | nodes pruned a pass | streams that rode")
TIMES = tables.columns(
    "first token, ms | a token, ms | wait p50, ms | p90, ms | p99, ms | draft | verify | host | rest | peak memory"
)


def render(report: Report | Summary) -> str:
    """The whole report; ends with a newline."""
    summary = summarise(report)
    blocks = [f"# {text(summary.report.title)}", f"**{text(say.headline(summary))}**", bullets(say.findings(summary))]
    for section in summary.sections:
        blocks += _section(summary, section)
    for label, _, found in tables.curves(summary):
        blocks += [f"## Speed-up by batch size, {text(label)}", _table(found)]
    blocks += [*_problems(summary), *_how(summary)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def text(value: object) -> str:
    """Text that Markdown shows as it is, in a table cell too."""
    flat = re.sub(r"\s+", " ", str(value)).strip()
    return re.sub(r"([\\`*\[\]<>|#~&]|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z]))", r"\\\1", flat)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, the first column to the left and figures to the right. Cells are Markdown already."""
    lines = [head, [":--"] + ["--:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _table(found: FigureTable) -> str:
    """A table of the report; an interval's brackets need no backslash, as nothing follows them."""
    rows = [[_cell(cell) for cell in row] for row in found.words()]
    return table(list(map(text, found.head)), rows)


def _cell(words: str) -> str:
    return words if re.fullmatch(r"[0-9., \[\]pair]+", words) else text(words)


def _titled(title: str, found: FigureTable | None) -> list[str]:
    return [] if found is None else [title, _table(found)]


def bullets(lines: Iterable[str]) -> str:
    """A list."""
    return "\n".join(f"- {text(line)}" for line in lines)


def _section(summary: Summary, section: Section) -> list[str]:
    names, total = summary.workloads(section), summary.total(section)
    blocks = [f"## {text(say.upper(section.label()))}"]
    if len(names) > 1:
        blocks += [f"Over all {len(names)} workloads:", *_tables(total)]
        blocks += _titled("Acceptance by position:", tables.acceptance(total))
        blocks += _titled("Speed-up by workload:", tables.matrix(summary, section))
    for name in names:
        rows = [row for row in summary.of(section) if row.workload == name]
        title, body = text(say.workload_title(summary.report, name)), "\n\n".join(_tables(rows))
        blocks.append(f"<details><summary>{title}</summary>\n\n{body}\n\n</details>" if len(names) > 1 else body)
        blocks += _titled("Acceptance by position:", tables.acceptance(rows)) if len(names) == 1 else []
    return blocks


def _tables(rows: Sequence[Row]) -> list[str]:
    # Reports of older versions have no row-layers.
    work = [WORK] if any(row.figures.row_layers for row in rows) else []
    return [_table(tables.figures(rows, chosen)) for chosen in (SPEEDS, TIMES, *work)]


def _problems(summary: Summary) -> list[str]:
    found = say.troubles(summary)
    slower = [f"slower than plain: {line}" for line in found["slower"]]
    lines = [*found["differing"], *slower, *found["failed"], *found["unavailable"]]
    return ["## What went wrong or did not run", bullets(lines)] if lines else []


def _how(summary: Summary) -> list[str]:
    report = summary.report
    command = say.command_line(report).replace("```", "` ` `")
    defined = [f"- **{term}**: {text(meaning)}" for term, meaning in say.definitions(report)]
    return [
        "## How it was measured",
        bullets(say.how_lines(report)),
        bullets(f"{say.method_name(m)}: {say.method_detail(m)}" for m in report.methods if not m.plain),
        f"To repeat it:\n\n```\n{command}\n```",
        _table(tables.workloads(report)) if report.workloads else "",
        "### What the words mean",
        "\n".join(defined),
    ]
