"""What the engine accepts: tau by context (table 1), by depth, and under block verification."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.bench.grid import how
from paceline.bench.records import Report
from paceline.bench.scores import workload_of
from paceline.bench.study import Entry, Grid, Table, measure
from spire_parts.common import (
    CONTEXTS,
    DEPTH,
    DOMAINS,
    INTERVALS,
    MAGICDEC,
    SPIRE,
    VANILLA,
    Asked,
    Mean,
    contestants,
    mean_of,
    method_of,
    study,
    tau,
    verdict,
)

WANTED = 3.40  # tau of SPIRe in its domains, T=1, k=4
OWN, OTHER = "the target's domains", "other text"
DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8)
TOKENS = 56  # of an answer: the longest context leaves room for so many
TAU = "tau: mean tokens of a pass with a draft, the target's own included; a mean of tasks weighs each alike"


@dataclass(frozen=True, kw_only=True)
class Cells:
    """Which trials a figure is of."""

    method: str
    tasks: Sequence[str]
    context: int | None
    temperature: float


def tau_of(report: Report, cells: Cells) -> Mean | None:
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


def texts_of(ask: Asked) -> dict[str, list[str]]:
    """Tasks of the target's domains, and those of other text."""
    others = [name.strip() for name in ask.others.split(",") if name.strip()]
    return {OWN: ask.names, **({OTHER: others} if others else {})}


def shown(found: Mean | None) -> str:
    """In a table."""
    return "failed" if found is None else found.text


@study.table(
    needs=("vanilla",), takes=("spire", "others", "window"), tasks=DOMAINS, prompts=32, repeats=1, max_new_tokens=TOKENS
)
def table_1(ask: Asked) -> Iterator[Table | None]:
    """Tau at k = 4 by context, from the engine: sampled drafts, rejection, T=1; greedy beside it."""
    names, texts, contexts = contestants(ask), texts_of(ask), ask.few(CONTEXTS)
    title = f"Tau at k = {DEPTH}: sampled drafts, verification by rejection"
    entries = [Entry(method_of(ask, name), name) for name in names]
    grid = Grid(title=title, entries=entries, cells={"contexts": contexts, "temperatures": (1.0, 0.0)})
    every = replace(ask, tasks=",".join(task for own in texts.values() for task in own))
    grid.config(every)
    yield None
    report = measure(grid, every, ask.out / "table_1")
    parts, values = {}, {}
    groups = {**texts, **{task: [task] for own in texts.values() for task in own}}
    for words, tasks in groups.items():
        rows, own = [], []
        for context in contexts:
            for name in names:
                sampled, greedy = (
                    tau_of(report, Cells(method=name, tasks=tasks, context=context, temperature=t)) for t in (1.0, 0.0)
                )
                rows.append([f"{context:,}", name, shown(sampled), shown(greedy)])
                own.append(
                    {"context": context, "draft": name}
                    | {"sampled": sampled and sampled.listed, "greedy": greedy and greedy.listed}
                )
        parts[words], values[words] = rows, own
    yield Table(
        title=title,
        head=("context", "draft", "tau at T=1", "tau, greedy"),
        parts=parts,
        values={"tau": values, "depth": DEPTH},
        remarks=[*_verdicts(values[OWN], names), TAU, INTERVALS],
        how=how(report, grid.facts),
        same=all(one.passed for one in report.exactness),
    )


def _verdicts(rows: Sequence[dict[str, object]], names: Sequence[str]) -> list[str]:
    """What was wanted at every context."""
    said = []
    for context in dict.fromkeys(row["context"] for row in rows):
        found: dict[str, float] = {}
        for row in rows:
            sampled = row["sampled"]
            if row["context"] == context and isinstance(sampled, list):
                found[str(row["draft"])] = sampled[0]
        if SPIRE in found:
            said.append(
                verdict(f"context {context}: SPIRe {found[SPIRE]:.2f}, {WANTED} wanted", found[SPIRE] >= WANTED)
            )
        if {*names} == {VANILLA, MAGICDEC, SPIRE} == {*found}:
            order = found[MAGICDEC] > found[SPIRE] > found[VANILLA]
            said.append(verdict(f"context {context}: MagicDec above SPIRe above vanilla", order))
    return said


@study.figure(needs=("vanilla",), takes=("spire", "window"), tasks=DOMAINS, prompts=8, repeats=2, max_new_tokens=TOKENS)
def depths(ask: Asked) -> Grid:
    """Tau and throughput by depth, k = 1 to 8: drafts with the target's noise, T=1, context 960."""
    entries = [
        Entry(replace(method_of(ask, name, k, "sample_and_match"), name=f"{name}, k={k}"), name, k)
        for name in contestants(ask)
        for k in ask.few(DEPTHS)
    ]
    cells = {"contexts": (CONTEXTS[1],), "temperatures": (1.0,)}
    return Grid(title="Tau and throughput by depth", entries=entries, x_label="k", cells=cells)


@study.table(needs=("vanilla",), takes=("spire", "window"), tasks=DOMAINS, prompts=32, repeats=1, max_new_tokens=TOKENS)
def verification(ask: Asked) -> Iterator[Table | None]:
    """Block verification beside token verification: tau at T=1, k = 4, context 960."""
    context, verifiers = CONTEXTS[1], {"token": "rejection", "block": "block"}
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
                report, Cells(method=methods[name, words].name, tasks=ask.names, context=context, temperature=1.0)
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
