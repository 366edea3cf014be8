"""What the engine accepts: tau by context (table 1), by depth, and under block verification."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from kit.grid import how
from kit.scores import workload_of
from kit.study import Entry, Grid, Table, measure

from paceline.bench.records import Report
from spire_parts.common import (
    CONTEXTS,
    DEPTH,
    DOMAINS,
    DRAFT,
    INTERVALS,
    MAGICDEC,
    MIDDLE,
    SPIRE,
    VANILLA,
    BoundedMean,
    SpireFlags,
    contestants,
    mean_of,
    method_of,
    study,
    tau,
    verdict,
)
from spire_parts.lent import LentRun

WANTED = 3.40  # tau of SPIRe in the paper, T=1, k=4, context 512
OWN, OTHER = "the target's domains", "other text"
DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8)
TOKENS = 56  # of an answer: the longest context leaves room for so many
Rows = list[dict[str, Any]]
SAID = (
    "T=1: sampled drafts, verified by rejection, as in the paper",
    "T=1, the target's noise: drafts and target draw with the same noise, equal tokens are kept: the engine's default",
)
TAU = "tau: mean tokens of a pass with a draft, the target's own included; a mean of tasks weighs each alike"


@dataclass(frozen=True, kw_only=True)
class TaskCells:
    """Which trials a figure is of."""

    method: str
    tasks: Sequence[str]
    context: int | None
    temperature: float


def tau_of(report: Report, cells: TaskCells) -> BoundedMean | None:
    """The mean over tasks, each alike; None where a task has no trial that went well."""
    values, drawn = [], []
    for stream, task in enumerate(cells.tasks):
        own = [
            t
            for t in report.trials
            if (t.method, t.cell.workload) == (cells.method, workload_of(task))
            and (t.cell.context, t.cell.temperature) == (cells.context, cells.temperature)
            and t.error is None
        ]
        if not own:
            return None
        value, resampled = tau(own, stream)
        values.append(value)
        drawn.append(resampled)
    return mean_of(float(np.mean(values)), np.mean(drawn, axis=0)) if values else None


def texts_of(ask: SpireFlags) -> dict[str, list[str]]:
    """Tasks of the target's domains, and those of other text."""
    others = [name.strip() for name in ask.others.split(",") if name.strip()]
    return {OWN: ask.names, **({OTHER: others} if others else {})}


def shown(found: BoundedMean | None) -> str:
    """In a table."""
    return "failed" if found is None else found.text


KINDS = {  # columns of table 1: verifier and temperature
    "T=1": ("rejection", 1.0),
    "T=1, the target's noise": ("sample_and_match", 1.0),
    "greedy": ("sample_and_match", 0.0),
}


def grids_of(ask: SpireFlags, contexts: Sequence[int]) -> dict[str, Grid]:
    """By verifier the drafts under it, at the temperatures of `KINDS`."""
    found = {}
    for verifier in dict.fromkeys(verifier for verifier, _ in KINDS.values()):
        temperatures = tuple(t for own, t in KINDS.values() if own == verifier)
        entries = [Entry(method_of(ask, name, verifier=verifier), name) for name in contestants(ask)]
        cells = {"contexts": contexts, "temperatures": temperatures}
        found[verifier] = Grid(title=f"Tau at k = {DEPTH}, {verifier}", entries=entries, cells=cells)
    return found


def rows_of(reports: Mapping[str, Report], names: Sequence[str], tasks: Sequence[str], contexts: Sequence[int]) -> Rows:
    """Of every context and draft the tau of every kind, as lists of value and bounds."""
    rows: Rows = []
    for context in contexts:
        for name in names:
            row: dict[str, Any] = {"context": context, "draft": name}
            for kind, (verifier, temperature) in KINDS.items():
                cells = TaskCells(method=name, tasks=tasks, context=context, temperature=temperature)
                row[kind] = tau_of(reports[verifier], cells)
            rows.append(row)
    return rows


