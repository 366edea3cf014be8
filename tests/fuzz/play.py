"""A case: an engine, requests, and when each comes, is read and is ended. All of it is a function of one number."""

from __future__ import annotations

import contextlib
import random
from collections import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from typing import Any

from asks import LIBRARY, Bad, Expand, make_ask, make_bad
from guests import GUESTS, Guest
from oracle import Answer, Sample, answer, certify, foreseen, near, unseeded
from witness import Witness
from worlds import ADAPTERS, MAX_LEN, SHARED, World, available, build, tokenizer_of
from worlds import TinyLLM as Front

from paceline.core.errors import ConfigError
from paceline.core.outputs import Chunk
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence
from paceline.engine.auto import AutoBudget
from paceline.engine.budget import DraftBudget, FixedBudget, StepRecord
from paceline.engine.costs import CostTable
from paceline.engine.engine import Engine, LiveRequest
from paceline.engine.verification import DEFAULT_VERIFIER

BLOCK = 40  # neighbouring cases that share a library of requests
TICKS = 6000  # a case that takes longer does not end
WEIGHTS = {"float64": 5, "bytes": 3}  # of worlds in the draw; 1 for the others
PLACES = tuple(  # before and after each of these
    f"{when} {name}"
    for name in (
        "scheduler.schedule",
        "round.step",
        "pool.commit",
        "round.emitter.emit",
        "round.release",
        "scheduler.remove",
    )
    for when in ("before", "after")
)
PIPED = {
    "pool.commit": "pool.settle",
    "round.emitter.emit": "round.stage_line.tick",
}  # what a pipeline has in their place
_FINE = {"prompt_token_ids": [5]}
MODES = ("submit", "submit", "stream", "stream", "generate")


@dataclass(frozen=True)
class Visit:
    """One request in a case: when it comes, how it is read, when it is ended."""

    ask: Expand | None
    bad: Bad | None = None
    mode: str = "submit"  # submit: step by hand; stream: an iterator; generate: waits for its answer
    arrival: int = 0
    abort: int | None = None  # ticks after its arrival

    def describe(self) -> str:
        """One line."""
        what = self.ask.describe() if self.ask else f"must be refused: {self.bad.describe() if self.bad else ''}"
        end = f", ended {self.abort} ticks later" if self.abort is not None else ""
        return f"{self.mode} at tick {self.arrival}{end}: {what}"


@dataclass(frozen=True)
class Case:
    """An engine and its visits."""

    seed: int
    world: World
    guest: str
    verifier: str
    budget: str
    applications: tuple[str, ...]
    options: dict[str, int]
    visits: tuple[Visit, ...]
    tears: dict[int, str]  # tick -> where a step by hand is interrupted, as by Ctrl-C

    def describe(self) -> str:
        """The engine, then a line a visit."""
        engine = f"drafter={self.guest} verifier={self.verifier} budget={self.budget} {self.options} tears={self.tears}"
        return "\n".join([f"world={self.world.name} {engine}", *(f"  {v.describe()}" for v in self.visits)])

    @property
    def exact(self) -> bool:
        """Whether every answer must be the oracle's."""
        return self.verifier == DEFAULT_VERIFIER


def make_case(seed: int, world: str | None = None, guest: str | None = None) -> Case:
    """Case number ``seed``; ``world`` and ``guest`` name the only ones to draw from."""
    draw = random.Random(seed)
    worlds = [w for w in available() if world in (None, w.name)]
    chosen = draw.choices(worlds, [WEIGHTS.get(w.name, 1) for w in worlds])[0]
    name = draw.choice([n for n, g in GUESTS.items() if guest in (None, n)])
    chosen = replace(chosen, whole=GUESTS[name].whole)
    verifier = draw.choice([DEFAULT_VERIFIER, *GUESTS[name].verifiers])
    applications = _applications(GUESTS[name], draw)
    visits = tuple(_visits(seed, chosen, applications, draw))
    longest = max([v.ask.length for v in visits if v.ask], default=8)
    options = _engine_options(longest, draw)
    budget = _budget_kind(draw)
    if budget == "auto" and GUESTS[name].round != "auto":  # it does not weigh what such rounds do
        budget = "own"
    tears = {draw.randrange(12): draw.choice(PLACES) for _ in range(draw.choice([1, 2]))} if draw.random() < 0.2 else {}
    return Case(seed, chosen, name, verifier, budget, applications, options, visits, tears)


