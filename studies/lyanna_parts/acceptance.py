"""Conditional acceptance, step by step (table 1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kit.grid import how
from kit.scores import workload_of
from kit.study import Entry, Grid, Table, measure
from numpy.typing import NDArray

from lyanna_parts.common import DIALOGUE, FRESH_TREE, FULL_ROWS, STEPS, LyannaFlags, lyanna, shape_of, study
from paceline.bench.records import Report, Trial
from paceline.bench.summary import RESAMPLES, SEED, percentile_bounds
from paceline.core.errors import ConfigError
from paceline.model.hot import load_hot, save_hot
from paceline.papers.lyanna.model import FILES, LyannaModel
from paceline.weights.source import resolve_folder

Floats = NDArray[np.float64]
TRAINED, INFO_TAKEN, FIRST_TAKEN = "as trained", "token-info taken away at use", "first token taken away at use"
TAKEN: Mapping[str, Mapping[str, Any]] = {  # what of a drafter's shape is changed
    INFO_TAKEN: {"rank": 0},
    FIRST_TAKEN: {"first_token": False},
}
MEAN = "mean of tasks"
PAPER = (0.91, 0.80, 0.70)  # table 1, the last row: of LLaMA-2-7B
SWEPT_NODES = (4, 8, 12, 16, 24)
TITLE = f"Conditional acceptance by step ({STEPS} steps, {FRESH_TREE['width']} branches, {FULL_ROWS} verified)"
REMARKS = (
    "step d: of the passes that accepted d - 1 drafted tokens, the share that accepted the d-th (step 1: of all passes "
    "with a draft). A node that the tree does not have counts as a miss, and so does an end by the answer's limit",
    "intervals: 95%, bootstrap over prompts; a mean of tasks weighs each alike",
)


@torch.no_grad()
def without(folder: str, change: Mapping[str, Any], place: Path) -> str:
    """Write a trained drafter that lacks a part: its other parameters are as they were trained.

    Args:
        folder: of the drafter.
        change: of its shape; an entry of `TAKEN`.
        place: where it is written.

    Returns:
        ``place``.
    """
    whole = LyannaModel.load(resolve_folder(folder))
    made = LyannaModel(replace(whole.shape, **change))
    values = whole.tensors()
    FILES.copy(made.tensors(), {name: values[name] for name in made.tensors()}, place)
    made.save(place)
    drafted = load_hot(resolve_folder(folder), whole.head.config.vocab_size)
    if drafted is not None:  # of the same tokens
        save_hot(drafted, place)
    return str(place)


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

    def shares(self) -> Shares:
        """Conditional acceptance. The same prompts are drawn for every method, so that differences are paired."""
        draw = np.random.default_rng(SEED).integers(0, len(self.reached), (RESAMPLES, len(self.reached)))
        return Shares(_shares(self.reached.sum(0)), _shares(self.reached[draw].sum(1)))


def _shares(reached: Floats) -> Floats:
    """[.., STEPS] from [.., 1 + STEPS]; 0 where no pass came so far."""
    before = reached[..., :-1]
    return np.divide(reached[..., 1:], before, out=np.zeros_like(before), where=before > 0)


@dataclass(frozen=True, slots=True)
class Shares:
    """A line of the table, or the difference of two."""

    values: Floats  # [STEPS]
    drawn: Floats  # [resamples, STEPS] the same of drawn prompts

    @staticmethod
    def mean(parts: Sequence[Shares]) -> Shares:
        """Each weighs alike."""
        return Shares(np.mean([p.values for p in parts], axis=0), np.mean([p.drawn for p in parts], axis=0))

    def less(self, other: Shares) -> Shares:
        """How much lower ``other`` is."""
        return Shares(self.values - other.values, self.drawn - other.drawn)

    @property
    def cells(self) -> list[list[float]]:
        """Of each step: value, and 95% of the drawn ones."""
        return [[float(v), *percentile_bounds(d)] for v, d in zip(self.values, self.drawn.T, strict=True)]

    @property
    def texts(self) -> list[str]:
        """Each with its interval."""
        return [f"{value:.3f} [{low:.3f}, {high:.3f}]" for value, low, high in self.cells]


Found = Mapping[str, Mapping[str, Shares]]  # task -> method -> its line


def conditional(report: Report, names: Sequence[str], tasks: Mapping[str, str]) -> Found:
    """Of every task, and of `MEAN` where there are several: the line of every method.

    Args:
        names: of methods.
        tasks: workload -> task.

    Raises:
        ConfigError: a method without a trial that went well.
    """
    found: dict[str, dict[str, Shares]] = {task: {} for task in tasks.values()}
    for name in names:
        for workload, task in tasks.items():
            own = [t for t in report.trials if (t.method, t.cell.workload) == (name, workload) and t.error is None]
            if not own:
                raise ConfigError(f"{name} on {task}", "no prompt was answered", "see the report beside the table")
            found[task][name] = Counts.of(sorted(own, key=lambda t: (t.group, t.repeat))).shares()
    if len(tasks) > 1:
        found[MEAN] = {name: Shares.mean([found[task][name] for task in tasks.values()]) for name in names}
    return found


def acceptance_table(ask: LyannaFlags, folders: Mapping[str, str], name: str) -> tuple[Table, Found]:
    """Measure some drafters; the table has no remarks of its own yet."""
    shape = {**FRESH_TREE, "nodes": FULL_ROWS}
    entries = [Entry(lyanna(arm, folder, FULL_ROWS, **shape), arm) for arm, folder in folders.items()]
    grid = Grid(title=TITLE, entries=entries)
    report = measure(grid, ask, ask.out / name)
    tasks = {workload_of(task): task for task in ask.names}
    found = conditional(report, [*folders], tasks)
    counts = {task: len({t.group for t in report.trials if t.cell.workload == w}) for w, task in tasks.items()}
    table = Table(
        title=TITLE,
        head=("task", "drafter", *(f"step {d}" for d in range(1, STEPS + 1)), "prompts"),
        parts={
            "": [
                [task, arm, *line.texts, str(counts.get(task, sum(counts.values())))]
                for task, of in found.items()
                for arm, line in of.items()
            ]
        },
        values={
            "acceptance": {task: {arm: line.cells for arm, line in of.items()} for task, of in found.items()},
            "prompts": counts,
        },
        remarks=REMARKS,
        how=how(report, grid.facts),
        same=all(one.passed for one in report.exactness),
    )
    return table, found


@study.table(needs=("lyanna",), tasks=DIALOGUE, prompts=100, repeats=1)
def table_1_shipped(ask: LyannaFlags) -> Iterator[Table | None]:
    """Conditional acceptance of a trained drafter beside the paper's, and what it loses without each part at use."""
    shape = shape_of(ask.lyanna)
    if not (shape.rank and shape.first_token):
        wrong = "it was trained without token-info or the first token"
        raise ConfigError(f"--lyanna {ask.lyanna}", wrong, "name a drafter that has both")
    yield None
    place = ask.out / "table_1_shipped-drafters"
    lacking = {arm: without(str(ask.lyanna), change, place / arm.replace(" ", "-")) for arm, change in TAKEN.items()}
    table, found = acceptance_table(ask, {TRAINED: str(ask.lyanna), **lacking}, "table_1_shipped")
    yield replace(table, remarks=[*beside_paper(found), *losses(found), *REMARKS])


def beside_paper(found: Found) -> list[str]:
    """Every step of the drafter as it was trained, on every task, beside the paper's."""
    return [
        f"{task}, step {d}: {value:.3f} [{low:.3f}, {high:.3f}], the paper's {aim:.2f}: {_beside(low, high, aim)}"
        for task, of in found.items()
        for d, ((value, low, high), aim) in enumerate(zip(of[TRAINED].cells, PAPER, strict=True), 1)
    ]


def _beside(low: float, high: float, aim: float) -> str:
    return "reached" if low >= aim else "not reached" if high < aim else "the interval holds it"


def losses(found: Found) -> list[str]:
    """What a part that is taken away costs."""
    return [
        f"{task}: {arm}, lower by {', '.join(of[TRAINED].less(line).texts)}"
        for task, of in found.items()
        for arm, line in of.items()
        if arm != TRAINED
    ]
