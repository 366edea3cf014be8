"""What every view of a report says in the same words: figures, headings, definitions, findings."""

from __future__ import annotations

import math
import shlex
import tomllib
from collections.abc import Callable, Iterable, Mapping
from importlib import resources
from typing import Any

from ..records import Cell, Exactness, Method, Report
from ..summary import (
    CONFIDENCE,
    NEVER_SLOWER,
    RESAMPLES,
    ExactCount,
    Interval,
    Row,
    Summary,
    best,
    slower_cells,
)

NOTHING = "–"  # where there is no figure
SYNTHETIC = "synthetic"

# -- figures


def times(ratio: float) -> str:
    """``2.31×``."""
    return f"{ratio:.2f}×"


def interval(ratio: Interval | None) -> str:
    """``2.31 [2.20, 2.43]``; a single pair has no spread, and says so."""
    if ratio is None:
        return NOTHING
    if ratio.pairs < 2:
        return f"{ratio.value:.2f} [1 pair]"
    return f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def speedup(row: Row) -> str:
    """The interval; 1 for the method that it is over."""
    if row.speedup is None:
        return "1" if row.reference == row.method.name and row.speed is not None else NOTHING
    return interval(row.speedup)


def number(value: float | None) -> str:
    """Three significant digits, no exponent."""
    if value is None:
        return NOTHING
    if not value:
        return "0"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(places, 3)}f}"


def share(value: float | None) -> str:
    """``83 %``."""
    return NOTHING if value is None else f"{100 * value:.0f} %"


def size(value: float | None) -> str:
    """Bytes in MB or GB."""
    if value is None:
        return NOTHING
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.0f} MB"


def length(value: float | None) -> str:
    """``2.84``."""
    return NOTHING if value is None else f"{value:.2f}"


def exact_mark(count: ExactCount | None) -> str:
    """``yes``, ``yes*`` where differences were explained, ``NO`` or nothing where it was not checked."""
    if count is None:
        return NOTHING
    if not count.passed:
        return "NO"
    return "yes*" if count.explained else "yes"


def method_name(method: Method) -> str:
    """The name as every view shows it: a synthetic method never goes without the word."""
    if method.synthetic and SYNTHETIC not in method.name.lower():
        return f"{method.name} ({SYNTHETIC})"
    return method.name


def method_detail(method: Method) -> str:
    """What the name stands for."""
    parts = [method.engine, method.drafter, f"round {method.round}" if method.own else ""]
    parts += [f"{key}={value}" for key, value in sorted(method.settings.items())]
    parts += [f"application {method.application}" if method.application else ""]
    parts += [f"dtype {method.dtype}" if method.dtype != "auto" else "", SYNTHETIC if method.synthetic else ""]
    return ", ".join(filter(None, parts))


def workload_title(report: Report, name: str | None) -> str:
    """The title of a workload; of none: over all of them."""
    if name is None:
        return "all workloads"
    return str(report.workloads.get(name, {}).get("title") or name)


def cell_label(cell: Cell) -> str:
    """One cell in words."""
    parts = [cell.workload, f"batch {cell.batch}"]
    parts.append(f"temperature {cell.temperature:g}" if cell.temperature else "greedy")
    parts += [f"top {cell.top_k}"] if cell.top_k else []
    return ", ".join(parts + ([f"context {cell.context}"] if cell.context is not None else []))


def row_label(row: Row) -> str:
    """Where a row belongs, in words."""
    return row.section.label() if row.cell is None else cell_label(row.cell)


def upper(line: str) -> str:
    """With a capital letter in front."""
    return line[:1].upper() + line[1:]


def count_of(amount: int, noun: str) -> str:
    """``1 pair``, ``2 pairs``."""
    return f"{amount:,} {noun}" + ("" if amount == 1 else "s")


# -- lines


Shown = Mapping[str, Callable[[Any], str]]  # fact of the model or the machine -> how it is shown
MODEL: Shown = {
    "name": str,
    "parameters": lambda value: f"{number(value / 1e6)}M parameters",
    "dtype": str,
    "pass_bytes": lambda value: f"{size(value)} read a pass",
    "kernels": lambda value: f"kernels: {value}",
}
MACHINE: Shown = {
    "processor": str,
    "cores": lambda value: f"{value} cores",
    "system": str,
    "device": str,
    "read_bandwidth_bytes_per_s": lambda value: f"reads {value / 1e9:.0f} GB/s",
}


def _facts(facts: Mapping[str, Any], shown: Shown) -> str:
    return ", ".join(show(facts[key]) for key, show in shown.items() if facts.get(key))


def model_line(report: Report) -> str:
    """The model in one line."""
    return _facts({"name": "model", **report.model}, MODEL)


def machine_line(report: Report) -> str:
    """The machine in one line."""
    machine = report.machine
    used = f"{machine.get('threads', machine['cores'])} of {machine['cores']}" if machine.get("cores") else None
    return _facts({**machine, "cores": used}, MACHINE)


def run_line(report: Report) -> str:
    """Versions, commit (short; ``-dirty`` where the tree was changed) and date in one line."""
    name, dash, changed = (report.commit or "").partition("-")
    commit = f"commit {name[:12]}{dash}{changed}" if report.commit else "no commit known"
    return ", ".join(filter(None, [versions_line(report), commit, created(report)]))


def versions_line(report: Report) -> str:
    """Packages and their versions."""
    return ", ".join(f"{name} {version}" for name, version in report.versions.items())


def created(report: Report) -> str:
    """When, to the minute."""
    return report.created.replace("T", " ")[:16] + " UTC"