def _applications(guest: Guest, draw: random.Random) -> tuple[str, ...]:
    """Adapters always, so that any request can be answered; streams of a shared set where they can run."""
    return (*ADAPTERS, SHARED) if guest.streams and draw.random() < 0.6 else ADAPTERS


def _visits(seed: int, world: World, applications: abc.Sequence[str], draw: random.Random) -> Iterator[Visit]:
    shared = SHARED in applications
    start = (seed // BLOCK) * LIBRARY
    spread = draw.choice([0, 3, 30])
    for _ in range(draw.choice([1, 2, 4, 6, 8, 12])):
        arrival = draw.randint(0, spread)
        if draw.random() < 0.12:
            yield Visit(None, make_bad(draw), draw.choice(MODES), arrival)
            continue
        ask = make_ask(world, start + draw.randrange(LIBRARY), answer, shared)
        mode = draw.choice(MODES)
        abort = draw.choice([0, 1, 1, 2, 5, 12]) if mode != "generate" and draw.random() < 0.35 else None
        yield Visit(ask, None, mode, arrival, abort)


def _engine_options(longest: int, draw: random.Random) -> dict[str, int]:
    """From a pool that barely holds one request to plenty, from one row a pass to a prompt at once."""
    room = longest - 1
    pool = draw.choice([room, room + 3, room + 20, int(room * 1.5), room * 3, 4096])
    return {
        "kv_tokens": max(1, pool),
        "block_size": draw.choice([1, 4, 8, 16, 16]),
        "max_batch_rows": draw.choice([2, 5, 8, 17, 33, 64, 512, 512]) if draw.random() < 0.95 else 1,
        "max_sequences": draw.choice([1, 2, 3, 8, 64]),
    }


def _budget_kind(draw: random.Random) -> str:
    return draw.choice(["own", "own", "1", "3", "9", "40", "5", "auto", "auto", "0"])


# Budgets


class TimelessBudget(AutoBudget):
    """The automatic budget on invented times, so that a case can be repeated."""

    times: random.Random

    def record_cost(self, source: int, levels: int, ms: float) -> None:
        """A source's time, another one."""
        super().record_cost(source, levels, self.times.uniform(0.1, 1))

    def observe(self, step: StepRecord) -> None:
        """The step, with other times."""
        draft_ms = self.times.uniform(0.1, 1) if any(step.budgets) else 0.0
        super().observe(replace(step, draft_ms=draft_ms, propose_ms=draft_ms, rest_ms=self.times.uniform(4, 8)))


def _set_budget(engine: Engine, case: Case) -> None:
    drafter = engine.round.drafter  # type: ignore[attr-defined]
    budget: DraftBudget
    if case.budget == "own" or drafter is None:
        return
    if case.budget == "auto":
        table = CostTable(chain=((1, 5.0), (8, 5.4), (64, 9.0)), plain=((1, 5.0), (8, 5.6), (64, 11.0)))
        budget = TimelessBudget.of(drafter.spec, table)
        budget.times = random.Random(case.seed)
    else:
        budget = FixedBudget(int(case.budget))
    engine.budget = engine.scheduler.budget = budget


# Playing it


@dataclass
class Guesthouse:
    """A request in flight, from the outside."""

    visit: Visit
    live: LiveRequest | None = None
    stream: Iterator[Chunk] | None = None
    chunks: list[Chunk] = field(default_factory=list)
    output: Any = None  # RequestOutput; None while it runs
    left: bool = False  # its stream was left early: nobody sees its answer

    @property
    def over(self) -> bool:
        """Whether there is nothing more to hear."""
        return self.left or self.output is not None


class Play:
    """One case as it runs.

    Args:
        case: what to play.
        witness: sees it.
        kept: indices of the visits that come; default: all.
    """

    def __init__(self, case: Case, witness: Witness, kept: abc.Sequence[int] | None = None) -> None:
        self.case, self.witness = case, witness
        self.findings: list[str] = []
        self._coming = [case.visits[i] for i in (range(len(case.visits)) if kept is None else kept)]
        self._known = {id(v.ask.params): v.ask for v in self._coming if v.ask and v.ask.params.seed is not None}
        guest = GUESTS[case.guest]
        given = {"verifier": case.verifier, "round": guest.round, **case.options}
        self.engine = build(case.world, guest.make(case.world, self._right), case.applications, **given)
        _set_budget(self.engine, case)
        witness.watch(self.engine)
        self._fuse: str | None = None
        self._lay_fuses()
        self.front = Front(case.world, self.engine)
        self.guests: list[Guesthouse] = []

    def _right(self, sequence: Sequence) -> list[int] | None:
        """What a sequence is going to say, and would say beyond its end, for adversaries."""
        ask = self._known.get(id(sequence.sampler.params))
        return foreseen(ask)[sequence.sampler.sample_index] if ask else None

    def run(self) -> list[str]:
        """Play to the end; what was wrong, empty where nothing was."""
        draw = random.Random(-self.case.seed - 1)
        last = max([v.arrival for v in self._coming], default=0)
        for tick in range(TICKS):
            self._arrive(tick)
            self._end(tick)
            if tick >= last and all(g.over for g in self.guests):
                break
            self._go_on(tick, draw)
            if tick % 16 == 0 and not self.case.tears:
                self.engine.pool.check_integrity()
        else:
            self.findings.append(f"requests are in flight after {TICKS} ticks")
        self._after()
        return self.findings

    # -- interruptions

    def _lay_fuses(self) -> None:
        piped = GUESTS[self.case.guest].round.startswith("pipeline")
        for name in {place.split()[1] for place in self.case.tears.values()}:
            *parts, method = (PIPED.get(name, name) if piped else name).split(".")
            owner = reduce(getattr, parts, self.engine)
            setattr(owner, method, self._fused(name, getattr(owner, method)))

    def _fused(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, which is interrupted where that is its turn."""

        def fused(*args: Any, **options: Any) -> Any:
            self._burn(f"before {name}")
            result = call(*args, **options)
            self._burn(f"after {name}")
            return result

        return fused

    def _burn(self, place: str) -> None:
        if self._fuse == place:
            self._fuse = None
            self.witness.met["interrupted steps"] += 1
            raise KeyboardInterrupt

    def _step(self, tick: int) -> None:
        """A step by hand; one that is interrupted is mended by whatever comes next."""
        self._fuse = self.case.tears.get(tick)
        with contextlib.suppress(KeyboardInterrupt):
            self.engine.step()
        self._fuse = None

    # -- arrivals

    def _arrive(self, tick: int) -> None:
        together = []
        for visit in [v for v in self._coming if v.arrival == tick]:
            if visit.bad is not None:
                self._refused(visit)
            elif visit.mode == "generate":
                together.append(visit)
            else:
                self._begin(visit)
        if together:
            self._generate(together)

    def _begin(self, visit: Visit) -> None:
        ask = visit.ask
        assert ask is not None
        guest = Guesthouse(visit)
        self.guests.append(guest)
        if visit.mode == "stream":
            guest.stream = self.front.stream(_prompt(ask), ask.params, ask.application)
            guest.live = [*self.engine.live.values()][-1]
            return
        request_id = self.engine.submit(ask.prompt, ask.params, prompt=ask.text, application=ask.application)
        guest.live = self.engine.live[request_id]

    def _generate(self, visits: abc.Sequence[Visit]) -> None:
        asks = [v.ask for v in visits if v.ask]
        outputs = self.front.generate(
            [_prompt(a) for a in asks], [a.params for a in asks], application=[a.application for a in asks]
        )
        for visit, output in zip(visits, outputs, strict=True):
            self.guests.append(Guesthouse(visit, output=output))

    def _refused(self, visit: Visit) -> None:
        """Must raise ConfigError, and leave nothing behind."""
        before = set(self.engine.live)
        try:
            self._offer(visit)
        except ConfigError:
            self.witness.met["refused requests"] += 1
        else:
            self.findings.append(f"was not refused: {visit.describe()}")
        # By name: a call after an interrupted step mends it, and puts what was running back to wait.
        scheduler = self.engine.scheduler
        queued = {s.request_id for s in (*scheduler.waiting, *scheduler.running)}
        if set(self.engine.live) != before or not queued <= before:
            self.findings.append(f"left something behind: {visit.describe()}")

    def _offer(self, visit: Visit) -> None:
        bad = visit.bad
        assert bad is not None
        if bad.twin:
            return self._offer_twin()
        params = SamplingParams(**({"max_tokens": 4} | self._fitting(bad.options)))
        prompt = {"prompt_token_ids": list(bad.prompt)} if isinstance(bad.prompt, tuple) else bad.prompt
        if visit.mode == "stream":
            self.front.stream(prompt, params, bad.application)
            return
        good = [_FINE] * bad.late
        each = [SamplingParams(max_tokens=1)] * bad.late + [params]
        self.front.generate([*good, prompt], each, application=[None] * bad.late + [bad.application])

    def _fitting(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options, cut to ids that this vocabulary has where they are about all of its ids."""
        ids, vocab = options.get("stop_token_ids"), self.case.world.config.vocab_size
        return options | {"stop_token_ids": ids[:vocab]} if isinstance(ids, list) and len(ids) > 1 else options

    def _offer_twin(self) -> None:
        """Under the name of a request in flight; of the first one that comes by, where none is."""
        name = next(iter(self.engine.live), None)
        if name is None:
            raise ConfigError("a twin", "nobody is in flight", "nothing to do")
        self.engine.submit([1], SamplingParams(max_tokens=1), request_id=name)

    # -- steps and ends

    def _go_on(self, tick: int, draw: random.Random) -> None:
        """A step by hand, or the next chunk of a stream, whose own steps carry the others along."""
        streams = [g for g in self.guests if g.stream is not None and not g.over]
        done_by_hand = [g for g in self.guests if g.stream is None and not g.over]
        if streams and (not self.engine.busy or draw.random() < 0.5):
            self._pull(draw.choice(streams))
        elif self.engine.busy:
            self._step(tick)
        for guest in done_by_hand:
            if guest.live is not None and guest.live.ended is not None:
                guest.output = self.engine.output(guest.live)

    def _pull(self, guest: Guesthouse) -> None:
        assert guest.stream is not None
        try:
            guest.chunks.append(next(guest.stream))
        except StopIteration:
            guest.output = guest.chunks[-1].output if guest.chunks else None
            guest.left = guest.output is None  # the check below complains
            self._check_chunks(guest)

    def _end(self, tick: int) -> None:
        for guest in self.guests:
            due = guest.visit.abort is not None and tick >= guest.visit.arrival + guest.visit.abort
            if due and not guest.over and guest.live is not None and guest.live.ended is None:
                self._abort(guest)

    def _abort(self, guest: Guesthouse) -> None:
        """End a request: an iterator that is left, or a word to the engine."""
        assert guest.live is not None
        waits = all(s.cache is None for s in guest.live.sequences if not s.finished)
        self.witness.met["aborts while waiting" if waits else "aborts in flight"] += 1
        if guest.stream is not None and (guest.visit.abort or 0) % 2:
            guest.stream.close()  # type: ignore[attr-defined]
            guest.left = True
            self.witness.met["streams left early"] += 1
            return
        output = self.front.abort(guest.live.id)
        if guest.stream is None:
            guest.output = output

    # -- comparing

    def _check_chunks(self, guest: Guesthouse) -> None:
        if guest.output is None:
            self.findings.append(f"a stream without a chunk: {guest.visit.describe()}")
            return
        for sample in guest.output.outputs:
            own = [c for c in guest.chunks if c.index == sample.index]
            joined = ("".join(c.text for c in own), [t for c in own for t in c.token_ids])
            marks = [c.finished for c in own]
            if joined != (sample.text, sample.token_ids) or marks != [False] * (len(own) - 1) + [True]:
                self.findings.append(f"chunks give {joined}, the answer is {(sample.text, sample.token_ids)}")

    def _after(self) -> None:
        self._check_idle()
        for guest in self.guests:
            if guest.output is not None:
                self._compare(guest)
        self._probe()

    def _check_idle(self) -> None:
        engine, scheduler = self.engine, self.engine.scheduler
        left = {
            "live requests": len(engine.live),
            "waiting": len(scheduler.waiting),
            "running": len(scheduler.running),
            "preempted": len(scheduler.preempted),
        }
        self.findings += [f"{count} {what} are left" for what, count in left.items() if count]
        for check in (engine.pool.check_idle, engine.pool.check_integrity):
            self._note(check)
        drafter = engine.round.drafter  # type: ignore[attr-defined]
        own_pool = getattr(drafter, "_pool", None) or getattr(getattr(engine.round, "sessions", None), "pool", None)
        failure = engine.round.failure
        if own_pool is not None and failure is None:
            self._note(own_pool.check_idle)
            self._note(own_pool.check_integrity)
        if failure is not None and not GUESTS[self.case.guest].fails:
            self.findings.append(failure)
        self.witness.met["failed drafters"] += failure is not None

    def _note(self, check: Callable[[], None]) -> None:
        try:
            check()
        except AssertionError as error:
            self.findings.append(f"{check.__qualname__}: {error}")

    def _compare(self, guest: Guesthouse) -> None:
        ask, output = guest.visit.ask, guest.output
        assert ask is not None
        wrong = [] if self.case.tears else check_stats(output)  # an interruption may come between a token and its count
        if ask.params.seed is None:
            seeds = {o.seed for o in output.outputs}
            expected = unseeded(ask, seeds.pop())
            wrong += ["the samples name different seeds"] if seeds else []
        else:
            expected = answer(ask)
        wrong += [f"the oracle itself: {c}" for c in expected.complaints]
        wrong += compare(ask, output, expected, self.case.exact)
        self.findings += [f"{w}\n    in {guest.visit.describe()}" for w in wrong]
        self.witness.saw_stats(output.stats)
        self.witness.met["requests compared"] += 1

    def _probe(self) -> None:
        """The engine answers as ever."""
        ask = _probe(self.case.world)
        if self.engine.pool.num_tokens < ask.length:
            return
        self._known[id(ask.params)] = ask
        visit = Visit(ask)
        output = self.front.generate(_prompt(ask), ask.params)[0]
        self._compare(Guesthouse(visit, output=output))
        self._note(self.engine.pool.check_idle)


@cache
def _probe(world: World) -> Expand:
    return Expand(world, -1, [11, 12, 13, 11, 12], SamplingParams(temperature=0, max_tokens=6))


def _prompt(ask: Expand) -> Any:
    if ask.text is not None and tokenizer_of(ask.world) is not None:
        return ask.text
    return {"prompt_token_ids": ask.prompt}


# What must be equal


def compare(ask: Expand, output: Any, expected: Answer, exact: bool) -> list[str]:
    """How an answer differs from the oracle's.

    Args:
        exact: False where another verifier chose: greedy answers are the oracle's even so, and others must be
            possible ones.
    """
    if not (exact or ask.params.temperature == 0):
        return _possible(ask, output)
    wrong: list[str] = []
    for completion, sample in zip(output.outputs, expected.samples, strict=True):
        aborted = completion.finish_reason == "abort"
        wrong += _compare_aborted(ask, completion, sample) if aborted else _compare_sample(completion, sample)
        wrong += _compare_logprobs(ask, completion.logprobs, (sample.logprobs or [])[: len(completion.token_ids)])
    given = output.prompt_logprobs
    if ask.params.prompt_logprobs is not None and output.outputs[0].finish_reason != "abort":
        wrong += _compare_logprobs(ask, given, expected.prompt_logprobs or [])
    return wrong


def _possible(ask: Expand, output: Any) -> list[str]:
    """What is impossible about an answer that another verifier chose."""
    if not ask.world.reference or ask.application == SHARED or output.outputs[0].finish_reason == "abort":
        return []
    if any(o.finish_reason == "abort" for o in output.outputs):
        return []
    samples = [Sample(o.token_ids, o.text, o.finish_reason, o.stop_reason, o.logprobs, o.seed) for o in output.outputs]
    return certify(ask, Answer(samples, output.prompt_logprobs), chosen=False)


def _compare_sample(completion: Any, sample: Sample) -> list[str]:
    ours = (completion.token_ids, completion.text, completion.finish_reason, completion.stop_reason)
    theirs = (sample.ids, sample.text, sample.finish_reason, sample.stop_reason)
    return [] if ours == theirs else [f"sample {completion.index} is {ours}, and should be {theirs}"]


def _compare_aborted(ask: Expand, completion: Any, sample: Sample) -> list[str]:
    """An answer that was ended early begins as the whole one; its text may end in what a stop rule would have cut."""
    count = len(completion.token_ids)
    if completion.token_ids != sample.ids[:count] or count > len(sample.ids):
        return [f"an aborted answer has {completion.token_ids}, the whole one {sample.ids}"]
    safe = sample.shown[count] if count < len(sample.shown) else sample.text
    rest = completion.text.removeprefix(safe).rstrip("\ufffd")
    held = not rest or any(stop.startswith(rest) for stop in ask.params.stop_strings)
    if completion.text.startswith(safe) and held:
        return []
    return [f"an aborted answer says {completion.text!r} after {count} tokens, of which {safe!r} is right"]


def _compare_logprobs(ask: Expand, given: Any, expected: abc.Sequence[Any]) -> list[str]:
    if given is None:
        return ["log-probabilities are missing"] if expected else []
    if len(given) != len(expected):
        return [f"{len(given)} log-probabilities instead of {len(expected)}"]
    for t, (ours, theirs) in enumerate(zip(given, expected, strict=True)):
        if not (_same_row if ask.world.exact else _near_row)(ours, theirs):
            return [f"log-probabilities of token {t} are {ours}, and should be {theirs}"]
    return []


def _same_row(ours: Any, theirs: Any) -> bool:
    """Bit for bit; which of the tokens that a rule has ruled out are shown is nobody's business."""
    if ours is None or theirs is None:
        return ours is theirs
    possible = [[(i, e) for i, e in row.items() if e.logprob > float("-inf")] for row in (ours, theirs)]
    return len(ours) == len(theirs) and possible[0] == possible[1]


def _near_row(ours: Any, theirs: Any) -> bool:
    """But for the last bits of float64, which may also exchange tokens that are all but equally likely."""
    if ours is None or theirs is None:
        return ours is theirs
    if len(ours) != len(theirs) or next(iter(ours)) != next(iter(theirs)):
        return False
    both = all(near(ours[i].logprob, theirs[i].logprob) for i in ours.keys() & theirs.keys())
    values = [sorted(e.logprob for e in row.values()) for row in (ours, theirs)]
    return both and all(near(a, b) for a, b in zip(*values, strict=True))


def check_stats(output: Any) -> list[str]:
    """Counts that contradict each other or the answer."""
    s = output.stats
    emitted = sum(len(o.token_ids) for o in output.outputs)
    drafted = sum(o.origins.count("drafted") for o in output.outputs)
    facts = {
        "emitted tokens are the ids": s.emitted == emitted,
        "origins are one a token": all(len(o.origins) == len(o.token_ids) for o in output.outputs),
        "accepted tokens are the drafted ones that came out": s.accepted == drafted,
        "accepted is at most drafted": s.accepted <= s.drafted,
        "a pass brings at most one token of its own": emitted - s.passes <= s.accepted,
        "a pass brings a token": s.passes <= s.emitted,
        "the histogram counts passes": sum(s.accepted_histogram) == s.passes,
        "the histogram counts accepted tokens": sum(a * n for a, n in enumerate(s.accepted_histogram)) == s.accepted,
        "depths count accepted tokens": sum(s.depth_accepted) == s.accepted,
        "sources count drafted tokens": sum(x.drafted for x in s.sources.values()) == s.drafted,
        "sources count accepted tokens": sum(x.accepted for x in s.sources.values()) == s.accepted,
        "the prompt is counted once": s.prompt_tokens == len(output.prompt_token_ids),
        "what was found is part of the prompt": s.cached_prompt_tokens <= MAX_LEN * len(output.outputs),
        "no time is negative": min(s.draft_ms, s.verify_ms, s.host_ms, s.elapsed_ms, s.ttft_ms or 0.0) >= 0,
        "it is finished": output.finished,
    }
    return [f"statistics: not true that {what} ({s})" for what, holds in facts.items() if not holds]
