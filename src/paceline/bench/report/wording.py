"""What every view of a report says in the same words: figures, headings, definitions, findings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...core.tables import read_table
from ..records import Cell, Exactness, Method, Report
from ..summary import CONFIDENCE, RESAMPLES, Interval, Row, Summary, best, slower_cells

NOTHING = "–"  # where there is no figure
FACTS = {  # settings of a run and sizes of a model, in words; others are named as they are
    "prompts": "prompts of each workload, at most",
    "repeats": "times that each prompt runs",
    "seed": "seed of prompts and sampling",
    "batches": "prompts at once",
    "waves": "prompts that each place of a batch answers",
    "temperatures": "temperatures (0: greedy)",
    "top_ks": "likeliest tokens that sampling chooses from (0: all)",
    "contexts": "tokens that prompts are brought to",
    "prompt_tokens": "tokens of a random model's prompts",
    "time_limit_s": "seconds after which no trial begins",
    "ignore_eos": "answers go on after the end-of-text token",
    "warm_up_tokens": "tokens of a warm-up, which is not counted",
    "pass_bytes": "weights of a pass",
    "kv_bytes_per_token": "K/V of a token",
    "read_bandwidth_bytes_per_s": "memory read in a second",
}
SYNTHETIC = "synthetic"

UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes"))

# -- figures


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


def length(value: float | None) -> str:
    """``2.84``."""
    return NOTHING if value is None else f"{value:.2f}"


def exact_mark(compared: Sequence[Exactness]) -> str:
    """``yes``, ``yes*`` where differences were explained, ``NO`` or nothing where nothing was compared."""
    if not all(found.passed for found in compared):
        return "NO"
    return "yes*" if any(found.explained for found in compared) else "yes" if compared else NOTHING


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
    """A cell in words, or a section, which has no workload."""
    parts = [cell.workload] if cell.workload else []
    parts += [f"batch {cell.batch}", f"temperature {cell.temperature:g}" if cell.temperature else "greedy"]
    parts += [f"top {cell.top_k}"] if cell.top_k else []
    parts += [f"context {cell.context}"] if cell.context is not None else []
    return ", ".join(parts + (["EOS ignored"] if cell.ignore_eos else []))


def count_of(amount: int, noun: str) -> str:
    """``1 pair``, ``2 pairs``."""
    return f"{amount:,} {noun}" + ("" if amount == 1 else "s")


# -- what was measured, and how


def facts_line(what: str, facts: Mapping[str, Any]) -> str:
    """``machine: cores 2, system Linux x86_64``; sizes in MB and GB."""
    return f"{what}: " + (", ".join(f"{_plain(key)} {fact(key, value)}" for key, value in facts.items()) or "unknown")


def _plain(key: str) -> str:
    return FACTS.get(key, key.replace("_", " "))


def fact(key: str, value: Any) -> str:
    """A value of model, machine or settings in words."""
    if isinstance(value, int | float) and "bytes" in key:
        return next(f"{value / of:.3g} {unit}" for of, unit in UNITS if value >= of or of == 1)
    if isinstance(value, dict):
        return ", ".join(f"{name}: {fact(name, item)}" for name, item in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(fact("", item) for item in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def how_lines(report: Report, facts: Iterable[str] = ()) -> list[str]:
    """How a run was measured: model, machine, versions, what else is known of it, settings, notes."""
    lines = [facts_line("model", report.model), facts_line("machine", report.machine)]
    lines += [facts_line("versions", report.versions), f"commit {report.commit or 'unknown'}, {report.created}", *facts]
    settings = {key: value for key, value in report.settings.items() if value not in (None, [None], [], {}, (None,))}
    return [*lines, *(f"{_plain(key)}: {fact(key, value)}" for key, value in settings.items()), *report.notes]


def definitions(report: Report) -> list[tuple[str, str]]:
    """Term and meaning, of the words that the report uses."""
    known, used = read_table("bench/report/definitions.toml"), any(method.synthetic for method in report.methods)
    filled = [(term, text.format(confidence=CONFIDENCE, resamples=RESAMPLES)) for term, text in known.items()]
    return [(term, text) for term, text in filled if term != SYNTHETIC or used]


# -- findings


def headline(summary: Summary) -> str:
    """The sentence that matters most: the best method overall and its speed-up."""
    row = best(summary.total(summary.main))
    if row is None or row.speedup is None:
        return "No speculative method was compared with plain decoding."
    where = "over " + count_of(row.workloads, "workload") if row.workloads > 1 else "on the one workload that was run"
    stretched = summary.report.model.get("stretched")
    where += f", on a target stretched {stretched}x" if stretched else ""
    first = f"Best method: {method_name(row.method)}, {row.speedup.value:.2f}× plain decoding {where}"
    broken = "" if all(found.passed for found in row.exact) else " Its ids differ from plain decoding's."
    return f"{first} ({bracket(row.speedup)}; {cell_label(row.section)}).{broken}"


def bracket(ratio: Interval) -> str:
    """The interval in words."""
    if ratio.pairs < 2:
        return "a single pair, no interval"
    return f"{CONFIDENCE:.0%} interval {ratio.low:.2f} to {ratio.high:.2f}"


def findings(summary: Summary) -> list[str]:
    """The remarks under the headline: ids, whether anything is slower than plain decoding, how much was measured."""
    compared = summary.exact
    counts = [(sum(e.explained for e in compared), "explained by near ties")]
    counts.append((sum(len(e.failures) for e in compared), "FAILED"))
    ids = f"Ids equal plain decoding: {sum(e.identical for e in compared):,} of "
    ids += count_of(sum(e.sequences for e in compared), "sequence")
    ids += "".join(f"; {many:,} {words}" for many, words in counts if many)
    shown = [r for r in summary.rows if r.speedup and r.method.own and not r.method.synthetic]
    slow, rows = len(slower_cells(summary)), count_of(len(shown), "row")
    speed = f"Slower than plain decoding: {slow or 'none'} of {rows} ({CONFIDENCE:.0%} interval below 1)"
    trials = summary.report.trials
    done, repeats = sum(trial.error is None for trial in trials), len({trial.repeat for trial in trials})
    return [
        ids if compared else "Ids were not compared with plain decoding's",
        speed if shown else "No speculative method was compared with plain decoding",
        f"{count_of(done, 'trial')}, {count_of(repeats, 'repeat')}, methods in turns on the same prompts",
    ]


def troubles(summary: Summary) -> list[str]:
    """Lines on what is not as it should be: ids that differ, what failed, what is slower than plain or did not run."""

    def where(row: Row) -> str:
        return f"{method_name(row.method)}, {cell_label(row.cell or row.section)}"

    names: dict[str, list[str]] = {}
    for name, why in summary.report.unavailable.items():
        names.setdefault(why, []).append(name)
    return [
        *(_failure(found) for found in summary.exact if not found.passed),
        *(
            f"{where(row)}: {len(row.failed)} of {count_of(len(row.trials), 'trial')} failed: {row.failed[0].error}"
            for row in summary.rows
            if row.failed
        ),
        *(f"{', '.join(many)} did not run: {why}" for why, many in names.items()),
        *(f"slower than plain: {where(row)}: {interval(row.speedup)}" for row in slower_cells(summary)),
    ]


def _failure(found: Exactness) -> str:
    """One failed comparison: how many, and the first of them."""
    first = dict(found.failures[0])
    lead = " ".join(str(first.pop(key)) for key in ("prompt", "what") if key in first)
    rest = ", ".join(f"{key} {first[key]}" for key in ("position", "gap") if first.get(key) is not None)
    where, many = f"{found.method}, {cell_label(found.cell)}", count_of(len(found.failures), "sequence")
    return f"{where}: {many} of {found.sequences:,} failed; first: {lead}" + (f" ({rest})" if rest else "")
