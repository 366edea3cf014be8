"""Throughput by batch size beside other drafters (figures 8 and 9), and what re-sampling and fusion bring (12)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kit import figures
from kit.figures import Panel, Series
from kit.grid import ALL, GridLine, how, lines_of, whole
from kit.halves import conversations, halves
from kit.stretched import stretched
from kit.study import Entry, Grid, Table, measure, numbers

from lyanna_parts.common import (
    EXTRA,
    FRESH_TREE,
    ROWS,
    STEPS,
    WIDTH,
    LyannaFlags,
    drafting,
    lyanna,
    shape_of,
    study,
    verdict,
)
from paceline.bench import report as say
from paceline.bench.records import PLAIN, Cell, Method, Report
from paceline.bench.summary import Summary, overall_ratio
from paceline.weights import zoo

AUTO = ", auto"
LYANNA, EAGLE = "Lyanna", "EAGLE-2"
SINGLE, NEW, BEFORE = "single", "hybrid", "hybrid, before"  # series
HYBRID_NODES = 24
OVER_EAGLE, OVER_BEFORE = 1.2, 1.15  # wanted

# -- figures 8 and 9


def contestants(ask: LyannaFlags) -> list[tuple[str, str, int, dict[str, Any], str]]:
    """Name, drafter, fixed budget, options and series of every method; each verifies `ROWS` drafted nodes, Lyanna the
    re-sampled ones on top of them, hybrids `HYBRID_NODES`. A target without streams or a draft model does without."""
    ours = f"lyanna:{ask.lyanna}"
    streams, draft = named("streams", ask.streams, ask.model), named("draft_model", ask.draft, ask.model)
    tree = {"depth": STEPS, "nodes": ROWS}
    singles: list[tuple[str, str | None, int, dict[str, Any]]] = [
        (LYANNA, ours, ROWS + EXTRA, {**tree, "width": WIDTH, "extra": EXTRA}),
        (EAGLE, f"eagle:{ask.eagle}", ROWS, {**tree, "topk": WIDTH}),
        ("Medusa", f"medusa:{ask.medusa}", ROWS, {"nodes": ROWS}),
        ("draft model", draft, ROWS, {**tree, "topk": WIDTH}),
        ("n-gram", "ngram", ROWS, {}),
        ("suffix", "suffix", ROWS, {}),
        ("streams", streams, ROWS, {"k": 3, "nodes": ROWS}),
    ]
    beside_suffix: list[tuple[str, tuple[str | None, ...], str]] = [
        ("Lyanna", (f"{ours};depth={STEPS}",), NEW),
        ("EAGLE-2", (f"eagle:{ask.eagle};depth={STEPS}",), NEW),
        ("streams + Lyanna", (streams and f"{streams};k=3", f"{ours};depth={STEPS}"), NEW),
        ("draft model", (draft and f"{draft};depth=8",), BEFORE),
        ("streams", (streams and f"{streams};k=3",), BEFORE),
    ]
    hybrids = [
        (f"suffix + {name}", "+".join(("hybrid:suffix", *filter(None, parts))), kind)
        for name, parts, kind in beside_suffix
        if all(parts)
    ]
    return [
        *((name, drafter, rows, options, SINGLE) for name, drafter, rows, options in singles if drafter),
        *((name, parts, HYBRID_NODES, {"nodes": HYBRID_NODES}, kind) for name, parts, kind in hybrids),
    ]


def named(kind: str, given: str | None, model: str) -> str | None:
    """A drafter with the weights that are given, or the zoo's for the target; None: there are none."""
    found = given or zoo.weights(kind, model)
    return f"{kind}:{found}" if found else None


def both_budgets(ask: LyannaFlags) -> list[Entry]:
    """Every method with its fixed budget and with the automatic one."""
    return [
        Entry(drafting(name + mark, drafter, budget, **options), series)
        for name, drafter, fixed, options, series in contestants(ask)
        for mark, budget in (("", fixed), (AUTO, "auto"))
    ]


