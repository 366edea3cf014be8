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

Since every proposal is judged by the text that followed, drafts that were not checked teach as much as those that were.
Asks that are not expected to pay are made with a stated share of the time, each drafter with its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from math import exp
from typing import Any, Self

from .. import native
from ..core.errors import ConfigError
from ..core.tree import TokenTree
from ..drafters.base import DrafterSpec, SequenceView
from ..rounds.base import RunningSequence
from .budget import MAX_BUDGET, DraftBudget, StepRecord
from .chances import UNKNOWN, Chances, cell_of, odds_of
from .costs import NEAR, WINDOW, CostTable, DraftCosts, StepCosts, bucket
from .exploring import (
    EXPLORE,
    FIRST_GAIN,
    FIRST_GAIN_NETWORK,
    FIRST_LIFT,
    FIRST_ROWS,
    HORIZON,
    KIND_RATE,
    KNOWN_AFTER,
    LISTEN_EVERY,
    MARGIN,
    PILOT,
    QUICKEST,
    RATE,
    REST,
    TRIAL,
    TRUSTED,
    SavedTime,
    plain_due,
)
from .histories import AskGain, Choice, History, Kind, SourceStep
from .weighing import judge_all, weigh_all

MARGINAL = 1e-3  # tokens
LEAST_OPEN = 0.05  # chance of being needed at least, by which what an ask brought is scaled


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
        self.cap = cap
        self.sources = tuple(sources)
        self._marks = marks or len(self.sources)
        self.costs = StepCosts(table)
        self.draft_costs = [*(draft_costs or [DraftCosts() for _ in sources])]
        self.learns = True  # from the coming step
        self.rests = False  # in the coming step and in the one behind it
        self._numbers = range(len(self.sources))
        self._library = native.in_use()
        self._prepares, self._blind, self._spares = prepares, blind, spares
        self._late = prepares or 0  # its time is what others did not take: streams are read behind the pass
        self._kinds: dict[str | None, Kind] = {}
        self._histories: dict[int, History] = {}
        self._earned: dict[int, tuple[float, float]] = {}  # by bucket of batch sizes: running tokens, running ms
        self._heard: dict[int, int] = {}  # by bucket of batch sizes: observed steps
        self._steps = self._rested = self._look_at = 0
        # One for each source: a look-up that costs little would spend what a network has to save up for.
        self._saved = [SavedTime() for _ in self.sources]
        self._plain_at: dict[int, int] = {}  # by bucket of batch sizes: the last plain step, or attempt at one
        self._rows: dict[int, int] = {}  # by bucket of batch sizes: most nodes that were checked at once
        self._trials: set[tuple[int, int]] = set()  # (sequence, source) that are asked in order to learn
        # Of the coming step:
        self._first: set[int] = set()  # sequences that asking the first source for pays
        self._batch = self._context = 0
        self._plain_ms = table.step_ms(1, 0)
        self._rate = 0.0  # tokens a ms, over the batch
        self._rises: list[float] = []  # see `_rise`
        self._source_steps = [SourceStep() for _ in self._numbers]
        self._choice = Choice()

    @classmethod
    def of(cls, spec: DrafterSpec, table: CostTable, own: CostTable | None = None) -> Self:
        """The budget of a drafter.

        Args:
            spec: what it declares.
            table: what steps of the target cost.
            own: what passes of its draft model cost, where that was calibrated.
        """
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
        if self._steps < self._look_at:
            known = all([sequence.view.key in self._histories for sequence in sequences])
            same = known and batch_size == self._batch
            if same or self.rests:
                if not same:  # look at it in the next step: the states that drafts of this one need were not taken
                    self._look_at = self._steps + 1
                self._rest()
                self.learns = self._steps % LISTEN_EVERY == 0
                if not self.learns:
                    self._save(self._plain_ms)
                return [0] * len(sequences)
        self.rests = False
        histories = self._open(sequences, batch_size)
        plain = self._wants_plain()
        heard = self._heard.get(bucket(batch_size), 0)
        self.learns = plain or heard < KNOWN_AFTER or self._steps % LISTEN_EVERY == 0
        if not self.learns:
            self._save(self._plain_ms)
        wanted = self._wanted(histories, plain)
        if not wanted:
            if not plain:
                self._look_at = self._steps + REST
            self._rest()
            return [0] * len(histories)
        if self._blind:
            return [self._ahead(history) if i in wanted else 0 for i, history in enumerate(histories)]
        return [self.cap if i in wanted else 0 for i in range(len(histories))]

    def _rest(self) -> None:
        """Draft nothing in the coming step."""
        self._rested += 1
        self.rests = self._spares and self._steps + 1 < self._look_at

    def _save(self, ms: float) -> None:
        for saved in self._saved:
            saved.earn(EXPLORE * ms, self._plain_ms)

    def _open(self, sequences: Sequence[RunningSequence], batch_size: int) -> list[History]:
        """The sequences' histories, their last proposals judged; what a plain step takes and a millisecond earns."""
        size, histories, context = bucket(batch_size), [], 0
        for sequence in sequences:
            view = sequence.view
            history = self._histories.get(view.key)
            if history is None:
                history = self._histories[view.key] = self._new(view, size)
            elif history.bucket != size:
                self._move(history, size)
            histories.append(history)
            context += len(view.tokens)
        judge_all(self._library, histories)
        self._batch, self._context, self._rises = batch_size, context, []
        self._plain_ms = self.costs.predict(batch_size, 0, context)
        tokens, ms = self._earned.get(size, (0.0, 1.0))
        self._rate = max(batch_size / self._plain_ms, tokens / ms)
        return histories

    def _new(self, view: SequenceView, size: int) -> History:
        name = None if view.application is None else view.application.name
        kind = self._kinds.get(name)
        if kind is None:
            kind = self._kinds[name] = Kind([Chances() for _ in range(self._marks)])
        shift = array("d", [0.0] * self._marks)
        return History(kind, view, self._steps, self._rested, shift, size, self._gains(kind, size))

    def _move(self, history: History, size: int) -> None:
        """The batch has another size, at which asks are worth something else."""
        old, history.bucket, history.gains = history.gains, size, self._gains(history.kind, size)
        for record, was in zip(history.gains, old, strict=True):
            record.seen, record.asked_at, record.begun, record.tried = was.seen, was.asked_at, was.begun, was.tried

    def _gains(self, kind: Kind, size: int) -> list[AskGain]:
        """Where a sequence begins: with what its kind has brought at this batch size."""
        found = []
        for source, costs in enumerate(self.draft_costs):
            known = kind.gains.get((source, size))
            if known is None:
                gain = FIRST_GAIN_NETWORK if costs.network else FIRST_GAIN
                known = kind.gains[source, size] = AskGain(gain, lift=FIRST_LIFT)
            found.append(AskGain(known.gain, known.open, min(known.asks, TRUSTED), kind=known))
        return found

    def _wanted(self, histories: Sequence[History], plain: bool) -> set[int]:
        """The sequences to draft for: none in a plain step."""
        self._trials.clear()
        self._source_steps = [SourceStep() for _ in self._numbers]
        if plain:
            return set()
        paying = [self._paying(k, histories, [history.gains[k].open for history in histories]) for k in self._numbers]
        self._first = {histories[i].view.key for i in paying[0]}
        if len(paying) == 1 and len(paying[0]) == len(histories):
            return paying[0]
        return set().union(*paying, self._explore(histories, paying))

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

    def _wants_plain(self) -> bool:
        """Whether the coming step is to be a plain one, so that what drafts are compared with is measured."""
        size, gain = bucket(self._batch), self._rate * self._plain_ms / self._batch - 1
        lost = gain if self._prepares is None else 2 * gain  # the step after it has nothing prepared
        if not plain_due(self._steps - self._plain_at.get(size, 0), self.costs.visits(self._batch, 0), lost):
            return False
        self._plain_at[size] = self._steps  # also where prompts make it no plain one
        return True

    def _paying(self, source: int, histories: Sequence[History], opens: Sequence[float]) -> set[int]:
        """The sequences that asking this source for pays, in the mean."""
        costs, rate = self.draft_costs[source], self._rate
        if costs.network and costs.usual_calls < PILOT:  # all wait for what one of them finds out
            return {
                min(
                    range(len(histories)),
                    key=lambda i: len(histories[i].view.tokens) - histories[i].gains[source].seen,
                )
            }
        values = []
        for i, (history, open_) in enumerate(zip(histories, opens, strict=True)):
            record = history.gains[source]
            value = record.gain * open_ / max(record.open, LEAST_OPEN)
            if value > 0 and costs.catch_up_ms:
                value -= rate * self._behind_ms(source, history) / self._asks_left(source, history)
            if costs.network and self._worth_a_trial(source, history):
                value = max(value, rate * costs.predict(1) + MARGINAL)
            if value > 0:
                values.append((value, -i))
        if len(values) > 1:
            values.sort(reverse=True)
        if costs.network and values:  # trust grows with what is known: a new drafter is not asked for all at once
            kind = histories[0].gains[source].kind
            values = values[: max(1, kind.asks if kind is not None else 0)]
        total, best, count = 0.0, 0.0, 0
        for n, (value, _) in enumerate(values, start=1):
            total += value
            net = total - rate * costs.predict(n)
            if net > best:
                best, count = net, n
        return {-i for _, i in values[:count]}

    def _worth_a_trial(self, source: int, history: History) -> bool:
        """Whether to find out what asking a network brings for a new request: texts of one kind differ in that, and
        what a trial costs may come back many times."""
        record, costs = history.gains[source], self.draft_costs[source]
        if record.kind is None or record.tried >= TRIAL:
            return False
        cost = costs.predict(1) * (TRIAL - record.tried) + self._behind_ms(source, history)
        return record.kind.lift * self._asks_left(source, history) > self._rate * cost

    def _asks_left(self, source: int, history: History) -> float:
        """Asks over which what is learned or caught up with now can pay."""
        limit = HORIZON
        if history.view.max_len is not None:
            limit = min(limit, history.view.max_len - len(history.view.tokens))
        return max(1.0, limit / (1 + max(1.0, history.gains[source].gain)))

    def _explore(self, histories: Sequence[History], paying: Sequence[set[int]]) -> set[int]:
        """Sequences that are asked for although it is not expected to pay, those that waited longest first, as far as
        the saved share of the time goes."""
        open_ = {k for k in self._numbers if self._saved[k].credit_ms(self._plain_ms) > 0}
        if not open_ or self.row_chance * (1 + MARGIN) >= 1:
            return set()
        found = set()
        waiting = [
            (history.gains[k].asked_at, k, i)
            for k in open_
            for i, history in enumerate(histories)
            if i not in paying[k]
        ]
        for _, source, i in sorted(waiting):
            history = histories[i]
            if not history.gains[source].begun:  # else it is paid for
                cost = self.draft_costs[source].predict(1) + self._behind_ms(source, history)
                if not self._saved[source].pay(cost, self._plain_ms):
                    continue
            self._trials.add((history.view.key, source))
            found.add(i)
        return found

    def _behind_ms(self, source: int, history: History) -> float:
        """What the source has to compute first."""
        behind = len(history.view.tokens) - history.gains[source].seen - NEAR
        return max(0, behind) * self.draft_costs[source].catch_up_ms

    def _ahead(self, history: History) -> int:
        """Nodes of a chain whose scores may not be looked at: by depth alone."""
        path, chances = 1.0, history.kind.chances[0]
        found = []
        for depth in range(1, self.cap + 1):
            path *= chances.chance(UNKNOWN, depth)
            found.append(path)
        return max(1, self._best(found)[0])  # an ask that was found to pay, or that must teach something

    # -- between proposal and pass

    def ask(self, source: int, views: Sequence[SequenceView], first: Sequence[float]) -> list[int]:
        """Which sequences to ask one of several sources for.

        Args:
            source: its number.
            views: the sequences.
            first: for each the chance that what others proposed begins right.

        Returns:
            Their indices.
        """
        opens = [1 - chance for chance in first]
        if source == 0:  # as the plan says: nothing is known since
            chosen = {i for i, view in enumerate(views) if view.key in self._first}
        else:
            chosen = self._paying(source, [self._histories[view.key] for view in views], opens)
        if self._trials:
            chosen |= {i for i, view in enumerate(views) if (view.key, source) in self._trials}
        self._note(source, {views[i].key: opens[i] for i in chosen})
        return sorted(chosen)

    def _note(self, source: int, opens: dict[int, float]) -> None:
        asked, unseen = self._source_steps[source], 0
        asked.opens = opens
        for key in opens:
            history = self._histories[key]
            unseen += len(history.view.tokens) - history.gains[source].seen
        asked.unseen = unseen

    def first(self, source: int, view: SequenceView, log_scores: Iterable[float]) -> float:
        """The chance that one of the first tokens that a source proposes is right, from its own log scores of them."""
        history = self._histories[view.key]
        chances, shift = history.kind.chances[source], exp(history.shift[source])
        odds = [chances.odds[cell_of(odds_of(score), 1)] * shift for score in log_scores]
        return min(1.0, sum(o / (1 + o) for o in odds))

    def level_chance(self, source: int, count: int) -> float:
        """The chance of a path that pays for one more level of a source's network below it, for ``count`` sequences."""
        costs = self.draft_costs[source]
        if not costs.usual_calls:  # what levels cost is a guess: go deep, to find out
            return self.row_chance
        return self.row_chance + self._rate * costs.level_ms(count) / max(1, count)

    def told(self, source: int, passes: int, ms: float) -> None:
        """What the ask of one of several sources took."""
        self._source_steps[source].ms, self._source_steps[source].passes = ms, passes
        if source != self._late:
            self._learn_costs(source, passes, ms)

    def select(self, views: Sequence[SequenceView], tree: TokenTree, passes: int | None = None) -> TokenTree | None:
        """The nodes that pay for their rows; None where none does.

        Args:
            views: the sequences whose budget was not 0.
            tree: one proposal for each.
            passes: of the drafter's network that they took; None: as many as the deepest one has levels.
        """
        if len(self.sources) == 1:
            self._note(0, {view.key: 1.0 for view in views})
        if max(tree.counts) == 1:
            self._choice = Choice(self._batch)
            self._learn_gains(views)
            return None
        histories, most = [self._histories[view.key] for view in views], sum(tree.counts) - len(views)
        # Of so many rows as never yet the cost is a guess: go on from what is known.
        limit = most if self._blind else max(FIRST_ROWS, 2 * self._rows.get(bucket(self._batch), 0))
        ranked, levels = weigh_all(self._library, histories, tree, None if self._blind else tree.scores, limit)
        chances = [chance for chance, _, _ in ranked]
        count, price = self._best(chances)
        if self._blind or self._tries_rows(chances, count):  # decided ahead, or to learn
            count = len(ranked)
        chosen: list[list[tuple[float, int]]] = [[] for _ in views]
        for chance, b, i in ranked[:count]:
            chosen[b].append((chance, i))
        if len(self.sources) == 1:
            self._source_steps[0].passes = levels if passes is None else passes
        self._choice = Choice(self._batch, count, sum(chances[:count]), price * count / self._rate)
        self._learn_gains(views, chosen, tree, price)
        if not count or count == most:
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

    def _tries_rows(self, chances: Sequence[float], count: int) -> bool:
        """Whether to check all nodes although fewer are expected to pay: what so many rows cost was never measured, and
        a table that is wrong about it would stay so. The saved share of the time pays for it."""
        most = len(chances)
        if count == most or not self.learns or self.costs.visits(self._batch, most) >= WINDOW:
            return False
        rise = self._rise(most)
        loss = rise[most] - rise[count] - sum(chances[count:]) / self._rate
        return self._saved[0].pay(loss, self._plain_ms)

    # -- learning

    def _learn_gains(
        self,
        views: Sequence[SequenceView],
        chosen: Sequence[Sequence[tuple[float, int]]] = (),
        lists: TokenTree | None = None,
        price: float = 0.0,
    ) -> None:
        """What every ask brought: the chances of its chosen nodes, less the price of their rows.

        Args:
            views: the sequences.
            chosen: for each the nodes that were chosen, and their chances; empty: nothing was proposed.
            lists: the proposals.
            price: of a row, in tokens.
        """
        for source, asked in enumerate(self._source_steps):
            for b, view in enumerate(views):
                open_ = asked.opens.get(view.key)
                if open_ is None:
                    continue
                history = self._histories[view.key]
                record = history.gains[source]
                # A prompt's last pass prepares the first step.
                fresh = record.asked_at != self._steps - 1 and history.born != self._steps
                record.begun = fresh and source == self._prepares
                record.asked_at, record.seen = self._steps, len(view.tokens)
                if record.begun:  # nothing was prepared: no news
                    continue
                gain = 0.0
                if chosen and lists is not None:
                    marks, one = lists.sources[b], len(self.sources) == 1
                    gain = sum([chance - price for chance, i in chosen[b] if one or marks[i] == source])
                record.learn(gain, open_, QUICKEST)
                record.tried += 1
                if record.kind is not None:
                    record.kind.learn(gain, open_, KIND_RATE)
                    if record.tried == TRIAL:
                        cost = self._rate * self.draft_costs[source].predict(1)
                        record.kind.lifted(max(0.0, record.gain / max(record.open, LEAST_OPEN) - cost))
                if gain and (view.key, source) in self._trials:
                    self._saved[source].earn(gain / self._rate, self._plain_ms)

    def observe(self, step: StepRecord) -> None:
        """Learn what the step cost and earned."""
        if not step.sequences:
            return
        batch, drafted, asked = len(step.sequences), sum(step.drafted), any(step.budgets)
        size = bucket(batch)
        total_ms = step.draft_ms + step.rest_ms
        self._save(total_ms)
        if step.pure:
            context = sum(len(s.view.tokens) for s in step.sequences)
            ahead = self._prepares
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
            self._learn_costs(self._late, self._source_steps[self._late].passes, step.ask_ms - others)

    def _learn_costs(self, source: int, passes: int, ms: float) -> None:
        asked = self._source_steps[source]
        if asked.opens:
            self.draft_costs[source].observe(len(asked.opens), passes, asked.unseen, ms)

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
        choice = self._choice
        if not self._batch:
            return "auto: no step was planned yet"
        price = f"a row must be accepted with a chance of {self.row_chance:.0%} to pay"
        at = f"auto: at batch {self._batch} a plain step takes {self._plain_ms:.2f} ms, and {price}"
        if not choice.batch_size:
            return f"{at}: nothing was drafted yet"
        gains = ", ".join(f"{name} {self._gain(k):.2f}" for k, name in enumerate(self.sources))
        asks = f"an ask brings, beyond its rows, so many tokens: {gains}"
        if not choice.nodes:
            return f"{at}: drafts do not pay ({asks})"
        ahead = (choice.batch_size + choice.tokens) / choice.batch_size
        return f"{at}: {choice.nodes} nodes, {choice.tokens:.2f} of them expected ({ahead:.2f} tokens a pass; {asks})"

    def _gain(self, source: int) -> float:
        """Tokens that an ask brought in the mean, at the present batch size."""
        size = bucket(self._batch)
        known = [k.gains[source, size] for k in self._kinds.values() if (source, size) in k.gains]
        return sum(w.gain for w in known) / len(known) if known else 0.0

    def describe(self) -> dict[str, Any]:
        """The last choice and the figures behind it."""
        choice = self._choice
        return {
            "kind": "auto",
            "why": self.explain(),
            "cap": self.cap,
            "batch_size": self._batch,
            "nodes": choice.nodes,
            "expected_tokens": choice.tokens,
            "plain_ms": self._plain_ms,
            "rows_ms": choice.rows_ms,
            "row_chance": self.row_chance,
            "sources": {name: self._describe(k) for k, name in enumerate(self.sources)},
            "rested_steps": self._rested,
            "steps": self._steps,
            "costs": self.costs.table.source,
        }

    def _describe(self, source: int) -> dict[str, Any]:
        costs = self.draft_costs[source]
        held = [kind.chances[source].by_depth() for kind in self._kinds.values()]
        return {
            "gain": self._gain(source),
            "ask_ms": costs.predict(1),
            "level_ms": costs.level_ms(1),
            "catch_up_ms": costs.catch_up_ms,
            "held": held[0] if held else [],  # of the first kind met: chance by depth, given the node above
        }
