"""A world without a model, for draft budgets: what steps cost, who proposes what, and what is right.

The clock is simulated: a run says how many tokens came out in how many milliseconds. The text of every sequence is
`RIGHT` for ever; a drafted token that is wrong is `WRONG`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from paceline.core.tree import TokenTree
from paceline.engine.budget import StepRecord
from paceline.engine.costs import CostTable

RIGHT, WRONG = 1, 0
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
        claimed: what the drafter says of that chance; None: nothing.
        offer: chance that the drafter proposes anything, and the length of what it proposes.
        level_ms, ask_ms, unseen_ms: the drafter's time: by level, by sequence asked, by token not seen yet.
        noise: standard deviation of the log of a step's time.
        hiccup: chance of a step that takes ten times as long.
        table_error: factor by which the table that the budget is given is wrong.
        batch_error: factor by which it is wrong about batches of more than one, beyond that.
        spread: by what every other sequence's acceptance is higher, and the others' lower.
        slowness: factor on what steps take, by step of the world: other work on the machine.
    """

    costs: Callable[[float], float]
    sequence_ms: float = 0.05
    acceptance: Callable[[int], float] = lambda step: 0.6
    claimed: float | None = 0.6
    offer: float = 1.0
    longest: int = 64
    level_ms: float = 0.0
    ask_ms: float = 0.03
    unseen_ms: float = 0.0
    noise: float = 0.05
    hiccup: float = 0.0
    table_error: float = 1.0
    batch_error: float = 1.0
    spread: float = 0.0
    slowness: Callable[[int], float] = lambda step: 1.0
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
            plain=tuple((b, self.step_ms(b, 0) * self.table_error * (self.batch_error if b > 1 else 1)) for b in sizes),
        )


@dataclass
class Ran:
    """What came of a run."""

    tokens: int = 0
    ms: float = 0.0
    drafted_steps: int = 0
    steps: int = 0
    history: list[int] = field(default_factory=list)  # nodes checked a step, over the batch
    asked: list[int] = field(default_factory=list)  # sequences asked for a step

    @property
    def speed(self) -> float:
        """Tokens a millisecond."""
        return self.tokens / self.ms


class Sequence:
    """What a budget looks at of a running sequence."""

    def __init__(self, key: int, world: World) -> None:
        self.view = SimpleNamespace(
            key=key, tokens=[RIGHT] * world.prompt, application=None, sources=None, max_len=world.prompt + world.answer
        )
        self.max_len = world.prompt + world.answer
        self.seen = 0
        self.ready = True  # a prompt's last pass prepares a draft
        self.state = SimpleNamespace(stats=SimpleNamespace(passes=0, drafted=0))

    @property
    def finished(self) -> bool:
        return len(self.view.tokens) >= self.max_len


class Drafter:
    """Proposes chains: each token is right with the world's chance."""

    def __init__(self, world: World) -> None:
        self.world, self.draw = world, random.Random(world.seed)

    def chain(self, sequence: Sequence, nodes: int, step: int, floor: float) -> list[int]:
        """Tokens of a proposal of up to ``nodes``; a drafter with a network stops where a path's chance is too low."""
        world = self.world
        offered = min(nodes, world.longest) if self.draw.random() < world.offer else 0
        if world.prepares:
            offered, sequence.ready = offered if sequence.ready else 0, nodes > 0
        if world.level_ms and world.claimed and floor > 0:
            offered = min(offered, 1 + int(math.log(min(1, floor)) / math.log(world.claimed)))
        chance = world.acceptance(step) + world.spread * (2 * (sequence.view.key % 2) - 1)
        return [RIGHT if self.draw.random() < chance else WRONG for _ in range(offered)]

    def tree(self, chains: list[list[int]]) -> TokenTree:
        """One tree a chain."""
        claim = math.nan if self.world.claimed is None else math.log(self.world.claimed)
        return TokenTree(
            tokens=[[RIGHT, *chain] for chain in chains],
            parents=[[-1, *range(len(chain))] for chain in chains],
            sources=[[0] * (1 + len(chain)) for chain in chains],
            counts=[1 + len(chain) for chain in chains],
            scores=[[0.0, *(claim * (i + 1) for i in range(len(chain)))] for chain in chains],
        )


def run(budget: Any, world: World, batch: int, steps: int) -> Ran:
    """Decode with ``batch`` requests at any time, a new one for each that ends."""
    drafter, luck = Drafter(world), random.Random(world.seed + 1000)
    ran = Ran()
    made = 0
    live: list[Sequence] = []
    for step in range(steps):
        while len(live) < batch:
            made += 1
            live.append(Sequence(made, world))
            live[-1].view.tokens.append(RIGHT)  # the prompt's pass brought the first token
        able = [s for s in live if s.max_len - len(s.view.tokens) > 1]
        given = dict(zip(map(id, able), budget.plan(able, len(live)), strict=True)) if able else {}
        budgets = [given.get(id(s), 0) for s in live]
        asked = [s for s, nodes in zip(live, budgets, strict=True) if nodes]
        checked, draft_ms = _draft(budget, drafter, asked, [n for n in budgets if n], step)
        drafted = [len(checked.get(id(s), ())) for s in live]
        accepted = []
        for sequence in live:
            chain = checked.get(id(sequence), [])
            right = next((i for i, token in enumerate(chain) if token != RIGHT), len(chain))
            accepted.append(min(right, sequence.max_len - len(sequence.view.tokens) - 1))
        rest_ms = world.step_ms(len(live), sum(drafted)) * world.slowness(step) * math.exp(luck.gauss(0, world.noise))
        # A hiccup is not in the time that is compared, which would be that of the luckier run.
        seen_ms = rest_ms * (10 if luck.random() < world.hiccup else 1)
        for sequence, right in zip(live, accepted, strict=True):
            sequence.view.tokens += [RIGHT] * (right + 1)
            ran.tokens += right + 1
        ran.ms += draft_ms + rest_ms
        ran.steps += 1
        ran.drafted_steps += any(drafted)
        ran.history.append(sum(drafted))
        ran.asked.append(len(asked))
        if budget.learns:
            rows: list[Any] = list(live)
            budget.observe(
                StepRecord(
                    sequences=rows,
                    budgets=budgets,
                    drafted=drafted,
                    accepted=accepted,
                    pure=True,
                    draft_ms=draft_ms,
                    ask_ms=draft_ms,
                    rest_ms=seen_ms,
                )
            )
        ended = [s for s in live if s.finished]
        budget.forget(ended)
        live = [s for s in live if not s.finished]
    return ran


def _draft(
    budget: Any, drafter: Drafter, asked: list[Sequence], budgets: list[int], step: int
) -> tuple[dict[int, list[int]], float]:
    """The nodes that are checked, by sequence, and the drafter's time."""
    if not asked:
        return {}, 0.0
    world, rule = drafter.world, budget.rule
    floor = 0.0 if rule is None else rule.level_chance(0, len(asked))
    chains = [drafter.chain(s, nodes, step, floor) for s, nodes in zip(asked, budgets, strict=True)]
    ms = world.level_ms * max(map(len, chains))
    for sequence in asked:
        ms += world.ask_ms + world.unseen_ms * (len(sequence.view.tokens) - sequence.seen)
        sequence.seen = len(sequence.view.tokens)
    if rule is not None:
        tree = rule.select([s.view for s in asked], drafter.tree(chains))
        counts = [1] * len(asked) if tree is None else tree.counts
        chains = [chain[: count - 1] for chain, count in zip(chains, counts, strict=True)]
    return {id(s): chain for s, chain in zip(asked, chains, strict=True)}, ms
