"""A world without a model, for draft budgets: what steps cost, who proposes what, and what is accepted.

The clock is simulated: a run says how many tokens came out in how many milliseconds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from paceline.engine.budget import StepRecord
from paceline.engine.costs import CostTable

STEP_COSTS: dict[str, Callable[[float], float]] = {  # ms by rows
    "flat": lambda rows: 5.0 + 0.01 * rows,
    "stairs": lambda rows: 5.0 + 0.06 * max(0.0, rows - 8) + 0.02 * min(rows, 8),
    "linear": lambda rows: 4.0 + 0.4 * rows,
    "steep": lambda rows: 1.0 + 2.0 * rows,
    "jump": lambda rows: 5.0 if rows < 2 else 9.0 + 0.05 * rows,  # float32: two rows take another path than one
}


@dataclass
class World:
    """One machine, one drafter, one kind of text.

    Args:
        costs: ms of a step by rows.
        sequence_ms: more for every further sequence.
        acceptance: chance of each next drafted token, by step of the world.
        offer: chance that the drafter proposes anything, and the length of what it proposes.
        level_ms, ask_ms, unseen_ms: the drafter's time: by level, by sequence asked, by token not seen yet.
        noise: standard deviation of the log of a step's time.
        hiccup: chance of a step that takes ten times as long.
        table_error: factor by which the table that the budget is given is wrong.
    """

    costs: Callable[[float], float]
    sequence_ms: float = 0.05
    acceptance: Callable[[int], float] = lambda step: 0.6
    offer: float = 1.0
    longest: int = 64
    level_ms: float = 0.0
    ask_ms: float = 0.03
    unseen_ms: float = 0.0
    noise: float = 0.05
    hiccup: float = 0.0
    table_error: float = 1.0
    prompt: int = 100
    answer: int = 64
    prepares: bool = False  # a sequence drafts only what its last step prepared, where that had a budget
    seed: int = 0

    def step_ms(self, sequences: int, extra: float) -> float:
        """Without noise and without the drafter."""
        return self.costs(sequences + extra) + self.sequence_ms * (sequences - 1)

    def table(self) -> CostTable:
        """What a calibration would have measured, times the error."""
        sizes = (1, 2, 4, 8, 16, 32, 64, 128)
        return CostTable(
            chain=tuple((r, self.costs(r) * self.table_error) for r in sizes),
            plain=tuple((b, self.step_ms(b, 0) * self.table_error) for b in sizes),
        )


@dataclass
class Ran:
    """What came of a run."""

    tokens: int = 0
    ms: float = 0.0
    drafted_steps: int = 0
    steps: int = 0
    history: list[int] = field(default_factory=list)  # nodes planned a step, over the batch

    @property
    def speed(self) -> float:
        """Tokens a millisecond."""
        return self.tokens / self.ms


class Sequence:
    """What a budget looks at of a running sequence."""

    def __init__(self, key: int, world: World) -> None:
        self.view = SimpleNamespace(key=key, tokens=[0] * world.prompt)
        self.max_len = world.prompt + world.answer
        self.seen = 0
        self.ready = True  # a prompt's last pass prepares a draft
        self.state = SimpleNamespace(stats=SimpleNamespace(passes=0, drafted=0))

    @property
    def finished(self) -> bool:
        return len(self.view.tokens) >= self.max_len


def run(budget: Any, world: World, batch: int, steps: int) -> Ran:
    """Decode with ``batch`` requests at any time, a new one for each that ends."""
    draw, luck = random.Random(world.seed), random.Random(world.seed + 1000)
    ran = Ran()
    made = 0
    live: list[Sequence] = []
    for step in range(steps):
        while len(live) < batch:
            made += 1
            live.append(Sequence(made, world))
            live[-1].view.tokens.append(0)  # the prompt's pass brought the first token
        able = [s for s in live if s.max_len - len(s.view.tokens) > 1]
        given = dict(zip(map(id, able), budget.plan(able, len(live)), strict=True)) if able else {}
        budgets = [given.get(id(s), 0) for s in live]
        ran.history.append(sum(budgets))
        drafted, accepted = [], []
        draft_ms = 0.0
        for sequence, nodes in zip(live, budgets, strict=True):
            offered = min(nodes, world.longest) if draw.random() < world.offer else 0
            if world.prepares:
                offered, sequence.ready = offered if sequence.ready else 0, nodes > 0
            right = 0
            while right < offered and draw.random() < world.acceptance(step):
                right += 1
            room = sequence.max_len - len(sequence.view.tokens) - 1
            right = min(right, room)
            drafted.append(offered)
            accepted.append(right)
            if nodes:
                draft_ms += world.ask_ms + world.unseen_ms * (len(sequence.view.tokens) - sequence.seen)
                sequence.seen = len(sequence.view.tokens)
        draft_ms += world.level_ms * max(budgets)
        rest_ms = world.step_ms(len(live), sum(drafted)) * math.exp(luck.gauss(0, world.noise))
        # A hiccup is not in the time that is compared, which would be that of the luckier run.
        seen_ms = rest_ms * (10 if luck.random() < world.hiccup else 1)
        for sequence, right in zip(live, accepted, strict=True):
            sequence.view.tokens += [0] * (right + 1)
            ran.tokens += right + 1
        ran.ms += draft_ms + rest_ms
        ran.steps += 1
        ran.drafted_steps += any(budgets)
        if budget.learns:
            budget.observe(
                StepRecord(
                    sequences=list(live),  # type: ignore[arg-type]
                    budgets=budgets,
                    drafted=drafted,
                    accepted=accepted,
                    pure=True,
                    draft_ms=draft_ms,
                    rest_ms=seen_ms,
                )
            )
        ended = [s for s in live if s.finished]
        budget.forget(ended)
        live = [s for s in live if not s.finished]
    return ran
