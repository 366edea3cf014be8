"""Conditional acceptance, step by step (table 1), and naive beam sampling against Algorithm 1 (section 5.2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lyanna_parts.common import DIALOGUE, FRESH_TREE, FULL_ROWS, STEPS, Asked, lyanna, shape_of, study, verdict
from paceline.bench.grid import how
from paceline.bench.records import Report, Trial
from paceline.bench.scores import workload_of
from paceline.bench.study import Entry, Grid, Table, measure
from paceline.bench.summary import RESAMPLES, SEED, percentile_bounds
from paceline.core.errors import ConfigError

Floats = NDArray[np.float64]
FULL, NO_INFO, NO_FIRST = "full", "without token-info", "without first token"
MEAN = "mean of tasks"
WANTED = {"sql": (0.91, 0.80, 0.70), MEAN: (0.85, 0.72, 0.62)}  # the paper's for its 7B target; the mean: our own aim
SWEPT_NODES = (4, 8, 12, 16, 24)
REMARKS = (
    "step d: of the passes that accepted d - 1 drafted tokens, the share that accepted the d-th (step 1: of all passes "
    "with a draft). A node that the tree does not have counts as a miss, and so does an end by the answer's limit",
    "intervals: 95%, bootstrap over prompts; a mean of tasks weighs each alike",
)


def arms(ask: Asked) -> dict[str, str]:
    """The three folders of table 1.

    Raises:
        ConfigError: one is not what it is named as, or differs in more than that.
    """
    folders = {FULL: str(ask.lyanna), NO_INFO: str(ask.without_info), NO_FIRST: str(ask.without_first)}
    shapes = {arm: shape_of(folder) for arm, folder in folders.items()}
    for arm, shape in shapes.items():
        parts = bool(shape.rank), shape.first_token
        wanted = arm != NO_INFO, arm != NO_FIRST
        if parts != wanted:
            words = ["with" if has else "without" for has in parts]
            wrong = f"it was trained {words[0]} token-info and {words[1]} the first token"
            raise ConfigError(f"{arm}: {folders[arm]}", wrong, "name the folder that is meant")
        full = shapes[FULL]
        if any(getattr(shape, name) != getattr(full, name) for name in ("layer", "fusion", "fingerprint")):
            raise ConfigError(f"{arm}: {folders[arm]}", "its layer or target is another", "train all three alike")
    return folders


@dataclass(frozen=True, slots=True)
class Counts:
    """Of each prompt: passes with a draft, and those that accepted 1, 2, .. tokens or more."""

    reached: Floats  # [prompts, 1 + STEPS]

    @staticmethod
    def of(trials: Sequence[Trial]) -> Counts:
        """Of trials with a prompt each."""
        rows = []
        for trial in trials:
            kept = [*trial.depth_accepted, *[0] * STEPS][:STEPS]
            rows.append([sum(trial.depth_offered[:1]), *kept])
        return Counts(np.array(rows, dtype=np.float64).reshape(-1, 1 + STEPS))

    def shares(self) -> tuple[Floats, Floats]:
        """[STEPS] conditional acceptance, and [resamples, STEPS] the same of drawn prompts."""
        draw = np.random.default_rng(SEED).integers(0, len(self.reached), (RESAMPLES, len(self.reached)))
        return _shares(self.reached.sum(0)), _shares(self.reached[draw].sum(1))


def _shares(reached: Floats) -> Floats:
    """[.., STEPS] from [.., 1 + STEPS]; 0 where no pass came so far."""
    before = reached[..., :-1]
    return np.divide(reached[..., 1:], before, out=np.zeros_like(before), where=before > 0)


@dataclass(frozen=True, slots=True)
class Step:
    """One cell of the table."""

    value: float
    low: float
    high: float

    @property
    def text(self) -> str:
        """With its interval."""
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def conditional(report: Report, names: Sequence[str], tasks: Mapping[str, str]) -> dict[str, dict[str, list[Step]]]:
    """Of every task, and of `MEAN` where there are several: the steps of every method.

    Args:
        names: of methods.
        tasks: workload -> task.

    Raises:
        ConfigError: a method without a trial that went well.
    """
    found: dict[str, dict[str, list[Step]]] = {}
    for name in names:
        parts = []
        for workload, task in tasks.items():
            own = [t for t in report.trials if (t.method, t.cell.workload) == (name, workload) and t.error is None]
            if not own:
                raise ConfigError(f"{name} on {task}", "no prompt was answered", "see the report beside the table")
            parts.append(Counts.of(own).shares())
            found.setdefault(task, {})[name] = _steps(*parts[-1])
        if len(parts) > 1:
            means = [np.mean([part[i] for part in parts], axis=0) for i in range(2)]
            found.setdefault(MEAN, {})[name] = _steps(means[0], means[1])
    return {task: found[task] for task in sorted(found, key=lambda task: task == MEAN)}


def _steps(values: Floats, drawn: Floats) -> list[Step]:
    return [Step(float(v), *percentile_bounds(column)) for v, column in zip(values, drawn.T, strict=True)]


@study.table(needs=("lyanna", "without_info", "without_first"), tasks=DIALOGUE, prompts=100, repeats=1)
def table_1(ask: Asked) -> Iterator[Table | None]:
    """Conditional acceptance at steps 1 to 3, from the engine: full, without token-info, without the first token."""
    shape = {**FRESH_TREE, "nodes": FULL_ROWS}
    methods = [lyanna(arm, folder, FULL_ROWS, **shape) for arm, folder in arms(ask).items()]
    title = f"Conditional acceptance by step ({STEPS} steps, {FRESH_TREE['width']} branches, {FULL_ROWS} verified)"
    grid = Grid(title=title, entries=[Entry(method, method.name) for method in methods])
    grid.config(ask)
    yield None
    report = measure(grid, ask, ask.out / "table_1")
    tasks = {workload_of(task): task for task in ask.names}
    names = [method.name for method in methods]
    found = conditional(report, names, tasks)
    counts = {task: len({t.group for t in report.trials if t.cell.workload == w}) for w, task in tasks.items()}
    yield Table(
        title=title,
        head=("task", "drafter", *(f"step {d}" for d in range(1, STEPS + 1)), "prompts"),
        parts={
            "": [
                [task, name, *(step.text for step in of[name]), str(counts.get(task, sum(counts.values())))]
                for task, of in found.items()
                for name in names
            ]
        },
        values={
            "acceptance": {
                task: {name: [[s.value, s.low, s.high] for s in steps] for name, steps in of.items()}
                for task, of in found.items()
            },
            "prompts": counts,
        },
        remarks=[*verdicts(found), *REMARKS],
        how=how(report, grid.facts),
        same=all(one.passed for one in report.exactness),
    )


def verdicts(found: Mapping[str, Mapping[str, Sequence[Step]]]) -> list[str]:
    """What was wanted of the full drafter, and where another one is better."""
    said = []
    of_paper = {*found} == {*DIALOGUE.split(","), MEAN}
    for task, aims in WANTED.items():
        if task in found and (task != MEAN or of_paper):
            steps = zip(found[task][FULL], aims, strict=True)
            said += [verdict(f"{task}, step {d}", step.value, aim) for d, (step, aim) in enumerate(steps, 1)]
    worse = [
        f"{task}, step {d + 1}: {name} is better than {FULL} ({of[name][d].value:.3f}, {of[FULL][d].value:.3f})"
        for task, of in found.items()
        for name in of
        for d in range(STEPS)
        if of[name][d].value > of[FULL][d].value
    ]
    return said + (worse or [f"{FULL} is nowhere worse than the other two"])


@study.figure(needs=("lyanna",), takes=("without_info",), prompts=8)
def beam_against_algorithm_1(ask: Asked) -> Grid:
    """Naive beam sampling against Algorithm 1, by nodes (section 5.2); and a drafter that never had token-info."""
    shape_of(ask.lyanna)
    ways: dict[str, tuple[str | None, dict[str, Any]]] = {
        "Algorithm 1": (ask.lyanna, {"sampling": "token_info"}),
        "beam sampling": (ask.lyanna, {"sampling": "beam"}),
    }
    if ask.without_info:
        if shape_of(ask.without_info).rank:
            raise ConfigError(f"--without-info {ask.without_info}", "it has token-info", "name one trained without")
        ways["beam sampling, trained without token-info"] = ask.without_info, {"sampling": "beam"}
    entries = [
        Entry(lyanna(f"{way}, {n}", folder, n, **FRESH_TREE, nodes=n, proposes="point", **more), way, n)
        for n in ask.few(SWEPT_NODES)
        for way, (folder, more) in ways.items()
    ]
    return Grid(title="Beam sampling against Algorithm 1", entries=entries, x_label="nodes verified")