@study.figure(needs=("lyanna", "eagle", "medusa"), takes=("streams", "draft", "batches"), prompts=32, repeats=2)
def figure_8_9(ask: LyannaFlags) -> Iterator[Table | None]:
    """Throughput by batch size: Lyanna, EAGLE-2, Medusa, draft model, look-ups, streams, hybrids; budgets fixed and
    auto."""
    shape_of(ask.lyanna)
    batches = ask.few(numbers("--batches", ask.batches))
    cells: dict[str, Any] = {"cell": "batch", "cells": {"batches": batches}, "prompts": max(batches)}
    grid = Grid(title="Throughput by batch size", entries=both_budgets(ask), x_label="batch size", **cells)
    grid.config(ask)
    yield None
    report = measure(grid, ask, ask.out / "figure_8_9")
    lines, times = whole(lines_of(grid, report)), step_times(report)
    yield Table(
        title=grid.title,
        head=(
            *("batch", "method", "budget", "tokens/s", "speed-up over plain", "tokens a pass"),
            *("draft ms a step", "target ms a step", "ids equal plain"),
        ),
        parts={"": [_row(line, times) for line in sorted(lines, key=lambda line: float(line.x or 0))]},
        values={
            "lines": [vars_of(line) for line in lines],
            "times": [{"method": m, "batch": b, "draft_ms": d, "target_ms": t} for (m, b), (d, t) in times.items()],
        },
        remarks=[*beside_eagle(report), *hybrid_verdict(ask, report)],
        how=how(report, grid.facts),
        plots={
            ".svg": lambda path: _draw(lines, (SINGLE,), path),
            "-hybrids.svg": lambda path: _draw(lines, (NEW, BEFORE), path),
        },
        same=all(one.passed for one in report.exactness),
    )


def vars_of(line: GridLine) -> dict[str, Any]:
    """For JSON."""
    return {name: getattr(line, name) for name in line.__dataclass_fields__}


def step_times(report: Report) -> dict[tuple[str, int], tuple[float, float]]:
    """(method, batch) -> ms of drafting and of the target a step of the engine, over all tasks."""
    sums: dict[tuple[str, int], list[float]] = {}
    for trial in report.trials:
        if trial.error is None:
            own = sums.setdefault((trial.method, trial.cell.batch), [0.0, 0.0, 0.0])
            for i, value in enumerate((trial.draft_ms, trial.verify_ms, trial.steps)):
                own[i] += value
    return {key: (draft / max(1.0, n), target / max(1.0, n)) for key, (draft, target, n) in sums.items()}


def _row(line: GridLine, times: Mapping[tuple[str, int], tuple[float, float]]) -> list[str]:
    batch = int(line.x or 0)
    draft, target = times.get((line.method, batch), (None, None))
    name, budget = line.method.removesuffix(AUTO), "auto" if line.method.endswith(AUTO) else "fixed"
    speed = say.number(line.tokens_per_s), line.bracketed, say.length(line.call_reduction)
    exact = "failed" if line.error else line.exact
    return [str(batch), name, budget, *speed, say.number(draft), say.number(target), exact]


def cells_at(report: Report, batch: int | None = None) -> set[Cell]:
    """Its cells, of one batch size or of all."""
    return {trial.cell for trial in report.trials if batch in (None, trial.cell.batch)}


def beside_eagle(report: Report) -> list[str]:
    """Lyanna over EAGLE-2 at batch 2, with both budgets."""
    summary, said = Summary(report), []
    for mark, words in (("", "fixed budgets"), (AUTO, "automatic budgets")):
        ratio = overall_ratio(summary, LYANNA + mark, EAGLE + mark, cells_at(report, 2))
        told = f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio else ""
        what = f"{LYANNA} over {EAGLE} in throughput, batch 2, {words}"
        said.append(verdict(what, ratio.value if ratio else None, OVER_EAGLE, told))
    return said


