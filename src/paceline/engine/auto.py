"""Choose how much to draft: a node is worth a row if its chance of being accepted pays for what the row costs.

With r the tokens a millisecond earned now, a step that drafts the nodes with chances P_1 >= P_2 >= .. of all sequences
of the batch is worth, in tokens beyond a plain step,

    sum of P_i (i <= k)  -  r x (what k rows add to the pass)  -  r x (the drafter's time)

and the k that makes the most of it is checked; nothing, where nothing pays. This is the condition for the most tokens a
second over many steps (a ratio is at its largest where no choice improves numerator - ratio x denominator; Dinkelbach
1967). `chances` states how likely nodes are, `costs` what rows take, and both are moving averages.

A drafter is called for a sequence where calls bring more than they cost, on average. A fixed share of the time
(`SHARE`) goes to calls that are not expected to pay, by source, and to rows that seem too dear, so that a wrong
estimate does not last; a few steps are plain ones. Once a batch size is known the rule looks at one step of several,
and its decisions stand in the others.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Self

from ..core.sequence import Sequence
from ..core.tree import TokenTree
from ..draft.base import DrafterSpec
from .budget import DraftBudget, StepRecord
from .chances import FIRST_GAIN, AskGain, Chances, History, best_count
from .costs import NEAR, WINDOW, CostTable, DraftCosts, StepCosts, bucket

SHARE = 0.008  # share of the time for calls of a source that are not expected to pay
ROW_SHARE = 0.004  # share of the time for rows that are not expected to pay
PILOT = 3  # calls of a network that are made for one sequence alone, to find out what they cost
DEAREST = 5.0  # plain steps that a trial may take at most: a long prompt to catch up with
LEAST_OPEN = 0.05  # chance of being needed at least, by which the gain of a call is scaled
MARGIN = 0.1  # nodes must be worth so much more than they cost: the best of many estimates are too good
FIRST_ROWS = 8  # most nodes of the first check at a batch size; later at most twice as many as ever before
RATE = 1 / 16  # weight of a step in the tokens a millisecond earned
PLAIN_FIRST = 2  # plain steps at a batch size before drafts: the time that drafts are compared with must be measured
PLAIN_EVERY = 128  # steps between plain ones later; before, as many as double with each of them
KNOWN_AFTER = 48  # a batch size is known after so many looks; until then the rule looks at every step
LOOK_EVERY = 8  # then it looks at one step of so many, as long as the batch stays the same
REST = 4  # where nothing is drafted it looks at one step of so many


@dataclass(slots=True)
class _Asks:
    """The calls of one source in a step."""

    least: dict[int, float] = field(default_factory=dict)  # sequence -> chance of being needed from which it pays
    opens: dict[int, float] = field(default_factory=dict)  # the same chance, of sequences called for in the step
    unseen: int = 0  # tokens that the source had to process first
    ms: float = 0.0  # time of the call, where `record_cost` gave it
    passes: int = 0  # passes of the source's network; else the levels of its deepest proposal


@dataclass(slots=True)
class _BatchSize:
    """Moving averages over steps of a bucket of batch sizes."""

    gains: list[AskGain]  # by source: gains of calls
    tokens: float = 0.0  # of a step
    ms: float = 0.0  # of a step
    looks: int = 0
    rows: int = 0  # most nodes that were checked at once
    plain_at: int = 0  # number of the last plain step, or of the last attempt at one


class AutoBudget(DraftBudget):
    """Chooses which sequences draft, and which nodes are checked; learns from the steps that it looks at.

    Args:
        table: the costs of steps, before any was run.
        cap: most nodes of a sequence (the drafter's own size).
        sources: names of the drafters that are called, cheapest first; one where it is a single one.
        marks: kinds of nodes that are distinguished by their source mark: as many as drafters, or, of a single one, as
            it has ways to come by them. None: as many as drafters.
        draft_costs: the costs of each source; None: all sources are look-ups.
        prepares: the source that proposes only what the step before has prepared, in the target's pass; a step that
            does not call it prepares nothing. None: there is no such source.
        blind: whether a node is checked must not depend on its score: drafts drawn from q, for rejection.
        spares: whether a drafter reads states of the step before a draft, and of no earlier one.
    """

    def __init__(
        self,
        table: CostTable,
        *,
        cap: int,
        sources: abc.Sequence[str] = ("drafter",),
        marks: int | None = None,
        draft_costs: abc.Sequence[DraftCosts] | None = None,
        prepares: int | None = None,
        blind: bool = False,
        spares: bool = False,
    ) -> None:
        self.most_nodes, self.sources, self.rule = cap, tuple(sources), self
        self.costs = StepCosts(table)
        self.draft_costs = [*(draft_costs or [DraftCosts() for _ in sources])]
        self.learns, self.rests = True, False
        self._one = len(self.sources) == 1
        self._prepares, self._blind, self._spares = prepares, blind, spares
        self._late = prepares or 0  # this source's time is what the others did not take: it drafts after the pass
        self._chances = [Chances() for _ in range(marks or len(sources))]
        self._histories: dict[int, History] = {}
        self._sizes: dict[int, _BatchSize] = {}  # by bucket
        self._expected: dict[int, float] = {}  # source -> expected gain of its first call, in tokens
        self._steps = 0
        self._saved = [0.0] * (len(self.sources) + 1)  # ms for trials by source, and of rows
        # The last look set these; they stand until the next look:
        self._looked = self._next = 0  # the step of the last look, and of the next one
        self._keys: list[int] = []
        self._batch = 0
        self._size = _BatchSize([])
        self._plain_ms, self._rate = table.step_ms(1, 0), 0.0  # ms of a plain step; tokens a ms, over the batch
        self._prices = [0.0] * 9  # tokens that 0, 1, .. drafted rows cost, the margin included
        self._floors: dict[tuple[int, int], float] = {}  # see `level_chance`
        self._budgets: list[int] = []
        self._asks = [_Asks() for _ in sources]
        self._tries = False  # whether calls are made to learn
        self._all = False  # whether all proposed nodes were checked
        self._choice = 0, 0, 0.0  # the last choice: batch size, nodes over the batch, their expected tokens

    @classmethod
    def of(cls, spec: DrafterSpec, table: CostTable) -> Self:
        """Return the budget of a drafter, which begins with these costs of passes."""
        parts = spec.parts or (spec,)
        return cls(
            table,
            cap=spec.default_budget,
            sources=spec.sources if spec.parts else (spec.name,),
            marks=len(spec.sources),
            draft_costs=[DraftCosts.of_network(table, part.cached) if part.network else DraftCosts() for part in parts],
            prepares=next((k for k, part in enumerate(parts) if part.in_pass), None),
            blind=spec.proposes == "sampled",
            spares=bool(spec.taps) and spec.past == 0,
        )

    # -- before the step

    def plan(self, sequences: abc.Sequence[Sequence], batch_size: int) -> list[int]:
        """Choose the nodes that the drafter may propose; see `DraftBudget.plan`."""
        self._steps += 1
        keys = [sequence.key for sequence in sequences]
        same = keys == self._keys and batch_size == self._batch
        self.learns = not self.rests and not (same and self._steps < self._next)
        if self.learns:
            self._keys, self._batch = keys, batch_size
            self._budgets = self._look([sequence for sequence in sequences])
        elif not same:  # the states that drafts of this step need were not taken: look at it in the next one
            self._keys, self._next = [], self._steps + 1
        budgets = self._budgets if self.learns or same else [0] * len(keys)
        resting = not any(budgets)
        self.rests = resting and self._spares and self._steps + 1 < self._next
        return budgets

    def _look(self, views: abc.Sequence[Sequence]) -> list[int]:
        """Decide again which sources to call for which sequences."""
        size = self._size = self._size_at(self._batch)
        histories = []
        for view in views:
            history = self._histories.get(view.key)
            if history is None:
                history = History(view, self._chances, len(self.sources), self._steps)
                self._histories[view.key] = history
            history.at_batch(size.gains)
            histories.append(history)
        self._plain_ms = self.costs.predict(self._batch, 0)
        self._save(self._plain_ms * (self._steps - self._looked - 1))  # what the steps between took, at the least
        self._looked, self._next = self._steps, self._steps + 1
        self._rate = max(self._batch / self._plain_ms, size.tokens / size.ms if size.ms else 0.0)
        rise = self.costs.rise(self._batch, max(8, self.most_nodes * len(views)))
        self._prices, self._floors = [self._rate * (1 + MARGIN) * ms for ms in rise], {}
        self._asks, self._tries = [_Asks() for _ in self._asks], False
        if self._plain_due():
            return [0] * len(views)
        due = set[int]()
        for source in range(len(self._asks)):
            # Rows that cost more than they may bring leave only trials.
            paying = set() if size.rows and self.row_chance >= 1 else self._paying(source, histories)
            due |= paying | self._trial(source, histories, paying)
        if not due:
            self._next += REST - 1
        elif size.looks >= KNOWN_AFTER and not self._tries:
            self._next += LOOK_EVERY - 1
        best = [self.most_nodes for _ in histories]
        if self._blind:  # scores may not be looked at: so many nodes as pay by their depth
            best = [max(1, best_count(h.unscored(self.most_nodes), self._prices)) for h in histories]
        return [count if i in due else 0 for i, count in enumerate(best)]

    def _size_at(self, batch: int) -> _BatchSize:
        size = self._sizes.get(bucket(batch))
        if size is None:
            first = [AskGain(self._expected.get(k, FIRST_GAIN)) for k in range(len(self.sources))]
            size = self._sizes[bucket(batch)] = _BatchSize(first)
        return size

    @property
    def row_chance(self) -> float:
        """Return the chance of being accepted that pays for a row, where rows are cheapest."""
        prices = self._prices
        return min(prices[1], prices[2] / 2, prices[4] / 4, prices[8] / 8) / (1 + MARGIN)

    def _plain_due(self) -> bool:
        """Return whether the coming step is to be a plain one, to measure what drafts are compared with.

        Intervals double at first, since the few that were seen may have been slow.
        """
        seen = self.costs.visits(self._batch, 0)
        if seen >= PLAIN_FIRST and self._steps - self._size.plain_at <= min(PLAIN_EVERY, 1 << min(seen, 16)):
            return False
        self._size.plain_at = self._steps  # also where prompts make it no plain one
        return True

    def _paying(self, source: int, histories: abc.Sequence[History]) -> set[int]:
        """Return the sequences that asking this source for pays in the mean.

        For each, `_Asks.least` gets the chance of being needed from which it pays, where the call is shared by as many.
        """
        costs, least = self.draft_costs[source], self._asks[source].least
        catch_up = [self._catch_up_ms(source, history) for history in histories]
        if histories and costs.network and costs.usual_calls < PILOT:
            first = catch_up.index(min(catch_up))
            least[histories[first].view.key] = 0.0
            return {first}
        dear = [self._rate * ms / h.asks_left(source) if ms else 0.0 for ms, h in zip(catch_up, histories, strict=True)]
        values = [history.gains[source].gain - more for history, more in zip(histories, dear, strict=True)]
        order = sorted([i for i, value in enumerate(values) if value > 0], key=lambda i: -values[i])
        prices = [self._rate * costs.predict(n) for n in range(len(order) + 1)]
        count = best_count([values[i] for i in order], prices)
        share = prices[max(1, count)] / max(1, count) if order else 0.0
        for place, i in enumerate(order):
            gain_estimate = histories[i].gains[source]
            pays = (share + dear[i]) * max(gain_estimate.open, LEAST_OPEN) / gain_estimate.gain
            least[histories[i].view.key] = min(pays, gain_estimate.open) if place < count else pays
        return set(order[:count])

    def _catch_up_ms(self, source: int, history: History) -> float:
        """Return the ms that the source needs for the tokens of a sequence that it has not processed."""
        missed = len(history.view.tokens) - history.seen[source] - NEAR
        return max(0, missed) * self.draft_costs[source].catch_up_ms

    def _trial(self, source: int, histories: abc.Sequence[History], paying: set[int]) -> set[int]:
        """Return the sequences that a source is called for although it is not expected to pay.

        Those that waited longest while saved time is left, and those for which the last call has only prepared this
        one.
        """
        if self.row_chance * (1 + MARGIN) >= 1:
            return set()
        idle = [i for i in range(len(histories)) if i not in paying]
        chosen = {i for i in idle if histories[i].begun[source]}
        for i in sorted(idle, key=lambda i: histories[i].asked_at[source]):
            cost = self.draft_costs[source].predict(1) + self._catch_up_ms(source, histories[i])
            if i not in chosen and cost <= DEAREST * self._plain_ms and self._spend(source, cost):
                chosen.add(i)
        self._asks[source].least.update(dict.fromkeys([histories[i].view.key for i in chosen], 0.0))
        self._tries |= bool(chosen)
        return chosen

    def _save(self, ms: float) -> None:
        """Set a share of some steps' time aside for trials, up to a plain step's time."""
        for k, saved in enumerate(self._saved):
            share = SHARE if k < len(self.sources) else ROW_SHARE
            self._saved[k] = min(self._plain_ms, saved + share * ms)

    def _spend(self, account: int, ms: float) -> bool:
        """Pay for a trial from the time that was set aside; one that costs more than a plain step is paid off later."""
        if self._saved[account] < min(ms, 0.99 * self._plain_ms):
            return False
        self._saved[account] -= ms
        return True

    # -- between proposal and pass: see `DraftRule`

    def ask(self, source: int, views: abc.Sequence[Sequence], first: abc.Sequence[float]) -> list[int]:
        """Return which sequences to call one of several sources for.

        Given for each the chance that what others proposed begins right.
        """
        least = self._asks[source].least
        able = [i for i, view in enumerate(views) if view.sources is None or source in view.sources]
        chosen = [i for i in able if 1 - first[i] >= least.get(views[i].key, inf)]
        self._note(source, {views[i].key: 1 - first[i] for i in chosen})
        return chosen

    def _note(self, source: int, opens: dict[int, float]) -> None:
        """Note that a source is called for these sequences."""
        unseen, step = 0, self._steps
        for key in opens:
            history = self._histories[key]
            tokens = len(history.view.tokens)
            unseen += tokens - history.seen[source]
            # A prompt's last pass prepares the first step.
            fresh = history.asked_at[source] != step - 1 and history.born != step
            history.begun[source] = source == self._prepares and fresh
            history.asked_at[source], history.seen[source] = step, tokens
        self._asks[source].unseen = unseen
        if self.learns:
            self._asks[source].opens = opens

    def first(self, source: int, view: Sequence, log_scores: Iterable[float]) -> float:
        """Return the chance that one of the first tokens that a source proposes is right, from its log scores."""
        return self._histories[view.key].first(source, log_scores)

    def level_chance(self, source: int, count: int) -> float:
        """Return the chance of a path that pays for one more level of a source's network below it, for a batch."""
        floor = self._floors.get((source, count))
        if floor is None:
            costs, floor = self.draft_costs[source], self.row_chance
            if costs.usual_calls:  # else what levels cost is a guess: go deep, to find out
                floor += self._rate * costs.level_ms(count) / max(1, count)
            self._floors[source, count] = floor
        return floor

    def record_cost(self, source: int, passes: int, ms: float) -> None:
        """Learn what the call of one of several sources took; see `DraftRule.record_cost`."""
        if self.learns:
            self._asks[source].ms, self._asks[source].passes = ms, passes
            if source != self._late:
                self._learn_costs(source, ms)

    def select(
        self, views: abc.Sequence[Sequence], trees: list[TokenTree], passes: int | None = None
    ) -> list[TokenTree]:
        """Return the nodes that pay for their rows; empty where none does. See `DraftRule.select`."""
        if self._one:
            self._note(0, dict.fromkeys([view.key for view in views], 1.0))
        nodes = sum(map(len, trees))
        if nodes and self._all and not self.learns:  # as it was found since the last look
            return trees
        histories, ranked, levels = [self._histories[view.key] for view in views], [], 0
        for b, (history, tree) in enumerate(zip(histories, trees, strict=True)):
            history.judge()
            paths, deepest = history.propose(tree, self._blind)
            ranked += [(-path, b, node) for node, path in enumerate(paths) if node]
            levels = max(levels, deepest)
        ranked.sort(key=lambda node: node[0])
        chances = [-path for path, *_ in ranked]
        # Of so many rows as never yet the cost is a guess: continue from what is known.
        limit = nodes if self._blind else min(nodes, max(FIRST_ROWS, 2 * self._size.rows))
        new, tries = not self._size.rows, self._tries_rows(limit)
        # Of what was never measured the price means nothing: for now, rows are free.
        prices = [0.0] * (nodes + 1) if tries and new else self._prices
        paying = nodes if self._blind else best_count(chances, prices)
        count = limit if tries else min(paying, limit)
        if self.learns:
            if self._one:
                self._asks[0].passes = levels if passes is None else passes
            if new or not tries:  # a call is worth its gain once so many rows are known
                self._learn_gains(histories, trees, ranked[:paying], prices[paying])
        self._choice, self._all = (self._batch, count, sum(chances[:count])), 0 < count == nodes and not tries
        if not 0 < count < nodes:
            return trees if count else []
        selected: list[list[int]] = [[] for _ in views]
        for _, b, node in sorted(ranked[:count], key=lambda node: node[1:]):
            selected[b].append(node)
        return [tree.subset(nodes_left) for tree, nodes_left in zip(trees, selected, strict=True)]

    def _tries_rows(self, rows: int) -> bool:
        """Return whether so many rows are checked whatever is expected of them, so that a wrong table does not last.

        The first ones of a batch size always are, more where the saved time pays for what they seem to cost.
        """
        if self._blind or not (rows and self.learns) or self.costs.visits(self._batch, rows) >= WINDOW:
            return False
        return not self._size.rows or self._spend(-1, self._prices[rows] / self._rate)

    # -- learning

    def _learn_gains(
        self,
        histories: abc.Sequence[History],
        trees: abc.Sequence[TokenTree],
        nodes: abc.Sequence[tuple[float, int, int]],
        price: float,
    ) -> None:
        """Learn the gain of every call: for each sequence, the tokens expected beyond the price of their rows."""
        gains, marks = [[0.0] * len(self.sources) for _ in histories], [tree.marks for tree in trees]
        for path, b, node in nodes:
            gains[b][0 if self._one else marks[b][node - 1]] -= path + price / len(nodes)
        for source, asks in enumerate(self._asks):
            for history, gain in zip(histories, gains, strict=True):
                if history.view.key in asks.opens and not history.begun[source]:
                    history.learn(source, gain[source], asks.opens[history.view.key])

    def observe(self, step: StepRecord) -> None:
        """Learn what the step cost and earned."""
        if not step.sequences:
            return
        batch, drafted = len(step.sequences), sum(step.drafted)
        total_ms = step.draft_ms + step.rest_ms
        self._save(total_ms)
        if step.pure:
            size, dear = self._size_at(batch), False
            prepared = any(step.budgets) and self._prepares is not None and self._asks[self._prepares].opens
            if drafted or not prepared:
                dear = self.costs.observe(batch, drafted, step.rest_ms)
                if not drafted:
                    size.plain_at = self._steps
            size.looks += 1
            if not dear or self.costs.visits(batch, drafted) >= WINDOW:  # dearer rows are met again before more are
                size.rows = max(drafted, size.rows)
            size.tokens += RATE * (sum(step.accepted) + batch - size.tokens)
            size.ms += RATE * (total_ms - size.ms)
        if any(step.budgets):
            others = sum([asks.ms for source, asks in enumerate(self._asks) if source != self._late])
            self._learn_costs(self._late, step.propose_ms - others)

    def _learn_costs(self, source: int, ms: float) -> None:
        asks = self._asks[source]
        if asks.opens:
            self.draft_costs[source].observe(len(asks.opens), asks.passes, asks.unseen, ms)

    def forget(self, sequences: abc.Sequence[Sequence]) -> None:
        """Judge the last proposals of sequences that ended, and drop what is kept of them."""
        self._keys = []
        for sequence in sequences:
            if history := self._histories.pop(sequence.key, None):
                history.judge()

    def reset_source(self, source: str, expected: float | None = None) -> None:
        """Implement `DraftBudget.renew`: past counts hardly predict its drafts."""
        at, self._keys = self.sources.index(source), []
        if expected is not None:
            self._expected[at] = expected
        for size in self._sizes.values():
            size.gains[at] = AskGain(self._expected.get(at, FIRST_GAIN))
        for mark in range(len(self._chances)) if self._one else [at]:
            self._chances[mark].doubt()
            for history in self._histories.values():
                history.shift[mark], history.shared = 0.0, ()

    # -- explanations

    def idle_reason(self, sequence: Sequence) -> str | None:
        """Return why nothing at all was drafted for a sequence, where drafts did not pay in most of its steps."""
        met = sequence.key in self._histories and sequence.stats.passes > PLAIN_FIRST
        return self._explain(1, 0, 0.0) if met and not sequence.stats.drafted else None

    def explain(self) -> str:
        """Describe what the last step that called for drafts chose, and why."""
        return self._explain(*self._choice) if self._batch else "auto: no step was planned yet"

    def _explain(self, batch: int, nodes: int, tokens: float) -> str:
        price = f"a row must be accepted with a chance of {self.row_chance:.0%} to pay"
        at = f"auto: at batch {self._batch} a plain step takes {self._plain_ms:.2f} ms, and {price}"
        if not batch:
            return f"{at}: nothing was drafted yet"
        gains = ", ".join(
            f"{name} {estimate.gain:.2f}" for name, estimate in zip(self.sources, self._size.gains, strict=True)
        )
        asks = f"a call brings, beyond its rows, so many tokens: {gains}"
        if not nodes:
            return f"{at}: drafts do not pay ({asks})"
        many = "1 node" if nodes == 1 else f"{nodes} nodes"
        return f"{at}: {many}, {tokens:.2f} accepted of them ({1 + tokens / batch:.2f} tokens a pass expected; {asks})"
