"""Streams against a draft model of its own: the same prompts (table 5), and the analysis (eq. 10, figure 20)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from kit import figures
from kit.figures import Panel, Series
from kit.grid import GridLine, how, split_lines
from kit.halves import halves
from kit.scores import TASK_WORKLOADS
from kit.study import Entry, Table, measure

from paceline.bench import report as say
from paceline.bench.records import PLAIN, Method, Report, Trial
from paceline.bench.summary import Summary, overall_ratio
from streaming.applications import BASE, scored, scores_of
from streaming.common import CHOOSE, CUT, StreamingFlags, TrainedSet, grid_of, study, written

DEPTHS = (1, 2, 4, 6)  # tokens that the draft model drafts
TWO_MODELS, ONE_MODEL, LOOK_UPS = "two models", "streams", "look-ups"
RATIOS = (2, 5, 10, 20, 50)  # of a target pass to a draft pass
GAMMA = 4  # of the analysis
ADVANCES = [0.6 + 0.1 * i for i in range(15)]  # zeta / beta


def two_models(draft: str, depth: int) -> Method:
    """Standard draft-target decoding: the draft model makes a chain token by token, then the target checks it."""
    drafter = written(f"draft_model:{draft}", {"depth": depth})
    return Method(name=f"draft model, {depth}", drafter=drafter, settings={"budget": depth})


# -- table 5


@study.table(needs=("set",), takes=("draft", "scored"), prompts=8, repeats=2)
def table_5(ask: StreamingFlags) -> Iterator[Table | None]:
    """Streams beside a draft model and look-ups: target calls, draft calls and latency of an answer, score."""
    trained = TrainedSet.read(str(ask.set))
    entries = [Entry(two_models(ask.draft_model, depth), TWO_MODELS) for depth in ask.few(DEPTHS)]
    entries += [Entry(Method(name=name, drafter=name.replace("-", "")), LOOK_UPS) for name in ("n-gram", "suffix")]
    entries += [Entry(trained.method("streams, chain", k=1), ONE_MODEL)]
    entries += [Entry(trained.method(f"streams, best {n}", k=3, nodes=n), ONE_MODEL) for n in (8, CUT)]
    grid = grid_of([trained], "a draft model of its own", entries, choose=CHOOSE)
    grid.config(ask)
    yield None
    report = measure(grid, ask, ask.out / "table_5")
    lines, choosing, said = split_lines(grid, report)
    found = {(line.task, line.method): line for line in lines}
    trials = by_task_and_method(halves(report)[1].trials)
    tasks = {TASK_WORKLOADS.get(task, task): task for task in ask.names}
    known = {task for task in tasks.values() if ask.scored and task in TASK_WORKLOADS}
    scores = {w: scores_of(ask, task, {})[BASE] if task in known else {} for w, task in tasks.items()}
    rows, values = [], []
    for workload, task in tasks.items():
        for name in (PLAIN, *(entry.method.name for entry in entries)):
            line, own = found.get((workload, name)), trials.get((workload, name), [])
            answer = per_answer(own, name.startswith("draft model")) if own else dict.fromkeys(ANSWER)
            values.append({"task": task, "method": name, **answer, "speedup": line.speedup if line else None})
            rows.append([task, name, *_cells(line), *(say.number(value) for value in answer.values())])
            exact = "failed" if line and line.error else line.exact if line else say.NOTHING
            rows[-1] += [scored(scores[workload]) or say.NOTHING, exact]
    yield Table(
        title="Streams beside a draft model of its own, an answer each",
        head=("task", "method", "chosen", "speed-up", "tokens a pass", *ANSWER.values(), "score", "ids exact"),
        parts={"": rows},
        values={"answers": values, "draft": ask.draft_model, "chosen_on": [vars(line) for line in choosing]},
        remarks=["no method changes an answer, so all have the target's score"],
        how=how(report, [*grid.facts, *said, "a draft call is a pass of the draft model: one a token of its chain"]),
        same=all(one.passed for one in report.exactness),
    )


ANSWER = {"target_calls": "target calls", "draft_calls": "draft calls", "latency_ms": "latency ms"}


def _cells(line: GridLine | None) -> list[str]:
    if line is None:
        return ["", "1", "1.00"]
    return ["yes" if line.chosen else "", line.bracketed, say.length(line.call_reduction)]


def by_task_and_method(trials: Sequence[Trial]) -> dict[tuple[str, str], list[Trial]]:
    """Trials that went well."""
    found: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        if trial.error is None:
            found.setdefault((trial.cell.workload, trial.method), []).append(trial)
    return found


def per_answer(trials: Sequence[Trial], calls_draft: bool) -> dict[str, float]:
    """Means over answers: passes of target and of the draft model, and ms (the median of an answer's repeats).

    Args:
        trials: of one method, a prompt each.
        calls_draft: whether each drafted token is a pass of a draft model, as in a chain.
    """
    times: dict[int, list[float]] = {}
    for trial in trials:
        times.setdefault(trial.group, []).append(trial.wall_ms)
    return {
        "target_calls": mean(trial.passes for trial in trials),
        "draft_calls": mean(trial.drafted for trial in trials) if calls_draft else 0.0,
        "latency_ms": mean(median(each) for each in times.values()),
    }


# -- figure 20


def advantage(gamma: float, ratio: float, advance: float, cost: float = 1.0) -> float:
    """How many times as fast as two-model decoding streams are, by eq. 10.

    Args:
        gamma: passes of the draft model a pass of the target.
        ratio: C_target / C_draft.
        advance: zeta / beta, tokens a pass of the two models over those of streams.
        cost: C_ss / C_target.
    """
    return (gamma / ratio + 1.0) / (advance * cost)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What one task says about both: means over passes, in ms, and tokens a pass."""

    task: str
    target_ms: float  # C_target
    draft_ms: float  # C_draft
    streams_ms: float  # C_ss
    gamma: float  # passes of the draft model a pass of the target
    zeta: float
    beta: float
    measured: float  # speed of streams over that of the two models

    @property
    def expected(self) -> float:
        """The same by eq. 10."""
        ratio, cost = self.target_ms / self.draft_ms, self.streams_ms / self.target_ms
        return advantage(self.gamma, ratio, self.zeta / self.beta, cost)


@study.figure(needs=("set",), takes=("draft",), prompts=6, repeats=2)
def figure_20(ask: StreamingFlags) -> Iterator[Table | None]:
    """Streams over two-model decoding by eq. 10, for several latency ratios; and what eq. 10 says of our own runs."""
    trained = TrainedSet.read(str(ask.set))
    pair = two_models(ask.draft_model, GAMMA), trained.method(f"streams, best {CUT}", k=3, nodes=CUT)
    grid = grid_of([trained], "two models", [Entry(method, method.name) for method in pair])
    grid.config(ask)
    yield None
    report = measure(grid, ask, ask.out / "figure_20")
    found = [costs_of(report, *pair, workload) for workload in dict.fromkeys(t.cell.workload for t in report.trials)]
    shown = ("target_ms", "draft_ms", "streams_ms", "gamma", "zeta", "beta", "expected", "measured")
    names = ("C_target ms", "C_draft ms", "C_ss ms", "gamma", "zeta", "beta", "streams over two models by eq. 10")
    yield Table(
        title="Streams over a draft model: eq. 10 and what was measured",
        head=("task", *names, "measured"),
        parts={"": [[one.task, *(f"{getattr(one, name):.2f}" for name in shown)] for one in found]},
        values={"tasks": [{**vars(one), "expected": one.expected} for one in found]},
        remarks=["eq. 10 leaves out prompts and all that is done between passes"],
        how=how(report, grid.facts),
        plots={".svg": lambda path: _draw(found, path)},
        same=all(one.passed for one in report.exactness),
    )


def costs_of(report: Report, drafted: Method, streamed: Method, workload: str) -> Costs:
    """Times of passes from the engine's own clocks, prompts included in none but the first pass."""
    trials = by_task_and_method(report.trials)
    plain, two, one = (trials[workload, name] for name in (PLAIN, drafted.name, streamed.name))
    cells = {trial.cell for trial in two}
    ratio = overall_ratio(Summary(report), streamed.name, drafted.name, cells)
    calls = _sum(two, "drafted")
    return Costs(
        task=workload,
        target_ms=_sum(plain, "verify_ms") / _sum(plain, "passes"),
        draft_ms=_sum(two, "draft_ms") / max(calls, 1),
        streams_ms=(_sum(one, "verify_ms") + _sum(one, "draft_ms")) / _sum(one, "passes"),
        gamma=calls / _sum(two, "passes"),
        zeta=_sum(two, "tokens") / _sum(two, "passes"),
        beta=_sum(one, "tokens") / _sum(one, "passes"),
        measured=ratio.value if ratio else float("nan"),
    )


def _sum(trials: Sequence[Trial], name: str) -> float:
    return float(sum(getattr(trial, name) for trial in trials))


def _draw(found: Sequence[Costs], path: Path) -> Path:
    series = [
        Series(label=f"C_target / C_draft = {ratio}", x=ADVANCES, y=[advantage(GAMMA, ratio, x) for x in ADVANCES])
        for ratio in RATIOS
    ]
    labels: Mapping[str, Any] = {"x_label": "zeta / beta", "y_label": "speed of streams over that of two models"}
    theory = Panel(title=f"Eq. 10, gamma={GAMMA}, C_ss = C_target", series=series, line_at=1.0, **labels)
    tasks = [one.task for one in found]
    told = [
        Series(label="by eq. 10", x=tasks, y=[one.expected for one in found]),
        Series(label="measured", x=tasks, y=[one.measured for one in found]),
    ]
    ours = Panel(title="Our runs", series=told, x_label="task", y_label=labels["y_label"], line_at=1.0)
    return figures.lines([theory, ours], path)