def hybrid_verdict(ask: LyannaFlags, report: Report) -> list[str]:
    """The best new hybrid over the best method of before: one half of the prompts chooses both, the other reports."""
    entries, news = both_budgets(ask), ("Medusa", LYANNA, EAGLE)
    new = [e.method.name for e in entries if e.series == NEW]
    before = [e.method.name for e in entries if e.series != NEW and not e.method.name.startswith(news)]
    choosing, reporting = halves(report)
    chosen_by = choosing if choosing.trials else report
    a, b = best_of(chosen_by, new), best_of(chosen_by, before)
    if a is None or b is None:
        return ["the best hybrid: not measured"]
    ratio = overall_ratio(Summary(reporting), a, b, cells_at(reporting))
    told = f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio else ""
    how_many = ", ".join(f"{n} of {w}" for w, n in conversations(chosen_by.trials).items())
    what = f"best hybrid ({a}) over the best before ({b}), all batches (chosen on {how_many})"
    return [verdict(what, ratio.value if ratio else None, OVER_BEFORE, told)]


def best_of(report: Report, names: Iterable[str]) -> str | None:
    """The method that is fastest over plain decoding in the mean over all cells; None where none ran."""
    summary, cells = Summary(report), cells_at(report)
    found = {name: overall_ratio(summary, name, PLAIN, cells) for name in names}
    return max((n for n, r in found.items() if r), key=lambda n: found[n].value, default=None)  # type: ignore[union-attr]


def _draw(lines: Sequence[GridLine], series: Sequence[str], path: Path) -> Path:
    """Tokens/s by batch size, fixed budgets and automatic ones beside each other."""
    names = [*dict.fromkeys(line.method.removesuffix(AUTO) for line in lines if line.series in series)]
    panels = []
    for mark, title in (("", "Fixed budgets"), (AUTO, "Automatic budgets")):
        drawn = []
        for name in names:
            own = sorted((line for line in lines if line.method == name + mark), key=lambda line: float(line.x or 0))
            x, y = [float(line.x or 0) for line in own], [line.metric("speedup") for line in own]
            drawn.append(Series(label=name, x=x, y=y))
        axes: dict[str, Any] = {"x_label": "batch size", "y_label": "speed-up over plain decoding", "log_x": True}
        panels.append(Panel(title=title, series=drawn, line_at=1.0, columns=4, **axes))
    return figures.lines(panels, path)


# -- figure 12

OFF, TOP, MORE = "no re-sampling", "fused on top", "fresh tree of as many rows"
BATCH = 2  # of figure 12
ARMS: Mapping[str, tuple[int, dict[str, Any]]] = {  # budget, options
    OFF: (ROWS, {"extra": 0, "nodes": ROWS}),
    TOP: (ROWS + EXTRA, {"extra": EXTRA, "nodes": ROWS}),
    MORE: (ROWS + EXTRA, {"extra": 0, "nodes": ROWS + EXTRA}),
}
PAPER: Mapping[str, float] = {TOP: 1.231}  # fusion has 23.1% more than no re-sampling (section 7.3)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way of re-sampling on one target, over all tasks."""

    target: str
    line: GridLine
    tokens: float | None  # tokens a pass over those of `OFF`

    @property
    def speed(self) -> float | None:
        """Throughput over that of `OFF`."""
        return 1.0 if self.line.method == OFF else self.line.speedup


def fusion_arms(folder: str | None) -> list[Method]:
    """The methods of figure 12, plain decoding first."""
    shape = {"depth": STEPS, "width": FRESH_TREE["width"]}
    found = {name: lyanna(name, folder, budget, **shape, **options) for name, (budget, options) in ARMS.items()}
    return [Method(name=PLAIN, drafter="none"), *found.values()]


def targets_of(model: str, times: int) -> list[str]:
    """The target, and the same stretched so many times; 1: it stands alone."""
    return [model] if times == 1 else [model, stretched(model, times)]


