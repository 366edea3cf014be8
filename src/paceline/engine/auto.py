"""The draft budget that the engine chooses: as many nodes as pay, none where none do.

Three things are measured: the cost of a step (`costs`), the cost of the drafter, and how many drafted tokens are
accepted (`acceptance`). From time to time a review chooses the budgets, over all sequences of the batch, that maximise

    expected tokens a second = (B + sum of expected accepted tokens) / (step + draft time)

where plain decoding is one of the choices. Between reviews a step costs a dictionary look-up.

It is never slower than plain decoding except for a configured share of the time. Trials, drafts made only to learn (a
sequence that is not drafted for may have become predictable), are paid from an exploration budget (the "purse"), which
grows by that share of the time and by the time that trials save. Failed trials use it up and double the wait; a
successful one pays for the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from ..core.errors import ConfigError
from ..rounds.base import RunningSequence
from .acceptance import Acceptance, AcceptanceConfig
from .budget import MAX_BUDGET, StepRecord
from .costs import NEAR, CostTable, DraftCosts, StepCosts, bucket


@dataclass(frozen=True, kw_only=True)
class AutoBudgetConfig:
    """Thresholds, exploration and effort of the choice. A batch *rests* while nothing is drafted for it; a *try* is a
    trial."""

    enter: float = 0.06  # gain over plain decoding from which a resting batch drafts: above the estimates' error
    stay: float = 0.025  # gain below which a drafting batch rests: the gap to `enter` prevents oscillation
    trim: float = 0.04  # gain over the drafter's own size from which less is given: drafters limit themselves
    switch: float = 0.005  # gain over the present budgets from which others replace them: to change costs nothing
    explore: float = 0.004  # share of the time that tries may cost; well under the 3 % that "never slower" allows
    purse: float = 1.5  # most that the exploration budget holds, in plain steps: what one bad phase may lose at once
    debt: float = 4.0  # plain steps that one try may lose when the purse is full: a new prompt's catch-up can cost this
    probe: int = 3  # nodes of a try: enough to see a run, few enough to be cheap
    longest_wait: int = 256  # steps between tries at most: a text may turn predictable at any time
    optimism: float = 0.95  # if even this acceptance would not pay, nothing is tried
    review_steps: int = 4  # steps between reviews at least
    review_share: float = 0.004  # share of the time that reviews may take
    review_grace: float = 2.0  # plain steps that reviews may take beyond their share
    listen_every: int = 4  # steps at rest of which one is learned from: plain steps are all alike
    rest_factor: int = 4  # a resting batch is reviewed so many times more rarely: only tries bring news
    forced_below: int = 8  # batches up to this size are reviewed at once when a sequence comes or goes
    plain_first: int = 2  # plain steps seen at a batch size before drafts: the baseline must be measured
    reference: float = 0.004  # share of the gain that is spent on plain steps that renew the baseline
    horizon: int = 64  # tokens over which a drafter's catching up must pay, fewer where the request ends earlier
    pilot: int = 1  # sequences of a batch that begin while the drafter is unknown: the others wait for the result
    pilot_steps: int = 3  # drafts after which it is known
    shared_samples: int = 4  # sequences a step from which all learn: more would say the same and cost time
    evaluations: int = 16  # points at which a walk over the nodes is evaluated
    ledger_rate: float = 1 / 24  # weight of a step in the profit that drafting really made
    ledger_steps: int = 12  # drafted steps before the ledger (the measured gain) is used
    penalty: int = 64  # steps of rest after a loss that the estimates did not foresee; doubles each time
    longest_penalty: int = 256  # beyond that the rest itself would cost more than another dozen of losing steps
    acceptance: AcceptanceConfig = field(default_factory=AcceptanceConfig)


@dataclass(slots=True)
class _Follow:
    """State of one sequence."""

    acceptance: Acceptance
    born: int  # step in which it was first seen
    rested_before: int  # steps at rest until then
    seen: int = 0  # tokens that the drafter has taken in


@dataclass(slots=True)
class Decision:
    """The result of a review, and the figures behind it."""

    batch_size: int
    plain_ms: float  # expected, of a step without drafts
    nodes: dict[int, int] = field(default_factory=dict)  # by sequence key; empty: rest
    newcomer: int = 0  # nodes of a sequence that came since
    tokens: float = 0.0  # expected accepted tokens of a step, over the batch, of the best budgets
    rows: float = 0.0  # expected drafted rows of it
    step_ms: float = 0.0  # expected, of a step with the best budgets, draft time included
    draft_ms: float = 0.0  # the draft time in it
    gain: float = 1.0  # expected speed of the best budgets over plain decoding
    hopeless: bool = False  # not even optimistic acceptance would pay
    penalised: bool = False  # drafting lost time in fact, whatever was expected

    @property
    def rests(self) -> bool:
        """Whether nothing is drafted."""
        return not self.nodes


@dataclass(slots=True)
class _Try:
    """A trial: a draft that is made in order to learn."""

    key: int
    expected_ms: float  # what it adds to the step
    base: int  # nodes that were planned for the sequence anyway
    follows: bool = False  # the step before was a try that only prepared this one


@dataclass(slots=True)
class _Ledger:
    """Measured gain or loss of drafting, in plain steps a step: exponential mean and variance."""

    least: int  # steps of rest after a first loss
    most: int  # the same after many
    penalty: int  # steps of rest after the next loss
    rest_until: int = 0  # step before which nothing is drafted
    mean: float = 0.0
    variance: float = 0.0
    steps: int = 0

    def add(self, profit: float, rate: float) -> None:
        rate = max(rate, 1 / (self.steps + 1))
        error = profit - self.mean
        self.mean += rate * error
        self.variance = (1 - rate) * (self.variance + rate * error * error)
        self.steps += 1

    def loses(self, least_steps: int, rate: float) -> bool:
        """Whether it lost time by more than chance explains."""
        return self.steps >= least_steps and self.mean + math.sqrt(self.variance * rate / (2 - rate)) < 0

    def wins(self, least_steps: int, rate: float) -> bool:
        """Whether it gained time by more than chance explains."""
        return self.steps >= least_steps and self.mean > math.sqrt(self.variance * rate / (2 - rate))

    def punish(self, step: int) -> None:
        """Rest from ``step`` on, and reset the measured gain."""
        self.rest_until = step + self.penalty
        self.penalty = min(self.most, 2 * self.penalty)
        self.mean = self.variance = 0.0
        self.steps = 0


class AutoBudget:
    """Chooses each sequence's nodes, zero included, and learns from every step.

    Args:
        table: what steps cost, before any was run.
        cap: most nodes of a sequence (the drafter's own size).
        tree: the drafter may propose siblings.
        draft_guess: the drafter's time before any was measured; see `DraftCosts`.
        prepares: the drafter proposes only what the step before has prepared, and a step without a budget prepares
            nothing: a trial then takes two steps.
        config: thresholds and exploration.
        clock: seconds, to time the reviews.
    """

    never_drafts = False

    def __init__(
        self,
        table: CostTable,
        *,
        cap: int,
        tree: bool = False,
        draft_guess: Sequence[float] = (0.03, 0.0, 0.002, 0.002),
        prepares: bool = False,
        config: AutoBudgetConfig | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        if not 1 <= cap <= MAX_BUDGET:
            raise ConfigError(
                f"a cap of {cap} nodes", f"it must be 1 to {MAX_BUDGET}", "give budget=0 to draft nothing"
            )
        self.config = config or AutoBudgetConfig()
        self.cap = cap
        self.tree = tree
        self.costs = StepCosts(table)
        self.draft_costs = DraftCosts(draft_guess)
        self.shared = Acceptance(self.config.acceptance)
        self.decision = Decision(batch_size=0, plain_ms=table.step_ms(1, 0))
        self._clock = clock
        self._follows: dict[int, _Follow] = {}
        self._step = 0
        self._rested = 0  # steps at rest
        self._review_at = 0
        self._review_gap = 1  # steps to the next review at most: few after a change of mind
        self._plan_ms = 0.0  # of the coming step
        self._elapsed_ms = 0.0  # of all steps
        self._listens = True
        self._reviews_ms = 0.0  # of all reviews
        self._review_ms = 0.1  # of one review, by sequence
        self._planned = True  # whether the coming step drafts as the decision says
        self._purse_ms = table.step_ms(1, 0) / 2
        self._try: _Try | None = None
        self._prepares = prepares
        self._prepared: int | None = None  # key of the sequence that the last step's try has prepared
        self._try_at = 0
        self._wait = 1
        self._since_plain = 0
        self._ledgers: dict[int, _Ledger] = {}  # by bucket of batch sizes
        self._recent: dict[int, Decision] = {}  # the last review's, by bucket of batch sizes

    # -- the contract

    @property
    def learns(self) -> bool:
        """Whether to observe the coming step: every one that drafts, some of the others."""
        return self._listens

    def plan(self, sequences: Sequence[RunningSequence], batch_size: int) -> list[int]:
        """Nodes for the coming step; see `DraftBudget.plan`."""
        began = self._clock()
        self._step += 1
        self._try = None
        due = self._meet(sequences, batch_size) or self._step >= self._review_at
        if due and self._affords(batch_size):
            self._review(sequences, batch_size)
            self._schedule_review(batch_size, (self._clock() - began) * 1e3)
        elif bucket(batch_size) != bucket(self.decision.batch_size):
            self.decision = self._recall(sequences, batch_size)
        budgets = self._budgets(sequences, batch_size)
        self._plan_ms = (self._clock() - began) * 1e3
        self._listens = not self.decision.rests or self._try is not None or self._step % self.config.listen_every == 0
        if not self._listens:
            self._elapsed_ms += self.decision.plain_ms
            self._earn(self.decision.plain_ms)
        return budgets

    def observe(self, step: StepRecord) -> None:
        """Learn costs and acceptance from a step."""
        if not step.sequences:
            return
        drafted = sum(step.drafted)
        self._elapsed_ms += step.draft_ms + step.rest_ms
        rest_ms = max(0.0, step.rest_ms - self._plan_ms)
        self._plan_ms = 0.0
        context = sum(len(s.view.tokens) for s in step.sequences)
        plain_ms = self.costs.predict(len(step.sequences), 0, context)
        if step.pure:
            self.costs.observe(len(step.sequences), drafted, context, rest_ms)
            self._since_plain = 0 if drafted == 0 else self._since_plain + 1
        self._earn(plain_ms)
        if any(step.budgets):
            self._learn_drafts(step)
            self._account(step, rest_ms + step.draft_ms, plain_ms)

    def forget(self, sequences: Sequence[RunningSequence]) -> None:
        """Drop what is kept of sequences that ended."""
        for sequence in sequences:
            self._follows.pop(sequence.view.key, None)

    def reason(self) -> str | None:
        """Nothing is known before the first step."""
        return None

    def rested(self, sequence: RunningSequence) -> str | None:
        """Why nothing was drafted in most of the sequence's steps, where that is so."""
        follow = self._follows.get(sequence.view.key)
        if follow is None or not self.decision.rests:
            return None
        steps = self._step - follow.born + 1
        return self.explain() if self._rested - follow.rested_before > steps / 2 else None

    def explain(self, sequence: RunningSequence | None = None) -> str:
        """Why the last review chose its budgets, in a sentence; for one sequence if it is given."""
        d = self.decision
        if d.batch_size == 0:
            return "auto: no step was planned yet"
        first = self._acceptance(sequence).chance(1)
        arrives = f"a first drafted token arrives in {first:.0%} of the steps"
        if not d.rests:
            nodes = max(d.nodes.values()) if sequence is None else d.nodes.get(sequence.view.key, d.newcomer)
            return (
                f"auto: {'up to ' if sequence is None else ''}{nodes} nodes at batch {d.batch_size}: "
                f"{d.batch_size + d.tokens:.2f} tokens expected in {d.step_ms:.2f} ms, where plain decoding gets "
                f"{d.batch_size} in {d.plain_ms:.2f} ms: {d.gain:.2f} times its speed ({arrives})"
            )
        at = f"auto: at batch {d.batch_size}"
        if d.penalised:
            return f"{at} drafting lost time in fact, so it rests for a while ({arrives})"
        if d.hopeless:
            return f"{at} a drafted row costs more than it brings, even were {self.config.optimism:.0%} accepted"
        return (
            f"{at} drafts do not pay: the best budget promises {d.gain:.2f} times plain decoding's speed ({arrives}; "
            f"a step takes {d.plain_ms:.2f} ms without drafts, {d.step_ms:.2f} ms with {d.rows:.1f} drafted rows, "
            f"{d.draft_ms:.2f} ms of it drafting)"
        )

    def describe(self) -> dict[str, Any]:
        """The last choice and the figures behind it."""
        d = self.decision
        depths = min(self.cap, len(self.shared.arrive))
        return {
            "kind": "auto",
            "why": self.explain(),
            "cap": self.cap,
            "batch_size": d.batch_size,
            "nodes": sorted(d.nodes.values(), reverse=True),
            "expected_gain": d.gain,
            "plain_ms": d.plain_ms,
            "step_ms": d.step_ms,
            "draft_ms": d.draft_ms,
            "acceptance": [self.shared.chance(depth) for depth in range(1, depths + 1)],
            "rested_steps": self._rested,
            "steps": self._step,
            "costs": self.costs.table.source,
        }

    # -- between reviews

    def _meet(self, sequences: Sequence[RunningSequence], batch_size: int) -> bool:
        """Begin to follow new sequences; whether the batch is another one than was reviewed."""
        fresh = [s for s in sequences if s.view.key not in self._follows]
        for sequence in fresh:
            own = Acceptance(self.config.acceptance, self.shared)
            self._follows[sequence.view.key] = _Follow(own, self._step, self._rested)
        if fresh:
            self._try_at = min(self._try_at, self._step + 2)  # a new text: see whether it is another kind of text
        reviewed = self.decision.batch_size
        if batch_size <= self.config.forced_below:
            return bool(fresh) or batch_size != reviewed
        return abs(batch_size - reviewed) > reviewed / 4

    def _budgets(self, sequences: Sequence[RunningSequence], batch_size: int) -> list[int]:
        decision = self.decision
        self._planned = False
        if decision.rests:
            self._rested += 1
            budgets = [0] * len(sequences)
        elif self._wants_plain(batch_size):
            return [0] * len(sequences)
        else:
            self._planned = True
            chosen, other = decision.nodes, decision.newcomer
            budgets = [chosen.get(s.view.key, other) for s in sequences]
        if self._step >= self._try_at and not (decision.hopeless or decision.penalised):
            self._consider_try(sequences, budgets, batch_size)
        return budgets

    def _wants_plain(self, batch_size: int) -> bool:
        """Whether a plain step is due, so that the baseline is measured and kept up to date."""
        if self.costs.visits(batch_size, 0) < self.config.plain_first:
            return True
        interval = (self.decision.gain - 1) / self.config.reference
        return self._since_plain >= max(24.0, min(512.0, interval))

    def _consider_try(self, sequences: Sequence[RunningSequence], budgets: list[int], batch_size: int) -> None:
        """Let one sequence draft more than planned if the exploration budget allows it."""
        chosen, nodes = self._candidate(sequences, budgets)
        prepared = [i for i, s in enumerate(sequences) if s.view.key == self._prepared and budgets[i] == 0]
        self._prepared = None
        if prepared:
            chosen, nodes = prepared[0], min(self.config.probe, self.cap)
        base = budgets[chosen]
        if nodes <= base:
            self._try_at = self._step + self.config.review_steps
            return
        added, gain = self._price(sequences[chosen], budgets, base, nodes, batch_size)
        loss = added - gain * self.decision.plain_ms / batch_size
        if loss > self._credit_ms() and not prepared:  # what was paid for in the last step is not thrown away
            missing = min(loss, self._most_ms()) - self._purse_ms
            wait = math.ceil(missing / max(1e-6, self.config.explore * self.decision.plain_ms))
            self._try_at = self._step + max(1, min(self.config.longest_wait, wait))
            return
        budgets[chosen] = nodes
        self._try = _Try(sequences[chosen].view.key, added, base, bool(prepared))
        self._wait = min(self.config.longest_wait, 2 * self._wait)
        self._try_at = self._step + self._wait

    def _candidate(self, sequences: Sequence[RunningSequence], budgets: list[int]) -> tuple[int, int]:
        """(index, nodes) of a try: the resting sequence with least to catch up, else one that drafts, with the cap."""
        resting = [i for i, budget in enumerate(budgets) if budget == 0]
        if not resting:
            return self._step % len(budgets), self.cap
        unseen = [self._unseen(sequences[i]) for i in resting]
        equals = [i for i, u in zip(resting, unseen, strict=True) if u <= min(unseen) + NEAR]
        return equals[self._step % len(equals)], min(self.config.probe, self.cap)

    def _price(
        self, sequence: RunningSequence, budgets: list[int], base: int, nodes: int, batch_size: int
    ) -> tuple[float, float]:
        """(ms, tokens) that a try is expected to add to the step."""
        gains, rows = self._acceptance(sequence).curve(nodes, self.tree)
        others = self.decision.rows if self._planned else 0.0
        more = others + max(1.0, sum(rows[base:]))
        added = self.costs.predict(batch_size, more) - self.costs.predict(batch_size, others)
        asked, total, unseen = sum(b > 0 for b in budgets), sum(budgets), self._unseen(sequence)
        deepest = max(budgets)
        draft = self.draft_costs.predict(asked + (base == 0), max(deepest, nodes), total - base + nodes, unseen)
        if asked:
            draft -= self.draft_costs.predict(asked, deepest, total)
        return max(0.0, added) + max(0.0, draft), sum(gains[base:])

    def _most_ms(self) -> float:
        """The most that the exploration budget holds, in ms."""
        return self.config.purse * self.decision.plain_ms

    def _credit_ms(self) -> float:
        """What a trial may lose: the exploration budget; a full one may be overdrawn, else an expensive trial is never
        made."""
        full = self._purse_ms >= 0.99 * self._most_ms()
        return self.config.debt * self.decision.plain_ms if full else self._purse_ms

    def _earn(self, plain_ms: float) -> None:
        self._purse_ms = min(self._most_ms(), self._purse_ms + self.config.explore * plain_ms)

    # -- learning

    def _learn_drafts(self, step: StepRecord) -> None:
        asked = [i for i, budget in enumerate(step.budgets) if budget > 0]
        unseen = 0
        for place, i in enumerate(asked):
            sequence = step.sequences[i]
            follow = self._follows.get(sequence.view.key)
            if follow is None:
                continue
            counts = (step.budgets[i], step.drafted[i], step.accepted[i], sequence.finished)
            follow.acceptance.observe(*counts)
            if (place + self._step) % len(asked) < self.config.shared_samples:
                self.shared.observe(*counts)
            now = len(sequence.view.tokens)
            before = now - step.accepted[i] - 1  # as the drafter saw it
            unseen += max(0, before - follow.seen)
            follow.seen = before
        nodes = [step.budgets[i] for i in asked]
        self.draft_costs.observe(len(asked), max(nodes), sum(nodes), unseen, step.draft_ms)

    def _account(self, step: StepRecord, total_ms: float, plain_ms: float) -> None:
        """Add the measured gain or loss of a step's drafts to the exploration budget or to the ledger."""
        batch = len(step.sequences)
        if self._try is not None:
            keys = [s.view.key for s in step.sequences]
            place = keys.index(self._try.key) if self._try.key in keys else None
            accepted = 0 if place is None else max(0, step.accepted[place] - self._try.base)
            spent = self._try.expected_ms
            if self.decision.rests and step.pure:
                spent = max(0.0, min(total_ms - plain_ms, 2 * spent))
            purse = self._purse_ms + accepted * plain_ms / batch - spent
            self._purse_ms = max(-2 * self.config.debt * plain_ms, min(self._most_ms(), purse))
            if (
                place is not None and step.drafted[place] == 0 and self._try.base == 0
            ):  # nothing was proposed: cheap, and no news
                self._wait = max(1, self._wait // 2)
                self._try_at = self._step + min(self._wait, self.config.review_steps)
                if self._prepares and not self._try.follows:
                    self._prepared, self._try_at = self._try.key, self._step + 1
            if accepted and self._try.base == 0:
                self._wait = 1
                self._try_at = self._step + 1
                self._review_at = self._step + 1
        elif self._planned and step.pure:
            # A slow moment is no evidence: at most 1.5 times the expected cost is charged.
            charged = min(total_ms, 1.5 * max(self.decision.step_ms, plain_ms))
            self._ledger(batch).add(sum(step.accepted) / batch + 1 - charged / plain_ms, self.config.ledger_rate)

    # -- the review

    def _recall(self, sequences: Sequence[RunningSequence], batch_size: int) -> Decision:
        """What the last review of such a batch chose, the same for every sequence; rest where there was none."""
        known = self._recent.get(bucket(batch_size))
        if known is None:
            plain_ms = self.costs.predict(batch_size, 0, sum(len(s.view.tokens) for s in sequences))
            return Decision(batch_size=batch_size, plain_ms=plain_ms)
        nodes = {} if known.rests else {s.view.key: known.newcomer for s in sequences}
        return replace(known, batch_size=batch_size, nodes=nodes if known.newcomer else {})

    def _affords(self, batch_size: int) -> bool:
        """Whether a review now keeps all reviews within their share of the time."""
        config, expected = self.config, self._review_ms * batch_size
        allowance = config.review_share * self._elapsed_ms + config.review_grace * self.decision.plain_ms
        return self.decision.batch_size == 0 or self._reviews_ms + expected <= allowance

    def _schedule_review(self, batch_size: int, took_ms: float) -> None:
        config = self.config
        self._reviews_ms += took_ms
        self._review_ms += 0.3 * (took_ms / batch_size - self._review_ms)
        steps = max(config.review_steps, math.ceil(took_ms / (config.review_share * self.decision.plain_ms)))
        if self.decision.rests:
            steps *= config.rest_factor
        self._review_at = self._step + min(steps, self._review_gap)
        self._review_gap *= 2

    def _review(self, sequences: Sequence[RunningSequence], batch_size: int) -> None:
        config = self.config
        before = self.decision
        walk = _Walk(self, sequences, batch_size)
        best = walk.best()
        if self._penalise(before):
            best.penalised = True
        drafted = not before.rests
        best.penalised = best.penalised or self._step < self._ledger(batch_size).rest_until
        if best.penalised or best.gain < 1 + (config.stay if drafted else config.enter):
            best.hopeless = not best.penalised and walk.ceiling(config.optimism) < 1 + config.enter
            best.nodes = {}
            best.newcomer = 0
        else:
            best = self._hold(best, before, walk)
        if not best.rests and self.draft_costs.usual_calls < config.pilot_steps:
            self._pilot(best, sequences)
        self.decision = self._recent[bucket(batch_size)] = best
        if best.rests == drafted:
            self._review_gap = 1

    def _hold(self, best: Decision, before: Decision, walk: _Walk) -> Decision:
        """Budgets that are changed only for a clear gain: the drafter's own size, and the previous ones."""
        config = self.config
        full = walk.value_of({key: self.cap if nodes else 0 for key, nodes in best.nodes.items()}, self.cap)
        if full.gain >= 1 + config.enter and best.gain < full.gain * (1 + config.trim):
            return full
        if not before.rests and before.batch_size == best.batch_size:
            kept = walk.value_of(before.nodes, before.newcomer)
            if kept.gain >= 1 + config.stay and best.gain < kept.gain * (1 + config.switch):
                return kept
        return best

    def _pilot(self, decision: Decision, sequences: Sequence[RunningSequence]) -> None:
        """Begin with the few sequences that have least to catch up: nothing is known of this drafter yet."""
        first = {s.view.key for s in sorted(sequences, key=self._unseen)[: self.config.pilot]}
        decision.nodes = {key: nodes if key in first else 0 for key, nodes in decision.nodes.items()}
        decision.newcomer = 0

    def _penalise(self, before: Decision) -> bool:
        """Rest where drafting measurably loses although the estimates expect a gain."""
        ledger, config = self._ledger(before.batch_size), self.config
        if ledger.wins(config.ledger_steps, config.ledger_rate):
            ledger.penalty = ledger.least  # other texts, other luck
        if before.rests or not ledger.loses(config.ledger_steps, config.ledger_rate):
            return False
        ledger.punish(self._step)
        return True

    def _ledger(self, batch_size: int) -> _Ledger:
        config = self.config
        fresh = _Ledger(config.penalty, config.longest_penalty, config.penalty)
        return self._ledgers.setdefault(bucket(batch_size), fresh)

    def _acceptance(self, sequence: RunningSequence | None) -> Acceptance:
        follow = self._follows.get(sequence.view.key) if sequence is not None else None
        return follow.acceptance if follow else self.shared

    def _unseen(self, sequence: RunningSequence) -> int:
        """Tokens that the drafter has not processed."""
        follow = self._follows.get(sequence.view.key)
        return len(sequence.view.tokens) - (follow.seen if follow else 0)


@dataclass(slots=True)
class _Node:
    """One more node for one sequence."""

    worth: float  # expected tokens over what it costs: the order in which nodes are taken
    index: int  # of the sequence
    depth: int
    gain: float  # expected tokens
    rows: float  # expected rows


class _Walk:
    """Takes nodes from all sequences, best first, and stops where the batch is fastest.

    Args:
        budget: estimates.
        sequences: those that can draft.
        batch_size: generating sequences.
    """

    def __init__(self, budget: AutoBudget, sequences: Sequence[RunningSequence], batch_size: int) -> None:
        self._budget = budget
        self._config = budget.config
        self._sequences = sequences
        self._batch = batch_size
        self._context = sum(len(s.view.tokens) for s in sequences)
        self._plain_ms = budget.costs.predict(batch_size, 0, self._context)
        self._draft = budget.draft_costs.predict
        self._per_token = budget.draft_costs.catch_up_ms
        self._catch_up = [self._catch_up_ms(s) for s in sequences]
        count = max(1, len(sequences))
        self._sequence_ms = self._draft(count, 1, count) / count
        self._node_ms = max(0.0, self._draft(count, 2, 2 * count) - self._draft(count, 1, count)) / count
        self._row_ms = (budget.costs.predict(batch_size, batch_size, self._context) - self._plain_ms) / batch_size
        follows = budget._follows
        self._curves = [follows[s.view.key].acceptance.curve(self._most(s), budget.tree) for s in sequences]

    def _most(self, sequence: RunningSequence) -> int:
        return max(1, min(self._budget.cap, sequence.max_len - len(sequence.view.tokens) - 1))

    def _catch_up_ms(self, sequence: RunningSequence) -> float:
        """What the drafter has to compute first, spread over the steps in which that can pay."""
        left = sequence.max_len - len(sequence.view.tokens)
        steps = max(1.0, min(left, self._config.horizon) / 4)  # two tokens a step, and twice over to be safe
        return max(0, self._budget._unseen(sequence) - NEAR) * self._per_token / steps

    def best(self) -> Decision:
        """The budgets that promise most tokens a second, plain decoding apart."""
        nodes = self._nodes(self._curves)
        found = max((self._walk([n for n in nodes if n.depth <= d]) for d in self._levels()), key=lambda f: f.gain)
        if found.nodes:
            found.newcomer = self._newcomer(found)
        return found

    def ceiling(self, chance: float) -> float:
        """The gain over plain decoding if all proposed always and at once, and were right so often."""
        most = min(self._budget.cap, 16)
        gains = [chance**depth for depth in range(1, most + 1)]
        curve = (gains, [1.0] * most)
        free = copy(self)  # of the drafter's time, which may have been measured at a bad moment
        free._catch_up = [0.0] * len(self._sequences)
        free._sequence_ms = free._node_ms = 0.0
        free._draft = lambda *_: 0.0
        return max(free._walk(free._nodes([curve] * len(self._sequences))).gain, 1.0)

    def value_of(self, budgets: dict[int, int], newcomer: int) -> Decision:
        """Given budgets by the present estimates."""
        nodes = {s.view.key: budgets.get(s.view.key, newcomer) for s in self._sequences}
        tally = _Tally(self._batch)
        for index, (sequence, (gains, rows)) in enumerate(zip(self._sequences, self._curves, strict=True)):
            for depth in range(1, min(nodes[sequence.view.key], len(gains)) + 1):
                tally.take(_Node(0, index, depth, gains[depth - 1], rows[depth - 1]), self._catch_up[index])
        found = self._decide(tally, self._costs(tally, 0.0))
        found.nodes, found.newcomer = (nodes if any(nodes.values()) else {}), newcomer
        return found

    def _levels(self) -> list[int]:
        """Depths to try as a limit for all; one is enough where depth costs nothing of its own."""
        cap = self._budget.cap
        count = len(self._sequences)
        deep = self._draft(count, cap, count * cap) - self._draft(count, 1, count)
        if count == 1 or deep < 0.02 * self._plain_ms:
            return [cap]
        return sorted({min(cap, d) for d in (1, 2, 4, 8, cap)})

    def _nodes(self, curves: Sequence[tuple[list[float], list[float]]]) -> list[_Node]:
        """Every node on offer, the most worth first, a sequence's own in their order."""
        nodes = []
        for index, (gains, rows) in enumerate(curves):
            fixed = self._sequence_ms + self._catch_up[index]
            worth = math.inf
            for depth, (gain, row) in enumerate(zip(gains, rows, strict=True), start=1):
                worth = min(worth, gain / (row * self._row_ms + self._node_ms + fixed + 1e-9))
                fixed = 0.0
                nodes.append(_Node(worth, index, depth, gain, row))
        nodes.sort(key=lambda node: -node.worth)
        return nodes

    def _walk(self, nodes: Sequence[_Node]) -> Decision:
        stride = max(1, len(nodes) // self._config.evaluations)
        tally = _Tally(self._batch)
        best: Decision | None = None
        taken = 0
        highest = 0.0
        for count, node in enumerate(nodes, start=1):
            tally.take(node, self._catch_up[node.index])
            if count % stride and count != len(nodes):
                continue
            costs = self._costs(tally, highest)
            highest = costs[0]
            found = self._decide(tally, costs)
            if best is None or found.gain > best.gain:
                best, taken = found, count
        assert best is not None, "a review of no sequences"
        for node in nodes[:taken]:
            key = self._sequences[node.index].view.key
            best.nodes[key] = max(node.depth, best.nodes.get(key, 0))
        for sequence in self._sequences:
            best.nodes.setdefault(sequence.view.key, 0)
        return best

    def _costs(self, tally: _Tally, highest: float) -> tuple[float, float]:
        """(target ms, draft ms); the first never below ``highest``, since more rows are not cheaper."""
        some = 1 - tally.none
        target = self._plain_ms
        if some > 0 and tally.rows > 0:
            full = self._budget.costs.predict(self._batch, tally.rows / some, self._context)
            target += some * max(0.0, full - self._plain_ms)
        draft = self._draft(tally.sequences, tally.deepest, tally.nodes)
        return max(target, highest), draft + tally.catch_up

    def _decide(self, tally: _Tally, costs: tuple[float, float]) -> Decision:
        step_ms = sum(costs)
        return Decision(
            batch_size=self._batch,
            plain_ms=self._plain_ms,
            tokens=tally.gain,
            rows=tally.rows,
            step_ms=step_ms,
            draft_ms=costs[1],
            gain=(1 + tally.gain / self._batch) * self._plain_ms / step_ms,
        )

    def _newcomer(self, found: Decision) -> int:
        """Nodes for sequences that join before the next review: what the shared averages would get here."""
        gains, rows = self._budget.shared.curve(self._budget.cap, self._budget.tree)
        price = found.step_ms / (self._batch + found.tokens)  # ms a token, as things stand
        profits = [g * price - r * self._row_ms - self._node_ms for g, r in zip(gains, rows, strict=True)]
        nodes = next((n for n, profit in enumerate(profits) if profit <= 0), len(profits))
        # One that is as far behind as the others were at their start is left to the next review.
        behind = max(self._catch_up, default=0.0) + self._per_token * self._context / len(self._sequences) / 16
        return nodes if sum(profits[:nodes]) > behind else 0


@dataclass(slots=True)
class _Tally:
    """What the nodes taken so far add up to."""

    batch: int
    gain: float = 0.0
    rows: float = 0.0
    nodes: int = 0
    sequences: int = 0
    deepest: int = 0
    catch_up: float = 0.0
    none: float = 1.0  # chance that no sequence proposes anything

    def take(self, node: _Node, catch_up: float) -> None:
        self.gain += node.gain
        self.rows += node.rows
        self.nodes += 1
        self.deepest = max(self.deepest, node.depth)
        if node.depth == 1:
            self.sequences += 1
            self.catch_up += catch_up
            self.none *= 1 - node.rows
