"""One half of the prompts chooses settings, the other half reports them.

A setting that is the best of several on some prompts is partly the best by chance, so its figures on these very
prompts are too good. Which half a prompt is in depends on ids and a fixed seed alone: runs of the same prompts agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256

from paceline.bench.records import Report, Trial

SEED = 20261122  # of the split
Key = tuple[str, str]  # workload, and the conversation's first prompt


def halves(report: Report) -> tuple[Report, Report]:
    """A run's trials on the prompts that choose, and those on the prompts that report, one more where they are odd.

    The turns of a conversation stay together, and so does a batch, by its first prompt. A workload with a single
    conversation has nothing to choose by: its trials report.
    """
    keys = _keys(report.trials)
    choosing: set[Key] = set()
    for workload in {workload for workload, _ in keys}:
        known = sorted({key for key in keys if key[0] == workload}, key=_order)
        choosing.update(known[: len(known) // 2])
    parts = (
        [t for t, key in zip(report.trials, keys, strict=True) if (key in choosing) == half] for half in (True, False)
    )
    first, second = (replace(report, trials=trials) for trials in parts)
    return first, second


def conversations(trials: Sequence[Trial]) -> dict[str, int]:
    """How many of each workload there are (batches, where several prompts run at once)."""
    found = [workload for workload, _ in {*_keys(trials)}]
    return {workload: found.count(workload) for workload in sorted({*found})}


def _keys(trials: Sequence[Trial]) -> list[Key]:
    """Of each trial; a later turn is called as the first one, with /2 and so on at its end."""
    ids = {(trial.cell.workload, name) for trial in trials for name in trial.prompts}
    found = []
    for trial in trials:
        own = trial.cell.workload, trial.prompts[0]
        first, _, turn = trial.prompts[0].rpartition("/")
        of_first = trial.cell.workload, first
        found.append(of_first if turn.isdecimal() and of_first in ids else own)
    return found


def _order(key: Key) -> str:
    return sha256(f"{SEED}/{key[0]}/{key[1]}".encode()).hexdigest()