@study.figure(needs=("lyanna",), takes=("stretched",), prompts=8, repeats=3)
def figure_12(ask: LyannaFlags) -> Iterator[Table | None]:
    """Re-sampling off and fused, and a fresh tree of as many rows; batch 2."""
    shape_of(ask.lyanna)
    entries = [Entry(method, method.name) for method in fusion_arms(ask.lyanna)]
    grid = Grid(title="Fusion", entries=entries, cells={"batches": (BATCH,)}, prompts=BATCH, over=OFF)
    asks = {model: replace(ask, model=model) for model in targets_of(ask.model, ask.stretched if ask.times == 1 else 1)}
    for one in asks.values():
        grid.config(one)
    yield None
    places = {model: f"target-{n}" for n, model in enumerate(asks)}
    reports = {m: measure(grid, one, ask.out / "figure_12" / places[m]) for m, one in asks.items()}
    found = [arm for model, report in reports.items() for arm in arms_of(Path(model).name, grid, report)]
    yield Table(
        title=f"Re-sampling and verification fusion, batch {BATCH}",
        head=(
            *("target", "task", "arm", "rows a pass", "tokens a pass", "over no re-sampling", "tokens/s"),
            *("throughput over no re-sampling", "ids equal plain"),
        ),
        parts={"": [_arm_row(arm) for arm in found]},
        values={"arms": [{"target": a.target, "tokens_ratio": a.tokens, **vars_of(a.line)} for a in found]},
        remarks=fusion_verdicts(found),
        how=[part for report in reports.values() for part in how(report, grid.facts)],
        plots={".svg": lambda path: _draw_arms(found, path)},
        same=all(one.passed for report in reports.values() for one in report.exactness),
    )


def arms_of(target: str, grid: Grid, report: Report) -> list[Arm]:
    """Every arm on every task and over all."""
    lines = lines_of(grid, report)
    base = {line.task: line.call_reduction for line in lines if line.method == OFF}

    def ratio(line: GridLine) -> float | None:
        of = base.get(line.task)
        return line.call_reduction / of if of and line.call_reduction else None

    return [Arm(target=target, line=line, tokens=ratio(line)) for line in lines]


def _arm_row(arm: Arm) -> list[str]:
    line = arm.line
    passes = say.number(line.drafted), say.length(line.call_reduction), say.length(arm.tokens)
    speed = say.number(line.tokens_per_s), "1" if line.method == OFF else line.bracketed
    return [arm.target, line.task, line.method, *passes, *speed, "failed" if line.error else line.exact]


def overall(found: Sequence[Arm]) -> list[Arm]:
    """Those over all tasks; of a single task its own."""
    return [arm for arm in found if arm.line.task == ALL] or list(found)


def fusion_verdicts(found: Sequence[Arm]) -> list[str]:
    """What every arm brings over no re-sampling on each target, beside the paper's where it has one."""
    said = []
    for target in dict.fromkeys(arm.target for arm in found):
        for arm in overall([arm for arm in found if arm.target == target]):
            name = arm.line.method
            if name in (PLAIN, OFF):
                continue
            paper = f" (the paper's: {PAPER[name]:.2f})" if name in PAPER else ""
            tokens, speed = say.length(arm.tokens), arm.line.bracketed
            said.append(f"{target}: {name}: {tokens} in tokens a pass, {speed} in throughput{paper}, over {OFF}")
    return said


def _draw_arms(found: Sequence[Arm], path: Path) -> Path:
    shown = overall(found)
    targets, names = [*dict.fromkeys(arm.target for arm in shown)], [*ARMS]
    panels = []
    for title, metric in (("Tokens a pass", "tokens"), ("Throughput", "speed")):
        series = []
        for target in targets:
            own = {arm.line.method: getattr(arm, metric) for arm in shown if arm.target == target}
            y = [float("nan") if own.get(name) is None else float(own[name]) for name in names]
            series.append(Series(label=target, x=names, y=y))
        panels.append(Panel(title=title, series=series, x_label=f"over {OFF}", y_label="", line_at=1.0))
    return figures.bars(panels, path)
