"""A world without a model, for draft budgets: what steps cost, who proposes what, and what is right.

The clock is simulated: a run says how many tokens came out in how many milliseconds. The text of every sequence is
`RIGHT` for ever; a drafted token that is wrong is `WRONG`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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

NETWORK = {"level_ms": 1.0, "unseen_ms": 0.02}  # a drafter that runs a network of its own
LOOKUP = {"level_ms": 0.0, "unseen_ms": 0.002}
HARD: dict[str, dict[str, Any]] = {
    "turns bad": {"acceptance": lambda step: 0.85 if step < 300 else 0.05},
    "turns good": {"acceptance": lambda step: 0.05 if step < 300 else 0.85},
    "rarely proposes, badly": {"offer": 0.2, "acceptance": lambda _: 0.1},
    "never proposes": {"offer": 0.0},
    "dear to catch up": {**NETWORK, "unseen_ms": 0.1, "prompt": 400},
    "hiccups": {"hiccup": 0.02, "acceptance": lambda _: 0.1},
    "noise": {"noise": 0.2, "acceptance": lambda _: 0.3, "costs": STEP_COSTS["linear"]},
    "table three times too dear": {"table_error": 3.0, "acceptance": lambda _: 0.3, "costs": STEP_COSTS["linear"]},
    "table three times too cheap": {"table_error": 0.33, "acceptance": lambda _: 0.3, "costs": STEP_COSTS["linear"]},
    "slow network": {**NETWORK, "level_ms": 4.0, "acceptance": lambda _: 0.7, "costs": STEP_COSTS["flat"]},
    "table and first steps too dear": {
        "slowness": lambda step: 2.0 if step < 3 else 1.0,
        "batch_error": 2.0,
        "acceptance": lambda _: 0.4,
        "spread": 0.3,
        "costs": STEP_COSTS["linear"],
    },
    "batches priced too dear": {
        "batch_error": 3.0,
        "acceptance": lambda _: 0.5,
        "spread": 0.4,
        "costs": STEP_COSTS["steep"],
    },
    "rows priced twenty times too dear": {"rows_error": 20.0, "acceptance": lambda _: 0.8},
    "rows priced ten times too cheap": {"rows_error": 0.1, "acceptance": lambda _: 0.4, "costs": STEP_COSTS["linear"]},
    "jump priced as flat": {"rows_error": 0.1, "acceptance": lambda _: 0.3, "costs": STEP_COSTS["jump"]},
    "slow look-up": {"ask_ms": 0.8, "offer": 0.3, "acceptance": lambda _: 0.1, "costs": STEP_COSTS["flat"]},
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
        rows_error: factor by which it is wrong about what further rows of a sequence add, beyond that.
        spread: by what every other sequence's acceptance is higher, and the others' lower.
        slowness: factor on what steps take, by step of the world: other work on the machine.
        second: another drafter, asked after this one and where the rule says so; its costs of steps are not read.
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
    rows_error: float = 1.0
    spread: float = 0.0
    slowness: Callable[[int], float] = lambda step: 1.0
    prompt: int = 100
    answer: int = 64
    prepares: bool = False  # a sequence drafts only what its last step prepared, where that had a budget
    second: World | None = None
    seed: int = 0

    def step_ms(self, sequences: int, extra: float) -> float:
        """Without noise and without the drafter."""
        return self.costs(sequences + extra) + self.sequence_ms * (sequences - 1)

    def table(self) -> CostTable:
        """What a calibration would have measured, times the error."""
        sizes, one = (1, 2, 4, 8, 16, 32, 64, 128), self.costs(1)
        return CostTable(
            chain=tuple((r, (one + (self.costs(r) - one) * self.rows_error) * self.table_error) for r in sizes),
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
        self.key, self.tokens, self.prompt_len = key, [RIGHT] * world.prompt, world.prompt
        self.application = self.sources = None
        self.max_len = world.prompt + world.answer
        self.seen: dict[int, int] = {}  # by source
        self.ready = True  # a prompt's last pass prepares a draft
        self.stats = SimpleNamespace(passes=0, drafted=0)

    @property
    def finished(self) -> bool:
        return len(self.tokens) >= self.max_len


class Drafter:
    """Proposes chains: each token is right with the world's chance."""

    def __init__(self, world: World, source: int = 0) -> None:
        self.world, self.source, self.draw = world, source, random.Random(world.seed + 7000 * source)

    def chain(self, sequence: Sequence, nodes: int, step: int, floor: float) -> list[int]:
        """Tokens of a proposal of up to ``nodes``; a drafter with a network stops where a path's chance is too low."""
        world = self.world
        offered = min(nodes, world.longest) if self.draw.random() < world.offer else 0
        if world.prepares:
            offered, sequence.ready = offered if sequence.ready else 0, nodes > 0
        if world.level_ms and world.claimed and floor > 0:
            offered = min(offered, 1 + int(math.log(min(1, floor)) / math.log(world.claimed)))
        chance = world.acceptance(step) + world.spread * (2 * (sequence.key % 2) - 1)
        return [RIGHT if self.draw.random() < chance else WRONG for _ in range(offered)]

    def took(self, asked: list[Sequence], chains: list[list[int]]) -> float:
        """Ms of a call."""
        ms = self.world.level_ms * max(map(len, chains), default=0)
        for sequence in asked:
            behind = len(sequence.tokens) - sequence.seen.get(self.source, 0)
            ms += self.world.ask_ms + self.world.unseen_ms * behind
            sequence.seen[self.source] = len(sequence.tokens)
        return ms

    @property
    def claim(self) -> float:
        """What it says of a token, as a log."""
        return math.nan if self.world.claimed is None else math.log(self.world.claimed)


