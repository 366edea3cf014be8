"""One rule for how much to draft: a node is worth a row if its chance pays for what the row costs.

With r the tokens a millisecond earned now, a step that drafts the nodes with chances P_1 >= P_2 >= .. of all sequences
of the batch is worth, in tokens beyond a plain step,

    sum of P_i (i <= k)  -  r x (what k rows add to the pass)  -  r x (the drafter's time)

and the k that makes the most of it is checked; nothing, where nothing pays. This is the condition for the most tokens a
second over many steps (a ratio is at its largest where no choice improves numerator - ratio x denominator; Dinkelbach
1967).

    chances   `chances`: the drafter's own scores, corrected by what came of such nodes
    rows      `costs`: a measured table that follows the machine
    asking    a drafter is asked for a sequence where its asks there bring more than they cost, on average

Asks that are not expected to pay are made with a stated share of the time (`EXPLORE`), each drafter with its own. The
rule takes time, too: it looks at one step of a few and observes what that one cost; in the others its decisions stand.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any, Self

from .. import kernels
from ..core.errors import ConfigError
from ..core.tree import TokenTree
from ..draft.base import DrafterSpec, SequenceView
from .base import RunningSequence
from .budget import MAX_BUDGET, DraftBudget, StepRecord
from .chances import Chances, History, RequestKind, best_count, weigh
from .costs import NEAR, WINDOW, CostTable, DraftCosts, StepCosts, bucket

EXPLORE = 0.01  # share of the time for asks that are not expected to pay
PILOT = 3  # calls of a network that are made for one sequence alone, to find out what they cost
DEAREST = 5.0  # plain steps that an ask in order to learn may take at most: a long prompt to catch up with
LEAST_OPEN = 0.05  # chance of being needed at least, by which what an ask brought is scaled
MARGIN = 0.1  # nodes must be worth so much more than they cost: the best of many estimates are too good
FIRST_ROWS = 8  # most nodes of the first check at a batch size; later at most twice as many as ever before
RATE = 1 / 16  # weight of a step in the tokens a millisecond earned
PLAIN_FIRST = 2  # plain steps at a batch size before drafts: what drafts are compared with must be measured
PLAIN_EVERY = 128  # steps between plain ones later; before, as many as double with each of them
KNOWN_AFTER = 48  # a batch size is known after so many looks; until then the rule looks at every step
LOOK_EVERY = 8  # then it looks at one step of so many, as long as the batch stays the same
REST = 4  # where nothing is drafted it looks at one step of so many
NEVER = 2.0  # above every chance: the source is asked for no sequence


@dataclass(slots=True)
class _Asks:
    """What one source is asked for."""

    least: dict[int, float] = field(default_factory=dict)  # sequence -> chance of being needed from which it pays
    opens: dict[int, float] = field(default_factory=dict)  # the same chance, of sequences asked for in the step
    unseen: int = 0  # tokens that the source had to process first
    ms: float = 0.0  # time of the call, where `record_cost` gave it
    passes: int = 0  # passes of the source's network; else the levels of its deepest proposal


@dataclass(slots=True)
class _BatchSize:
    """What is known of steps of a bucket of batch sizes."""

    tokens: float = 0.0  # tokens of a step, a running mean
    ms: float = 0.0  # ms of a step, a running mean
    looks: int = 0
    rows: int = 0  # most nodes that were checked at once
    plain_at: int = 0  # number of the last plain step, or of the last attempt at one


class AutoBudget(DraftBudget):
    """Chooses which sequences draft, and which nodes are checked; learns from the steps that it looks at.

    Args:
        table: what steps cost, before any was run.
        cap: most nodes of a sequence (the drafter's own size).
        sources: names of the drafters behind the drafter, cheapest first; one where it is a single one.
        marks: kinds of nodes that are told apart by their source mark: as many as drafters, or, of a single one, as it
            has ways to come by them. None: as many as drafters.
        draft_costs: the costs of each source; None: all sources are look-ups.
        prepares: the source that proposes only what the step before has prepared, in the target's pass and behind it;
            a step that does not ask it prepares nothing. None: there is no such source.
        blind: whether a node is checked must not depend on its score: drafts drawn from q, for rejection.
        spares: whether a drafter reads states of the step before a draft, and of no earlier one.

    Raises:
        ConfigError: a cap out of range.
    """

    def __init__(
        self,
        table: CostTable,
        *,
        cap: int,
        sources: Sequence[str] = ("drafter",),
        marks: int | None = None,
        draft_costs: Sequence[DraftCosts] | None = None,
        prepares: int | None = None,
        blind: bool = False,
        spares: bool = False,
    ) -> None:
        if not 1 <= cap <= MAX_BUDGET:
            raise ConfigError(f"a cap of {cap} nodes", f"it must be 1 to {MAX_BUDGET}", "budget=0 drafts nothing")
        self.cap, self.sources, self._marks = cap, tuple(sources), marks or len(sources)
        self.costs = StepCosts(table)
        self.draft_costs = [*(draft_costs or [DraftCosts() for _ in sources])]
        self.learns, self.rests = True, False
        self._library = kernels.in_use()
        self._one = len(self.sources) == 1
        self._prepares, self._blind, self._spares = prepares, blind, spares
        self._late = prepares or 0  # this source's time is what the others did not take: it drafts behind the pass
        self._kinds: dict[str | None, RequestKind] = {}
        self._histories: dict[int, History] = {}
        self._sizes: dict[int, _BatchSize] = {}  # by bucket
        self._steps = self._rested = 0
        self._saved_ms = [0.0 for _ in sources]  # by source: time for asks that are not expected to pay
        # The last look set these; they stand until the next look:
        self._looked = self._next = 0  # the step of the last look, and of the next one
        self._keys: list[int] = []
        self._batch = self._context = 0
        self._size = _BatchSize()
        self._plain_ms, self._rate = table.step_ms(1, 0), 0.0  # ms of a plain step; tokens a ms, over the batch
        self._prices, self._floors = array("d"), dict[tuple[int, int], float]()  # see `_priced`, `level_chance`
        self._budgets: list[int] = []
        self._asks = [_Asks() for _ in sources]
        self._trials: set[tuple[int, int]] = set()  # (sequence, source) of asks that are made to learn
        self._all = False  # whether all proposed nodes were checked
        self._choice = 0, 0, 0.0  # the last choice: batch size, nodes over the batch, their expected tokens

    @classmethod
    def of(cls, spec: DrafterSpec, table: CostTable, own: CostTable | None = None) -> Self:
        """The budget of a drafter; ``own``: what passes of its draft model cost, where that was calibrated."""
        parts = spec.parts or (spec,)
        return cls(
            table,
            cap=spec.default_budget,
            sources=spec.sources if spec.parts else (spec.name,),
            marks=len(spec.sources),
            draft_costs=[
                DraftCosts.of_network(table, own, part.cached) if part.network else DraftCosts() for part in parts
            ],
            prepares=next((k for k, part in enumerate(parts) if part.streams is not None), None),
            blind=spec.proposes == "sampled",
            spares=bool(spec.taps) and spec.past == 0,
        )

    # -- before the step

    def plan(self, sequences: Sequence[RunningSequence], batch_size: int) -> list[int]:
        """Nodes that the drafter may propose; see `DraftBudget.plan`."""
        self._steps += 1
        keys = [sequence.view.key for sequence in sequences]
        same = keys == self._keys and batch_size == self._batch
        self.learns = not self.rests and not (same and self._steps < self._next)
        if self.learns:
            budgets = self._budgets = self._look(sequences, keys, batch_size)
        elif same:
            budgets = self._budgets
        else:  # the states that drafts of this step need were not taken: look at it in the next one
            budgets, self._next = [0] * len(keys), self._steps + 1
        resting = not any(budgets)
        self._rested += resting and self._size.plain_at < self._steps
        self.rests = resting and self._spares and self._steps + 1 < self._next
        return budgets

    def _look(self, sequences: Sequence[RunningSequence], keys: list[int], batch_size: int) -> list[int]:
        """Decide anew which sources to ask for which sequences."""
        self._save(self._plain_ms * (self._steps - self._looked - 1))  # so much the steps between took, at the least
        self._keys, self._batch, self._looked, self._next = keys, batch_size, self._steps, self._steps + 1
        histories = [self._history(sequence.view) for sequence in sequences]
        self._price(sum([len(history.view.tokens) for history in histories]))
        self._asks = [_Asks() for _ in self._asks]
        self._trials = set()
        if self._plain_due():
            return [0] * len(keys)
        able = [] if self._size.rows and self.row_chance >= 1 else histories  # rows cost more than they may bring
        paying = [self._paying(source, able) for source in range(len(self._asks))]
        wanted = set().union(*paying, self._explore(histories, paying))
        if not wanted:
            self._next += REST - 1
        elif self._size.looks >= KNOWN_AFTER and not self._trials:
            self._next += LOOK_EVERY - 1
        return self._allowed(histories, wanted)

    def _history(self, view: SequenceView) -> History:
        """The history of a sequence, at the present batch size."""
        history = self._histories.get(view.key)
        if history is None:
            name = None if view.application is None else view.application.name
            kind = self._kinds.setdefault(name, RequestKind([Chances() for _ in range(self._marks)]))
            history = History(view, kind, len(self.sources), self.cap, self._steps, self._rested)
            self._histories[view.key] = history
        history.at_batch(bucket(self._batch))
        return history

    def _price(self, context: int) -> None:
        """What a plain step takes now, and what a millisecond earns."""
        size = self._size = self._sizes.setdefault(bucket(self._batch), _BatchSize())
        self._plain_ms = self.costs.predict(self._batch, 0, context)
        self._context, self._prices, self._floors = context, array("d"), {}
        self._rate = max(self._batch / self._plain_ms, size.tokens / size.ms if size.ms else 0.0)

    def _priced(self, most: int) -> array[float]:
        """[at least most + 1] tokens that 0, 1, .. drafted rows cost, the margin included."""
        if len(self._prices) <= most:
            rate = self._rate * (1 + MARGIN)
            self._prices = array("d", [rate * ms for ms in self.costs.rise(self._batch, most, self._context)])
        return self._prices

    @property
    def row_chance(self) -> float:
        """The chance of being accepted that pays for a row, where rows are cheapest."""
        prices = self._priced(8)
        return min(prices[1], prices[2] / 2, prices[4] / 4, prices[8] / 8) / (1 + MARGIN)

    def _plain_due(self) -> bool:
        """Whether the coming step is to be a plain one, to measure what drafts are compared with; intervals double at
        first, since the few that were seen may have been slow."""
        seen = self.costs.visits(self._batch, 0)
        if seen >= PLAIN_FIRST and self._steps - self._size.plain_at <= min(PLAIN_EVERY, 1 << min(seen, 16)):
            return False
        self._size.plain_at = self._steps  # also where prompts make it no plain one
        return True

    def _paying(self, source: int, histories: Sequence[History]) -> set[int]:
        """The sequences that asking this source for pays in the mean. For each, `_Asks.least` gets the chance of being
        needed from which it pays, where the call is shared by as many."""
        costs, least = self.draft_costs[source], self._asks[source].least
        behind = [self._behind_ms(source, history) for history in histories]
        if histories and costs.network and costs.usual_calls < PILOT:
            first = behind.index(min(behind))
            least[histories[first].view.key] = 0.0
            return {first}
        dear = [self._rate * ms / h.asks_left(source) if ms else 0.0 for ms, h in zip(behind, histories, strict=True)]
        values = [history.gains[source].gain - more for history, more in zip(histories, dear, strict=True)]
        order = sorted([i for i, value in enumerate(values) if value > 0], key=lambda i: -values[i])
        prices = [self._rate * costs.predict(n) for n in range(len(order) + 1)]
        count = best_count([values[i] for i in order], prices)
        share = prices[max(1, count)] / max(1, count) if order else 0.0
        for place, i in enumerate(order):
            known = histories[i].gains[source]
            pays = (share + dear[i]) * max(known.open, LEAST_OPEN) / known.gain
            least[histories[i].view.key] = min(pays, known.open) if place < count else pays
        return set(order[:count])

    def _behind_ms(self, source: int, history: History) -> float:
        """Ms that the source needs to catch up with the sequence."""
        behind = len(history.view.tokens) - history.seen[source] - NEAR
        return max(0, behind) * self.draft_costs[source].catch_up_ms

    def _explore(self, histories: Sequence[History], paying: Sequence[set[int]]) -> set[int]:
        """Sequences that are asked for although it is not expected to pay, those that waited longest first, as far as
        the saved time goes. An ask may cost more than a full saving: the debt is paid off before the next one."""
        open_ = [k for k, saved in enumerate(self._saved_ms) if saved > 0 and len(paying[k]) < len(histories)]
        if not open_ or self.row_chance * (1 + MARGIN) >= 1:
            return set()
        found = set()
        waiting = [(h.asked_at[k], k, i) for k in open_ for i, h in enumerate(histories) if i not in paying[k]]
        for _, source, i in sorted(waiting):
            history = histories[i]
            if not history.begun[source]:  # else it is paid for
                cost = self.draft_costs[source].predict(1) + self._behind_ms(source, history)
                if self._saved_ms[source] < min(cost, 0.99 * self._plain_ms) or cost > DEAREST * self._plain_ms:
                    continue
                self._saved_ms[source] -= cost
            self._trials.add((history.view.key, source))
            self._asks[source].least[history.view.key] = 0.0
            found.add(i)
        return found

    def _save(self, ms: float) -> None:
        """Put a share of some steps' time aside for asks that are not expected to pay, up to a plain step's time."""
        self._saved_ms = [min(self._plain_ms, saved + EXPLORE * ms) for saved in self._saved_ms]

    def _allowed(self, histories: Sequence[History], wanted: set[int]) -> list[int]:
        """Nodes that may be proposed for these sequences: all, or, where scores may not be looked at, those that pay by
        their depth."""
        best = [self.cap for _ in histories]
        if self._blind:
            best = [max(1, best_count(h.unscored(self.cap), self._priced(self.cap))) for h in histories]
        return [count if i in wanted else 0 for i, count in enumerate(best)]

    # -- between proposal and pass: see `DraftRule`

    def ask(self, source: int, views: Sequence[SequenceView], first: Sequence[float]) -> list[int]:
        """Which sequences to ask one of several sources for, given for each the chance that what others proposed
        begins right."""
        least = self._asks[source].least
        able = [i for i, view in enumerate(views) if view.sources is None or source in view.sources]
        chosen = [i for i in able if 1 - first[i] >= least.get(views[i].key, NEVER)]
        self._note(source, [views[i].key for i in chosen])
        if self.learns:
            self._asks[source].opens = {views[i].key: 1 - first[i] for i in chosen}
        return chosen

    def _note(self, source: int, keys: Sequence[int]) -> None:
        """Note that a source is asked for these sequences."""
        unseen, step = 0, self._steps
        for key in keys:
            history = self._histories[key]
            tokens = len(history.view.tokens)
            unseen += tokens - history.seen[source]
            # A prompt's last pass prepares the first step.
            fresh = history.asked_at[source] != step - 1 and history.born != step
            history.begun[source] = source == self._prepares and fresh
            history.asked_at[source], history.seen[source] = step, tokens
        self._asks[source].unseen = unseen

    def first(self, source: int, view: SequenceView, log_scores: Iterable[float]) -> float:
        """The chance that one of the first tokens that a source proposes is right, from its own log scores of them."""
        return self._histories[view.key].first(source, log_scores)

    def level_chance(self, source: int, count: int) -> float:
        """The chance of a path that pays for one more level of a source's network below it, for ``count`` sequences."""
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

    def select(self, views: Sequence[SequenceView], tree: TokenTree, passes: int | None = None) -> TokenTree | None:
        """The nodes that pay for their rows; None where none does. See `DraftRule.select`."""
        if self._one:
            self._note(0, [view.key for view in views])
            self._asks[0].opens = dict.fromkeys([view.key for view in views], 1.0)
        nodes = sum(tree.counts) - len(views)
        if nodes and self._all and not self.learns:  # as it was found since the last look
            return tree
        # Of so many rows as never yet the cost is a guess: go on from what is known.
        limit = nodes if self._blind else min(nodes, max(FIRST_ROWS, 2 * self._size.rows))
        first, measures = not self._size.rows, self._measures(limit)
        # Of what was never measured the price means nothing: for now, rows are free.
        prices = array("d", [0.0] * (nodes + 1)) if measures and first else self._priced(nodes)[: nodes + 1]
        histories, scores = [self._histories[view.key] for view in views], None if self._blind else tree.scores
        found = weigh(self._library, histories, tree, scores, prices, self._blind)
        gains, count = found.gains, sum(found.counts) - len(views)
        if measures or count > limit:  # an ask is worth what it will bring once so many rows are known
            found = weigh(self._library, histories, tree, scores, prices[: limit + 1], self._blind or measures)
            gains, count = found.gains if measures else gains, sum(found.counts) - len(views)
        self._rested += nodes > 0 and not count
        self._choice, self._all = (self._batch, count, found.tokens), 0 < count == nodes and not measures
        if self.learns:
            if self._one:
                self._asks[0].passes = found.levels if passes is None else passes
            if first or not measures:
                self._learn_gains(histories, gains)
        return tree.kept(found.kept) if 0 < count < nodes else (tree if count else None)

    def _measures(self, rows: int) -> bool:
        """Whether so many rows are checked whatever is expected of them, lest a table that is wrong stay so: the first
        ones of a batch size always are, more where the saved time pays for what they seem to cost."""
        if self._blind or not (rows and self.learns) or self.costs.visits(self._batch, rows) >= WINDOW:
            return False
        if self._size.rows:
            loss = self._priced(rows)[rows] / self._rate
            if self._saved_ms[0] < min(loss, 0.99 * self._plain_ms):
                return False
            self._saved_ms[0] -= loss
        return True

    # -- learning

    def _learn_gains(self, histories: Sequence[History], gains: Sequence[float]) -> None:
        """What every ask brought: for each sequence, the tokens expected of its nodes of each kind."""
        for source, asks in enumerate(self._asks):
            for b, history in enumerate(histories):
                key, at = history.view.key, b * self._marks
                if key not in asks.opens or history.begun[source]:
                    continue
                gain = sum(gains[at : at + self._marks]) if self._one else gains[at + source]
                history.learn(source, gain, asks.opens[key])
                if (key, source) in self._trials:  # it cost less than was paid for it
                    self._saved_ms[source] = min(self._plain_ms, self._saved_ms[source] + gain / self._rate)

    def observe(self, step: StepRecord) -> None:
        """Learn what the step cost and earned."""
        if not step.sequences:
            return
        batch, drafted, asked = len(step.sequences), sum(step.drafted), any(step.budgets)
        total_ms = step.draft_ms + step.rest_ms
        self._save(total_ms)
        if step.pure:
            size = self._sizes.setdefault(bucket(batch), _BatchSize())
            dear, streams = False, asked and self._prepares is not None and self._asks[self._prepares].opens
            if drafted or not streams:
                context = sum([len(s.view.tokens) for s in step.sequences])
                dear = self.costs.observe(batch, drafted, context, step.rest_ms)
                if not drafted:
                    size.plain_at = self._steps
            size.looks += 1
            if not dear or self.costs.visits(batch, drafted) >= WINDOW:  # dearer rows are met again before more are
                size.rows = max(drafted, size.rows)
            size.tokens += RATE * (sum(step.accepted) + batch - size.tokens)
            size.ms += RATE * (total_ms - size.ms)
        if asked:
            others = sum([asks.ms for source, asks in enumerate(self._asks) if source != self._late])
            self._learn_costs(self._late, step.ask_ms - others)

    def _learn_costs(self, source: int, ms: float) -> None:
        asks = self._asks[source]
        if asks.opens:
            self.draft_costs[source].observe(len(asks.opens), asks.passes, asks.unseen, ms)

    def forget(self, sequences: Sequence[RunningSequence]) -> None:
        """Judge the last proposals of sequences that ended, and drop what is kept of them."""
        self._keys, ended = [], [self._histories.pop(sequence.view.key, None) for sequence in sequences]
        for history in filter(None, ended):
            history.kind.ended(len(history.view.tokens) - history.view.prompt_len)
        if told := [history for history in ended if history is not None and history.count]:
            nothing = TokenTree.roots([history.view.tokens[-1] for history in told])
            weigh(self._library, told, nothing, None, array("d", [0.0]))

    def renew(self, application: str | None, source: str, expected: float | None = None) -> None:
        """See `DraftBudget.renew`: what was counted says little of its drafts."""
        self._keys, left = [], self._kinds.pop(application, None)
        self._histories = {key: history for key, history in self._histories.items() if history.kind is not left}
        if left is not None:
            at = self.sources.index(source)
            self._kinds[application] = left.renewed(at, range(self._marks) if self._one else [at], expected)

    # -- what it says

    @property
    def rule(self) -> AutoBudget:
        """This budget is the rule; see `DraftBudget.rule`."""
        return self

    def rested(self, sequence: RunningSequence) -> str | None:
        """Return why nothing at all was drafted for a sequence, where drafts did not pay in most of its steps."""
        history = self._histories.get(sequence.view.key)
        if history is None or sequence.state.stats.drafted:
            return None
        rests, steps = self._rested - history.rested_before, self._steps - history.born + 1
        return self._explain(1, 0, 0.0) if rests > steps / 2 else None

    def explain(self) -> str:
        """Say what the last step that asked for drafts chose, and why."""
        return self._explain(*self._choice) if self._batch else "auto: no step was planned yet"

    def _explain(self, batch: int, nodes: int, tokens: float) -> str:
        price = f"a row must be accepted with a chance of {self.row_chance:.0%} to pay"
        at = f"auto: at batch {self._batch} a plain step takes {self._plain_ms:.2f} ms, and {price}"
        if not batch:
            return f"{at}: nothing was drafted yet"
        gains = ", ".join(f"{name} {self._gain(k):.2f}" for k, name in enumerate(self.sources))
        asks = f"an ask brings, beyond its rows, so many tokens: {gains}"
        if not nodes:
            return f"{at}: drafts do not pay ({asks})"
        many = "1 node" if nodes == 1 else f"{nodes} nodes"
        return f"{at}: {many}, {tokens:.2f} accepted of them ({1 + tokens / batch:.2f} tokens a pass expected; {asks})"

    def _gain(self, source: int) -> float:
        """Tokens that an ask brought in the mean, at the present batch size."""
        key = source, bucket(self._batch)
        return mean([kind.gains[key].gain for kind in self._kinds.values() if key in kind.gains] or [0.0])

    def describe(self) -> dict[str, Any]:
        """The last choice and the figures behind it."""
        _, nodes, tokens = self._choice
        held = [chances.by_depth() for kind in [*self._kinds.values()][:1] for chances in kind.chances]
        return {
            "kind": "auto",
            "why": self.explain(),
            "cap": self.cap,
            "batch_size": self._batch,
            "nodes": nodes,
            "expected_tokens": tokens,
            "plain_ms": self._plain_ms,
            "row_chance": self.row_chance,
            "sources": {
                name: {
                    "gain": self._gain(k),
                    "ask_ms": costs.predict(1),
                    "level_ms": costs.level_ms(1),
                    "catch_up_ms": costs.catch_up_ms,
                    "held": held[k] if held else [],  # chance by depth, given the node above
                }
                for k, (name, costs) in enumerate(zip(self.sources, self.draft_costs, strict=True))
            },
            "rested_steps": self._rested,
            "steps": self._steps,
            "costs": self.costs.table.source,
        }
