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

Asks that are not expected to pay are made with a stated share of the time (`EXPLORE`), each drafter with its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

from .. import native
from ..core.errors import ConfigError
from ..core.tree import TokenTree
from ..drafters.base import DrafterSpec, SequenceView
from ..rounds.base import RunningSequence
from .budget import MAX_BUDGET, DraftBudget, StepRecord
from .chances import Chances, History, RequestKind, SourceStep, judge_all, weigh_all
from .costs import NEAR, CostTable, DraftCosts, StepCosts, bucket

EXPLORE = 0.01  # share of the time for asks that are not expected to pay
PILOT = 3  # asks of a drafter with a network that are made for one sequence, to find out what it costs
DEAREST = 5.0  # plain steps that such an ask may take at most: a long prompt to catch up with
LEAST_OPEN = 0.05  # chance of being needed at least, by which what an ask brought is scaled
HORIZON = 32  # tokens over which catching up must pay; half of those left where the request ends earlier
MARGIN = 0.1  # by which nodes must be worth more than they cost: of many estimates the best are too good
FIRST_ROWS = 8  # nodes checked at once at a batch size where none were; then at most twice as many as ever
RATE = 1 / 16  # weight of a step in the tokens a millisecond earned
PLAIN_FIRST = 2  # plain steps at a batch size before drafts: what drafts are compared with must be measured
PLAIN_EVERY = 128  # steps between plain ones later; before, as many as double with each of them
KNOWN_AFTER = 48  # observed steps after which a batch size is known; then
LISTEN_EVERY = 3  # one step of so many is observed, since observing takes time
REST = 4  # steps after which a batch that nothing is drafted for is looked at again