@study.table(
    needs=("spire",),
    takes=("vanilla", "draft", "others", "window", "contexts"),
    tasks=DOMAINS,
    prompts=32,
    repeats=1,
    max_new_tokens=TOKENS,
)
def table_1(ask: SpireFlags) -> Iterator[Table | None]:
    """Tau at k = 4 by context, from the engine: sampled drafts, rejection, T=1; with the target's noise; greedy."""
    names, texts, contexts = contestants(ask), texts_of(ask), ask.contexts_or(CONTEXTS)
    grids = grids_of(ask, contexts)
    every = replace(ask, tasks=",".join(task for own in texts.values() for task in own))
    for grid in grids.values():
        grid.config(every)
    yield None
    lent = partial(LentRun, known={})
    reports = {name: measure(grid, every, ask.out / f"table_1-{name}", lent) for name, grid in grids.items()}
    groups = {**texts, **{task: [task] for own in texts.values() for task in own}}
    found = {words: rows_of(reports, names, tasks, contexts) for words, tasks in groups.items()}
    first = next(iter(grids))
    yield Table(
        title=f"Tau at k = {DEPTH}",
        head=("context", "draft", *KINDS),
        parts={words: [_told(row) for row in rows] for words, rows in found.items()},
        values={"tau": {words: [_listed(row) for row in rows] for words, rows in found.items()}, "depth": DEPTH},
        remarks=[*_verdicts(found[OWN]), *SAID, TAU, INTERVALS],
        how=how(reports[first], grids[first].facts),
        same=all(one.passed for report in reports.values() for one in report.exactness),
    )


def _told(row: Mapping[str, Any]) -> list[str]:
    return [f"{row['context']:,}", row["draft"], *(shown(row[kind]) for kind in KINDS)]


def _listed(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.listed if isinstance(value, BoundedMean) else value for name, value in row.items()}


def _verdicts(rows: Rows) -> list[str]:
    """What was wanted at every context: the paper's tau, and its order."""
    said = []
    for context in dict.fromkeys(row["context"] for row in rows):
        found = {row["draft"]: row["T=1"].value for row in rows if row["context"] == context and row["T=1"]}
        if SPIRE in found:
            said.append(
                verdict(f"context {context}: SPIRe {found[SPIRE]:.2f}, {WANTED:.2f} wanted", found[SPIRE] >= WANTED)
            )
        for small in sorted({VANILLA, DRAFT} & {*found}) if {MAGICDEC, SPIRE} <= {*found} else ():
            order = found[MAGICDEC] > found[SPIRE] > found[small]
            said.append(verdict(f"context {context}: MagicDec above SPIRe above {small}", order))
    return said


@study.figure(
    needs=("spire",), takes=("draft", "vanilla", "window"), tasks=DOMAINS, prompts=8, repeats=2, max_new_tokens=TOKENS
)
def depths(ask: SpireFlags) -> Grid:
    """Tau and throughput by depth, k = 1 to 8: drafts with the target's noise, T=1, context 960."""
    entries = [
        Entry(replace(method_of(ask, name, k, "sample_and_match"), name=f"{name}, k={k}"), name, k)
        for name in contestants(ask)
        for k in ask.few(DEPTHS)
    ]
    cells = {"contexts": (MIDDLE,), "temperatures": (1.0,)}
    return Grid(title="Tau and throughput by depth", entries=entries, x_label="k", cells=cells)


@study.table(
    needs=("spire",), takes=("draft", "vanilla", "window"), tasks=DOMAINS, prompts=32, repeats=1, max_new_tokens=TOKENS
)
def verification(ask: SpireFlags) -> Iterator[Table | None]:
    """Block verification beside token verification: tau at T=1, k = 4, context 960."""
    context, verifiers = MIDDLE, {"token": "rejection", "block": "block"}
    methods = {
        (name, words): replace(method_of(ask, name, verifier=verifier), name=f"{name}, {words}")
        for name in contestants(ask)
        for words, verifier in verifiers.items()
    }
    title = f"Tau at k = {DEPTH} by how drafts are verified, T=1, context {context}"
    cells = {"contexts": (context,), "temperatures": (1.0,)}
    grid = Grid(title=title, entries=[Entry(method, method.name) for method in methods.values()], cells=cells)
    grid.config(ask)
    yield None
    report = measure(grid, ask, ask.out / "verification")
    rows, values = [], []
    for name in contestants(ask):
        found = {
            words: tau_of(
                report, TaskCells(method=methods[name, words].name, tasks=ask.names, context=context, temperature=1.0)
            )
            for words in verifiers
        }
        token, block = found["token"], found["block"]
        gain = f"{block.value / token.value:.3f}" if token and block else ""
        rows.append([name, shown(token), shown(block), gain])
        values.append({"draft": name, **{words: one and one.listed for words, one in found.items()}})
    yield Table(
        title=title,
        head=("draft", "token verification", "block verification", "block over token"),
        parts={"": rows},
        values={"tau": values, "context": context},
        remarks=[TAU, INTERVALS],
        how=how(report, grid.facts),
    )