def command_line(report: Report) -> str:
    """What repeats the run, ready for a shell."""
    return shlex.join(report.command)


def exactness_line(summary: Summary) -> str:
    """How many sequences of this engine's methods equal plain decoding's."""
    count = summary.exact
    if count is None:
        return "ids were not compared with plain decoding's"
    line = f"ids equal plain decoding: {count.identical:,} of {count_of(count.sequences, 'sequence')}"
    if count.explained:
        line += f"; {count.explained:,} explained by near ties"
    return line + (f"; {count.failures:,} FAILED" if count.failures else "")


def how_lines(report: Report, facts: Iterable[str] = ()) -> list[str]:
    """How a run was measured: model, machine, versions, what else is known of it, settings, notes."""
    lines = [model_line(report), machine_line(report), run_line(report), *facts]
    return [*lines, *(f"{key}: {setting(value)}" for key, value in report.settings.items()), *report.notes]


def failures(report: Report) -> list[Exactness]:
    """Comparisons of this engine's methods that failed."""
    return [e for e in report.exactness if not e.passed and report.is_own(e.method)]


def failure_line(found: Exactness) -> str:
    """One failed comparison: how many, and the first of them."""
    first = dict(found.failures[0])
    lead = " ".join(str(first.pop(key)) for key in ("prompt", "what") if key in first)
    rest = ", ".join(f"{key} {first[key]}" for key in ("position", "gap") if first.get(key) is not None)
    many = count_of(len(found.failures), "sequence")
    where = f"{found.method}, {cell_label(found.cell)}"
    return f"{where}: {many} of {found.sequences:,} failed; first: {lead}" + (f" ({rest})" if rest else "")


def troubles(summary: Summary) -> dict[str, list[str]]:
    """Lines on what is not as it should be: ids that differ, what is slower than plain, what failed or did not run."""
    slow = slower_cells(summary)
    return {
        "differing": [failure_line(found) for found in failures(summary.report)],
        "slower": [f"{method_name(row.method)}, {row_label(row)}: {interval(row.speedup)}" for row in slow],
        "failed": [_failed(row) for row in summary.rows if row.figures.failed],
        "unavailable": unavailable_lines(summary.report),
    }


def _failed(row: Row) -> str:
    many = f"{row.figures.failed} of {count_of(row.figures.failed + row.figures.trials, 'trial')} failed"
    return f"{method_name(row.method)}, {row_label(row)}: {many}: {row.figures.error}"


def unavailable_lines(report: Report) -> list[str]:
    """What did not run and why, one line a reason."""
    names: dict[str, list[str]] = {}
    for name, why in report.unavailable.items():
        names.setdefault(why, []).append(name)
    return [f"{', '.join(many)} did not run: {why}" for why, many in names.items()]


def slower_line(summary: Summary) -> str:
    """Whether any method of this engine is slower than plain decoding anywhere."""
    looked_at = [r for r in summary.rows if r.speedup and r.method.own and not r.method.synthetic]
    if not looked_at:
        return "no speculative method was compared with plain decoding"
    slow, bound = len(slower_cells(summary)), f"lower bound below {NEVER_SLOWER:g} of plain decoding"
    cells = count_of(len(looked_at), "row")
    return f"slower: {slow} of {cells} with a {bound}" if slow else f"never slower: no {bound} in {cells}"


def pairs_line(summary: Summary) -> str:
    """How much lies behind the intervals."""
    trials = sum(row.figures.trials for row in summary.rows)
    repeats = len({trial.repeat for trial in summary.report.trials})
    return f"{count_of(trials, 'trial')}, {count_of(repeats, 'repeat')}, methods in turns on the same prompts"


# -- findings


def headline(summary: Summary) -> str:
    """The sentence that matters most: the best method overall and its speed-up."""
    row = best(summary.total(summary.main))
    if row is None or row.speedup is None:
        return "No speculative method was compared with plain decoding."
    where = "over " + count_of(row.workloads, "workload") if row.workloads > 1 else "on the one workload that was run"
    stretched = summary.report.model.get("stretched")
    where += f", on a target stretched {stretched}x" if stretched else ""
    first = f"Best method: {method_name(row.method)}, {times(row.speedup.value)} plain decoding {where}"
    broken = " Its ids differ from plain decoding's." if row.exact and not row.exact.passed else ""
    return f"{first} ({bracket(row.speedup)}; {row.section.label()}).{broken}"


def bracket(ratio: Interval) -> str:
    """The interval in words."""
    if ratio.pairs < 2:
        return "a single pair, no interval"
    return f"{CONFIDENCE:.0%} interval {ratio.low:.2f} to {ratio.high:.2f}"


def findings(summary: Summary) -> list[str]:
    """The remarks under the headline."""
    lines = [exactness_line(summary), slower_line(summary), pairs_line(summary)]
    return [upper(line) for line in lines]


def has_synthetic(methods: Iterable[Method]) -> bool:
    """Whether the word needs its definition."""
    return any(method.synthetic for method in methods)


def definitions(report: Report) -> list[tuple[str, str]]:
    """Term and meaning, of the words that the report uses."""
    known = tomllib.loads(resources.files(__package__).joinpath("definitions.toml").read_text(encoding="utf-8"))
    filled = [(term, text.format(confidence=CONFIDENCE, resamples=RESAMPLES)) for term, text in known.items()]
    return [(term, text) for term, text in filled if term != SYNTHETIC or has_synthetic(report.methods)]


def setting(value: object) -> str:
    """A value of the settings in words."""
    if isinstance(value, dict):
        return ", ".join(f"{key}: {setting(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(setting, value)) or "none"
    return "none" if value is None else str(value)