class AutoBudget(DraftBudget):
    """Chooses which sequences draft, and which nodes are checked; learns from every step.

    Args:
        table: what steps cost, before any was run.
        cap: most nodes of a sequence (the drafter's own size).
        sources: names of the drafters behind the drafter, cheapest first; one where it is a single one.
        marks: kinds of nodes that are told apart by their source mark: as many as drafters, or, of a single one, as it
            has ways to come by them. None: as many as drafters.
        draft_costs: of each source; None: they look things up.
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
            raise ConfigError(
                f"a cap of {cap} nodes", f"it must be 1 to {MAX_BUDGET}", "give budget=0 to draft nothing"
            )
        self.cap, self.sources, self._marks = cap, tuple(sources), marks or len(sources)
        self.costs = StepCosts(table)
        self.draft_costs = [*(draft_costs or [DraftCosts() for _ in sources])]
        self.learns = True  # from the coming step
        self.rests = False  # in the coming step and in the one behind it
        self._numbers = range(len(self.sources))
        self._library = native.in_use()
        self._prepares, self._blind, self._spares = prepares, blind, spares
        self._late = prepares or 0  # its time is what others did not take: streams are read behind the pass
        self._kinds: dict[str | None, RequestKind] = {}
        self._histories: dict[int, History] = {}
        self._steps = self._rested = self._look_at = 0
        self._saved_ms = [0.0 for _ in sources]  # by source: time for asks that are not expected to pay
        # By bucket of batch sizes:
        self._earned: dict[int, tuple[float, float]] = {}  # running means: tokens and ms of a step
        self._heard: dict[int, int] = {}  # observed steps
        self._plain_at: dict[int, int] = {}  # the last plain step, or attempt at one
        self._rows: dict[int, int] = {}  # most nodes that were checked at once
        # Of the coming step:
        self._batch = self._context = 0
        self._priced = False  # whether what follows is of this batch size and of all that was observed
        self._plain_ms = table.step_ms(1, 0)
        self._rate = 0.0  # tokens a ms, over the batch
        self._rises: list[float] = []  # see `_rise`
        self._keys: list[int] = []  # the sequences that were looked at last
        self._stands: list[int] = []  # what was decided for them, trials apart
        self._all = False  # all nodes were checked that were proposed then
        self._first: set[int] = set()  # sequences that asking the first source for pays
        self._trials: set[tuple[int, int]] = set()  # (sequence, source) that are asked in order to learn
        self._source_steps = [SourceStep() for _ in self._numbers]
        # Of the last step that asked for drafts: batch size, nodes over the batch, their expected tokens and ms.
        self._choice = 0, 0, 0.0, 0.0

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
        same = batch_size == self._batch and keys == self._keys
        looks = self._steps % LISTEN_EVERY == 0 or self._heard.get(bucket(batch_size), 0) < KNOWN_AFTER
        looks = looks or self._steps == self._look_at or (self._prepares is not None and bool(self._trials))
        self._trials.clear()
        self._source_steps = [SourceStep() for _ in self._numbers]
        if (self._steps < self._look_at and self.rests) or (same and (self._steps < self._look_at or not looks)):
            if not same:  # look at it in the next step: the states that drafts of this one need were not taken
                self._look_at = self._steps + 1
            resting = self._steps < self._look_at or not same
            return self._decided([0] * len(keys) if resting else self._stands, self._steps % LISTEN_EVERY == 0)
        histories = self._open(sequences, batch_size)
        self._keys = keys
        if self._wants_plain():
            self._keys = []
            return self._decided([0] * len(keys), True)
        paying = [self._paying(k, histories, [history.gains[k].open for history in histories]) for k in self._numbers]
        self._first = {keys[i] for i in paying[0]}
        self._stands = self._allowed(histories, set().union(*paying))
        wanted = self._allowed(histories, set().union(*paying, self._explore(histories, paying)))
        if not any(wanted):
            self._look_at = self._steps + REST
        return self._decided(wanted, looks)

    def _decided(self, budgets: list[int], learns: bool) -> list[int]:
        """The budgets of the coming step, which is observed, or taken to last as long as a plain one."""
        resting = not any(budgets)
        self._rested += resting
        self.rests = resting and self._spares and self._steps + 1 < self._look_at
        self.learns = learns
        if not learns:
            self._save(self._plain_ms)
        return budgets

    def _save(self, ms: float) -> None:
        """Put a share of a step's time aside for asks that are not expected to pay, a plain step's time at most."""
        self._saved_ms = [min(self._plain_ms, saved + EXPLORE * ms) for saved in self._saved_ms]

    def _open(self, sequences: Sequence[RunningSequence], batch_size: int) -> list[History]:
        """The sequences' histories, their last proposals judged; what a plain step takes and a millisecond earns."""
        size, histories = bucket(batch_size), []
        for sequence in sequences:
            view = sequence.view
            history = self._histories.get(view.key)
            if history is None:
                name = None if view.application is None else view.application.name
                kind = self._kinds.setdefault(name, RequestKind([Chances() for _ in range(self._marks)]))
                history = History(view, kind, len(self.sources), self._steps, self._rested)
                self._histories[view.key] = history
            history.at_batch(size)
            histories.append(history)
        judge_all(self._library, histories)
        if batch_size != self._batch or not self._priced:
            self._batch, self._context, self._rises = batch_size, sum([len(h.view.tokens) for h in histories]), []
            self._plain_ms = self.costs.predict(batch_size, 0, self._context)
            tokens, ms = self._earned.get(size, (0.0, 1.0))
            self._rate = max(batch_size / self._plain_ms, tokens / ms)
            self._priced = True
        return histories

    def _wants_plain(self) -> bool:
        """Whether the coming step is to be a plain one, so that what drafts are compared with is measured.

        The first ones come at intervals that double: drafts may seem to pay much because the few plain steps seen were
        slow.
        """
        size, seen = bucket(self._batch), self.costs.visits(self._batch, 0)
        if seen >= PLAIN_FIRST and self._steps - self._plain_at.get(size, 0) <= min(PLAIN_EVERY, 1 << min(seen, 16)):
            return False
        self._plain_at[size] = self._steps  # also where prompts make it no plain one
        return True

    def _paying(self, source: int, histories: Sequence[History], opens: Sequence[float]) -> set[int]:
        """The sequences that asking this source for pays, in the mean."""
        costs, rate = self.draft_costs[source], self._rate
        if costs.network and costs.usual_calls < PILOT:  # all wait for what one of them finds out
            behind = [len(history.view.tokens) - history.seen[source] for history in histories]
            return {behind.index(min(behind))}
        values = []
        for i, (history, open_) in enumerate(zip(histories, opens, strict=True)):
            known = history.gains[source]
            value = known.gain * open_ / max(known.open, LEAST_OPEN)
            if value > 0 and costs.catch_up_ms:
                view, tokens = history.view, HORIZON
                if view.max_len is not None:
                    tokens = min(tokens, (view.max_len - len(view.tokens)) // 2)
                asks = max(1.0, tokens / (1 + max(1.0, known.gain)))  # over which it can pay
                value -= rate * self._behind_ms(source, history) / asks
            if value > 0:
                values.append((value, -i))
        values.sort(reverse=True)
        if costs.network and values:  # trust grows with what is known: a new drafter is not asked for all at once
            history = histories[0]
            values = values[: 1 + history.kind.gains[source, history.bucket].asks]
        total, best, count = 0.0, 0.0, 0
        for n, (value, _) in enumerate(values, start=1):
            total += value
            net = total - rate * costs.predict(n)
            if net > best:
                best, count = net, n
        return {-i for _, i in values[:count]}

    def _behind_ms(self, source: int, history: History) -> float:
        """What the source has to compute first."""
        behind = len(history.view.tokens) - history.seen[source] - NEAR
        return max(0, behind) * self.draft_costs[source].catch_up_ms

    def _explore(self, histories: Sequence[History], paying: Sequence[set[int]]) -> set[int]:
        """Sequences that are asked for although it is not expected to pay, those that waited longest first, as far as
        the saved time goes. An ask may cost more than a full saving: the debt is paid off before the next one."""
        open_ = [k for k in self._numbers if self._saved_ms[k] > 0 and len(paying[k]) < len(histories)]
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
            found.add(i)
        return found

    def _allowed(self, histories: Sequence[History], wanted: set[int]) -> list[int]:
        """Nodes that may be proposed for these sequences: all, or, where scores may not be looked at, those that pay by
        their depth."""
        if not self._blind:
            return [self.cap if i in wanted else 0 for i in range(len(histories))]
        best = [max(1, self._best(h.unscored(self.cap))[0]) for h in histories]
        return [count if i in wanted else 0 for i, count in enumerate(best)]

    def _rise(self, most: int) -> list[float]:
        """Ms by which 0, 1, .. drafted rows make the step longer, up to ``most`` at least."""
        if len(self._rises) <= most:
            self._rises = self.costs.rise(self._batch, most, self._context)
        return self._rises

    @property
    def row_chance(self) -> float:
        """The chance of being accepted that pays for a row in the coming step, where rows are cheapest."""
        rise = self._rise(8)
        return self._rate * min(rise[1], rise[2] / 2, rise[4] / 4, rise[8] / 8)

    # -- between proposal and pass: see `DraftRule`

    def ask(self, source: int, views: Sequence[SequenceView], first: Sequence[float]) -> list[int]:
        """Which sequences to ask one of several sources for, given for each the chance that what others proposed
        begins right."""
        opens = [1 - chance for chance in first]
        if source == 0:  # as the plan says: nothing is known since
            chosen = {i for i, view in enumerate(views) if view.key in self._first}
        else:
            chosen = self._paying(source, [self._histories[view.key] for view in views], opens)
        if self._trials:
            chosen |= {i for i, view in enumerate(views) if (view.key, source) in self._trials}
        chosen = {i for i in chosen if (own := views[i].sources) is None or source in own}  # the request's own choice
        self._note(source, {views[i].key: opens[i] for i in chosen})
        return sorted(chosen)

    def _note(self, source: int, opens: dict[int, float]) -> None:
        """These sequences are asked for, each needed with so much chance."""
        asked = self._source_steps[source]
        asked.opens = opens
        for key in opens:
            history = self._histories[key]
            tokens = len(history.view.tokens)
            asked.unseen += tokens - history.seen[source]
            # A prompt's last pass prepares the first step.
            fresh = history.asked_at[source] != self._steps - 1 and history.born != self._steps
            history.begun[source] = source == self._prepares and fresh
            history.asked_at[source], history.seen[source] = self._steps, tokens

    def first(self, source: int, view: SequenceView, log_scores: Iterable[float]) -> float:
        """The chance that one of the first tokens that a source proposes is right, from its own log scores of them."""
        return self._histories[view.key].first(source, log_scores)

    def level_chance(self, source: int, count: int) -> float:
        """The chance of a path that pays for one more level of a source's network below it, for ``count`` sequences."""
        costs = self.draft_costs[source]
        if not costs.usual_calls:  # what levels cost is a guess: go deep, to find out
            return self.row_chance
        return self.row_chance + self._rate * costs.level_ms(count) / max(1, count)

    def told(self, source: int, passes: int, ms: float) -> None:
        """What the ask of one of several sources took."""
        asked = self._source_steps[source]
        asked.ms, asked.passes = ms, passes
        if source != self._late:
            self._learn_costs(source, ms)

    def select(self, views: Sequence[SequenceView], tree: TokenTree, passes: int | None = None) -> TokenTree | None:
        """The nodes that pay for their rows; None where none does. See `DraftRule.select`."""
        if len(self.sources) == 1:
            self._note(0, {view.key: 1.0 for view in views})
        most = sum(tree.counts) - len(views)
        if not most:
            self._choice = self._batch, 0, 0.0, 0.0
            self._learn_gains(views, [[] for _ in views], tree, 0.0)
            return None
        if self._all and not self.learns:  # as it was found when these were looked at
            return tree
        histories = [self._histories[view.key] for view in views]
        # Of so many rows as never yet the cost is a guess: go on from what is known.
        limit = most if self._blind else max(FIRST_ROWS, 2 * self._rows.get(bucket(self._batch), 0))
        ranked, levels = weigh_all(self._library, histories, tree, None if self._blind else tree.scores, limit)
        count, price = self._best([chance for chance, _, _ in ranked])
        if self._blind:  # decided ahead
            count = len(ranked)
        chosen: list[list[tuple[float, int]]] = [[] for _ in views]
        for chance, b, i in ranked[:count]:
            chosen[b].append((chance, i))
        if len(self.sources) == 1:
            self._source_steps[0].passes = levels if passes is None else passes
        self._choice = self._batch, count, sum([chance for chance, _, _ in ranked[:count]]), price * count / self._rate
        self._learn_gains(views, chosen, tree, price)
        self._all = count == most
        if not count or self._all:
            return tree if count else None
        return tree.kept([[0, *sorted([i for _, i in own])] for own in chosen])

    def _best(self, chances: Sequence[float]) -> tuple[int, float]:
        """How many of the nodes pay, given their chances in falling order; and what a row of them costs, in tokens."""
        rise, rate = self._rise(len(chances)), self._rate * (1 + MARGIN)
        total, best, count = 0.0, 0.0, 0
        for k, chance in enumerate(chances, start=1):
            total += chance
            net = total - rate * rise[k]
            if net > best:
                best, count = net, k
        return count, rate * rise[count] / count if count else 0.0

    # -- learning

    def _learn_gains(
        self,
        views: Sequence[SequenceView],
        chosen: Sequence[Sequence[tuple[float, int]]],
        tree: TokenTree,
        price: float,
    ) -> None:
        """What every ask brought: for each sequence the chances of the ``chosen`` nodes, less the ``price`` of their
        rows, in tokens."""
        one = len(self.sources) == 1
        for source, asked in enumerate(self._source_steps):
            for view, own, marks in zip(views, chosen, tree.sources, strict=True):
                if view.key not in asked.opens:
                    continue
                history, open_ = self._histories[view.key], asked.opens[view.key]
                if not history.begun[source]:
                    gain = sum([chance - price for chance, i in own if one or marks[i] == source])
                    history.learn(source, gain, open_)
                    if (view.key, source) in self._trials:  # it cost less than was paid for it
                        self._saved_ms[source] = min(self._plain_ms, self._saved_ms[source] + gain / self._rate)

    def observe(self, step: StepRecord) -> None:
        """Learn what the step cost and earned."""
        if not step.sequences:
            return
        batch, drafted, asked = len(step.sequences), sum(step.drafted), any(step.budgets)
        size, total_ms = bucket(batch), step.draft_ms + step.rest_ms
        self._save(total_ms)
        self._priced = False
        if step.pure:
            context, ahead = sum([len(s.view.tokens) for s in step.sequences]), self._prepares
            streams = asked and ahead is not None and (len(self.sources) == 1 or self._source_steps[ahead].opens)
            if drafted or not streams:
                self.costs.observe(batch, drafted, context, step.rest_ms)
                if not drafted:
                    self._plain_at[size] = self._steps
            self._rows[size] = max(drafted, self._rows.get(size, 0))
            tokens, ms = self._earned.get(size, (0.0, 0.0))
            earned = sum(step.accepted) + batch
            self._heard[size] = self._heard.get(size, 0) + 1
            self._earned[size] = (tokens + RATE * (earned - tokens), ms + RATE * (total_ms - ms))
        if asked:
            others = sum([source.ms for k, source in enumerate(self._source_steps) if k != self._late])
            self._learn_costs(self._late, step.ask_ms - others)

    def _learn_costs(self, source: int, ms: float) -> None:
        asked = self._source_steps[source]
        if asked.opens:
            self.draft_costs[source].observe(len(asked.opens), asked.passes, asked.unseen, ms)

    def forget(self, sequences: Sequence[RunningSequence]) -> None:
        """Judge the last proposals of sequences that ended, and drop what is kept of them."""
        ended = [self._histories.pop(sequence.view.key, None) for sequence in sequences]
        judge_all(self._library, [history for history in ended if history is not None])

    # -- what it says

    @property
    def rule(self) -> AutoBudget:
        """Itself; see `DraftBudget.rule`."""
        return self

    def rested(self, sequence: RunningSequence) -> str | None:
        """Why nothing was drafted in most of the sequence's steps, where that is so."""
        history = self._histories.get(sequence.view.key)
        if history is None:
            return None
        steps = self._steps - history.born + 1
        return self.explain() if self._rested - history.rested_before > steps / 2 else None

    def explain(self) -> str:
        """What the last step that asked for drafts chose, and why, in a sentence."""
        batch, nodes, tokens, _ = self._choice
        if not self._batch:
            return "auto: no step was planned yet"
        price = f"a row must be accepted with a chance of {self.row_chance:.0%} to pay"
        at = f"auto: at batch {self._batch} a plain step takes {self._plain_ms:.2f} ms, and {price}"
        if not batch:
            return f"{at}: nothing was drafted yet"
        gains = ", ".join(f"{name} {self._gain(k):.2f}" for k, name in enumerate(self.sources))
        asks = f"an ask brings, beyond its rows, so many tokens: {gains}"
        if not nodes:
            return f"{at}: drafts do not pay ({asks})"
        return f"{at}: {nodes} nodes, {tokens:.2f} of them expected ({1 + tokens / batch:.2f} tokens a pass; {asks})"

    def _gain(self, source: int) -> float:
        """Tokens that an ask brought in the mean, at the present batch size."""
        key = source, bucket(self._batch)
        known = [kind.gains[key].gain for kind in self._kinds.values() if key in kind.gains]
        return sum(known) / len(known) if known else 0.0

    def describe(self) -> dict[str, Any]:
        """The last choice and the figures behind it."""
        _, nodes, tokens, rows_ms = self._choice
        held = [[chances.by_depth() for chances in kind.chances] for kind in self._kinds.values()][:1]
        return {
            "kind": "auto",
            "why": self.explain(),
            "cap": self.cap,
            "batch_size": self._batch,
            "nodes": nodes,
            "expected_tokens": tokens,
            "plain_ms": self._plain_ms,
            "rows_ms": rows_ms,
            "row_chance": self.row_chance,
            "sources": {
                name: {
                    "gain": self._gain(k),
                    "ask_ms": costs.predict(1),
                    "level_ms": costs.level_ms(1),
                    "catch_up_ms": costs.catch_up_ms,
                    "held": held[0][k] if held else [],  # of the first kind met: chance by depth, given the node above
                }
                for k, (name, costs) in enumerate(zip(self.sources, self.draft_costs, strict=True))
            },
            "rested_steps": self._rested,
            "steps": self._steps,
            "costs": self.costs.table.source,
        }