def run(budget: Any, world: World, batch: int, steps: int) -> Ran:
    """Decode with ``batch`` requests at any time, a new one for each that ends."""
    drafters, luck = [Drafter(world)], random.Random(world.seed + 1000)
    if world.second is not None:
        drafters.append(Drafter(replace(world.second, seed=world.seed), 1))
    ran = Ran()
    made = 0
    live: list[Sequence] = []
    for step in range(steps):
        while len(live) < batch:
            made += 1
            live.append(Sequence(made, world))
            live[-1].tokens.append(RIGHT)  # the prompt's pass brought the first token
        able = [s for s in live if s.max_len - len(s.tokens) > 1]
        given = dict(zip(map(id, able), budget.plan(able, len(live)), strict=True)) if able else {}
        budgets = [given.get(id(s), 0) for s in live]
        asked = [s for s, nodes in zip(live, budgets, strict=True) if nodes]
        checked, draft_ms = _draft(budget, drafters, asked, [n for n in budgets if n], step)
        found = [checked.get(id(s), (0, 0)) for s in live]
        drafted = [nodes for nodes, _ in found]
        accepted = [min(right, s.max_len - len(s.tokens) - 1) for s, (_, right) in zip(live, found, strict=True)]
        rest_ms = world.step_ms(len(live), sum(drafted)) * world.slowness(step) * math.exp(luck.gauss(0, world.noise))
        # A hiccup is not in the time that is compared, which would be that of the luckier run.
        seen_ms = rest_ms * (10 if luck.random() < world.hiccup else 1)
        for sequence, right in zip(live, accepted, strict=True):
            sequence.tokens += [RIGHT] * (right + 1)
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
                    propose_ms=draft_ms,
                    rest_ms=seen_ms,
                )
            )
        ended = [s for s in live if s.finished]
        budget.forget(ended)
        live = [s for s in live if not s.finished]
    return ran


def _draft(
    budget: Any, drafters: list[Drafter], asked: list[Sequence], budgets: list[int], step: int
) -> tuple[dict[int, tuple[int, int]], float]:
    """Of each sequence the nodes that are checked and how many tokens of them are right, and the drafters' time."""
    if not asked:
        return {}, 0.0
    rule, views, ms = budget.rule, asked, 0.0
    trees, first = [TokenTree() for _ in asked], [0.0 for _ in asked]
    for source, drafter in enumerate(drafters):
        several = rule is not None and len(drafters) > 1
        chosen = rule.ask(source, views, first) if several else [*range(len(asked))]
        floor = 0.0 if rule is None else rule.level_chance(source, len(chosen))
        chains = [drafter.chain(asked[i], budgets[i], step, floor) for i in chosen]
        took = drafter.took([asked[i] for i in chosen], chains)
        for i, chain in zip(chosen, chains, strict=True):
            _graft(trees[i], chain, source, drafter.claim)
            if several and chain:
                first[i] = max(first[i], rule.first(source, views[i], [drafter.claim]))
        if several and chosen:
            rule.record_cost(source, max(map(len, chains)), took)
        ms += took
    found = trees if rule is None else rule.select(views, trees)
    return {id(s): _right(tree) for s, tree in zip(asked, found, strict=False)}, ms


def _graft(tree: TokenTree, chain: list[int], source: int, claim: float) -> None:
    """Add a chain below the root; nodes that are there already stay, and wrong tokens are all different."""
    at = 0
    for token in chain:
        nodes = enumerate(zip(tree.parents, tree.tokens, strict=True), start=1)
        below = [node for node, (parent, other) in nodes if parent == at and other == token == RIGHT]
        if not below:
            tree.sources.append(source)
            below = [tree.add(at, token, tree.score(at) + claim)]
        at = below[0]


def _right(tree: TokenTree) -> tuple[int, int]:
    """The drafted nodes of a tree, and those of them that are on the right path."""
    path = {0}
    for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True), start=1):
        if token == RIGHT and parent in path:
            path.add(node)
    return len(tree), len(path) - 1
