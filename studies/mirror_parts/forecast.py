"""A step of the mirror round, forecast by eq. 14 from times that are measured in isolation, on other prompts.

The target's parts are measured with drafts that are made up, and with no drafter anywhere; the drafter's with a target
that stands still. What the round does at the same time, the layers behind the exit and the rollout, is then measured
once more while both are at work and neither waits for the other: what two busy cores cost each other. Fallbacks,
candidates and levels are counted in a run. Nothing is taken from the steps that are forecast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count, cycle
from statistics import median
from time import perf_counter, sleep
from typing import Any

from kit.grid import apart
from kit.mirror_watch import Laps
from kit.paced import paced_drafters

from mirror_parts.common import Heard, MirrorFlags, drafter_of, listen, mirror_of, prompts_of
from mirror_parts.latency import MirrorStep
from paceline import LLM, SamplingParams
from paceline.core.errors import ConfigError
from paceline.core.tree import TokenTree
from paceline.draft.local_sessions import LocalSessions
from paceline.draft.sessions import ROOT, Expand, NewNodes, Opening
from paceline.papers.mirror.rollout import Branch, Rollout
from paceline.runtime.placement import cores, pin

SECONDS = 4.0  # that parts are measured for, at least
ALONE, AT_ONCE = "alone", "both at work"
QUEUE = 8  # rollouts that a drafter has before it, so that it never rests
GREEDY = SamplingParams(temperature=0)
Step = dict[str, Any]  # what is known of one, in ms
Shape = Sequence[tuple[int, int]]  # a rollout's candidates: place of the window, and levels below it


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Of a step, in ms."""

    prefix: float
    exit: float  # the exit's head, and the token channel
    suffix: float  # with head and decision
    host: float  # all else of the target's process
    send: float  # candidates, to the drafter
    draft: float  # a rollout, from when it was sent
    verdict: float  # told, and the levels that came taken
    fresh: float  # a window in series, after an outcome that was not prepared for

    @property
    def law(self) -> MirrorStep:
        """Terms of eq. 14."""
        return MirrorStep(
            prefix=self.prefix,
            suffix=self.suffix,
            draft=self.draft,
            rendezvous_exit=self.exit + self.send,
            rendezvous_final=self.verdict,
        )

    @property
    def reuse(self) -> float:
        """A step behind an outcome that was prepared for: eq. 14, and the host, of which it does not know."""
        return self.law.time + self.host

    @property
    def fallback(self) -> float:
        """A step behind another outcome."""
        return self.reuse + self.fresh


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What is known before the steps are run."""

    parts: Mapping[str, Parts]  # `ALONE`, and `AT_ONCE`
    share: float  # of fallbacks on other prompts
    counted: int  # steps there

    def mean(self, name: str) -> float:
        """Of all steps, in ms."""
        own = self.parts[name]
        return own.reuse + self.share * own.fresh


def forecast(ask: MirrorFlags) -> Forecast:
    """Count and measure on other prompts than the study's, in processes of their own.

    Raises:
        ConfigError: the tasks have no other prompts.
    """
    share, counted, shapes = apart(counts, ask)
    alone = parts_of([*apart(target_parts, ask), *apart(drafter_parts, ask, shapes)])
    beside = apart(parts_at_once, ask, shapes)
    at_once = replace(alone, **{name: _middle(beside, name) for name in ("suffix", "draft")})
    return Forecast(parts={ALONE: alone, AT_ONCE: at_once}, share=share, counted=counted)


def parts_of(samples: Sequence[Step]) -> Parts:
    """Medians of what was measured."""
    return Parts(**{part.name: _middle(samples, part.name) for part in fields(Parts)})


def _middle(samples: Sequence[Step], name: str) -> float:
    return median(one[name] for one in samples if name in one)


# -- steps


def steps_of(heard: Heard) -> list[Step]:
    """Of passes behind a prompt: the clock around each, the times it tells, and what became of its outcome."""
    return [
        {part.name: getattr(times, part.name) for part in fields(times)}
        | {"wall": wall, "told": said[0].told, "reused": said[0].reused, "window": len(said[0].window)}
        for (times, said), wall in zip(heard.steps, heard.walls, strict=True)
        if said
    ]


def after(steps: Sequence[Step]) -> tuple[list[Step], list[Step]]:
    """Steps behind an outcome that was prepared for, and behind a fallback; the first of a request is of neither."""
    pairs = [*zip(steps, steps[1:], strict=False)]
    return [b for a, b in pairs if a["reused"]], [b for a, b in pairs if a["told"] and not a["reused"]]


def whole(steps: Sequence[Step], gamma: int) -> list[Step]:
    """Those with a whole window whose exit spoke; the last ones of an answer are shorter."""
    return [step for step in steps if step["told"] and step["window"] == gamma]


# -- what is counted


def others_of(ask: MirrorFlags, llm: LLM) -> list[dict[str, Any]]:
    """As many prompts of each task as the study has, and none of those."""
    found = []
    for task in ask.names:
        own = prompts_of(ask, llm, task)
        more = [p for p in prompts_of(replace(ask, prompts=2 * ask.prompts), llm, task) if p not in own]
        if not more:
            raise ConfigError(f"--prompts {ask.prompts} of {task}", "no others are left to forecast from", "give fewer")
        found += more
    return found


def counts(ask: MirrorFlags) -> tuple[float, int, list[Shape]]:
    """Of a run in one process: the share of fallbacks, among how many steps, and the shapes of its rollouts."""
    llm = LLM(ask.model, drafter=drafter_of(ask), round=mirror_of(ask, ask.candidates), **ask.llm)
    round_: Any = llm.engine.round
    begin, shapes = round_.sessions.begin, list[Shape]()

    def noted(asks: Sequence[Expand]) -> Any:
        shapes.extend(shape_of(own) for own in asks if own.added)
        return begin(asks)

    round_.sessions.begin = noted
    heard = listen(llm, others_of(ask, llm), ask, 0.0, alone=True)
    reuse, fallback = (whole(own, ask.gamma) for own in after(steps_of(heard)))
    return len(fallback) / len(reuse + fallback), len(reuse + fallback), shapes


def shape_of(own: Expand) -> Shape:
    """Of one sequence's candidates, whose places are numbered as they come."""
    places: dict[int, int] = {}
    return [
        (places.setdefault(node, len(places)), most) for (node, _), most in zip(own.added, own.levels, strict=False)
    ]


# -- what is measured


def target_parts(ask: MirrorFlags) -> list[Step]:
    """The target's parts, on its core, with drafts that cost nothing and no drafter anywhere."""
    pin([core for core in cores() if core != ask.core][:1])
    return [*_target_steps(ask, _made_up(ask))]


def _made_up(ask: MirrorFlags, base: LLM | None = None) -> LLM:
    options = {**ask.llm, "threads": 1, "share": base}
    llm = LLM(ask.model, drafter=drafter_of(ask), round=mirror_of(ask, ask.candidates), **options)
    round_: Any = llm.engine.round
    round_.sessions = LocalSessions(MadeUp())
    return llm


def _target_steps(ask: MirrorFlags, llm: LLM) -> Iterator[Step]:
    """Steps without a fresh window, of other prompts in turn."""
    prompts = others_of(ask, llm)
    listen(llm, prompts[:1], ask, 0.0)  # what the first pass prepares
    until = perf_counter() + SECONDS
    for prompt in cycle(prompts):
        reuse, _ = after(steps_of(listen(llm, [prompt], ask, 0.0)))
        yield from map(_target_sample, whole(reuse, ask.gamma))
        if perf_counter() > until:
            return


def _target_sample(step: Step) -> Step:
    parts = {"prefix": step["prefix"], "exit": step["rendezvous_exit"], "suffix": step["suffix"]}
    made_up = step["exposed"] + step["rendezvous_final"]
    return parts | {"host": step["wall"] - sum(parts.values()) - made_up}


class MadeUp:
    """Draft sessions whose tokens are the numbers of their nodes."""

    def __init__(self) -> None:
        self._numbers = count(1)

    def grow(self, asks: Sequence[Expand]) -> list[NewNodes]:
        """See `DraftSessions`."""
        return [self._grown(ask) for ask in asks]

    def _grown(self, ask: Expand) -> NewNodes:
        given = [next(self._numbers) for _ in ask.added]
        parents = [*given, *ask.expand]
        nodes = [next(self._numbers) for _ in parents]
        return NewNodes(given, parents, nodes, [node % 251 for node in nodes], [0.0] * len(nodes), [0] * len(nodes))

    def nothing(self, *_: Any) -> None:
        """They know no text."""

    open = reroot = commit = close = forget = nothing


def _drafter_llm(ask: MirrorFlags) -> LLM:
    """With a drafter's process, placed as in the mirror round."""
    place, options = f",rollout=process,cores=<{ask.core}>", {**ask.llm, "threads": 1}
    with paced_drafters(ask.level_ms):
        return LLM(ask.model, drafter=drafter_of(ask), round=mirror_of(ask, ask.candidates, more=place), **options)


def drafter_parts(ask: MirrorFlags, shapes: Sequence[Shape]) -> list[Step]:
    """The drafter's parts, driven as the mirror round does it, for a target that stands still."""
    llm = _drafter_llm(ask)
    round_: Any = llm.engine.round
    found, until = list[Step](), perf_counter() + SECONDS
    for prompt in cycle(others_of(ask, llm)):
        drafter = Driven(round_.sessions, llm.decoder.config.vocab_size, ask.gamma)
        drafter.open(prompt["prompt_token_ids"])
        found += [part for shape in shapes[: ask.max_new_tokens] for part in drafter.step(shape)][2:]  # the prompt's
        drafter.close()
        if perf_counter() > until:
            return found
    raise AssertionError


class Driven:
    """A drafter's process with one session, a step after the other: every other outcome was not prepared for.

    Args:
        sessions: that it serves.
        vocab: tokens of the target.
        gamma: of a window.
    """

    KEY = 0

    def __init__(self, sessions: Any, vocab: int, gamma: int) -> None:
        self.sessions, self.vocab, self.gamma = sessions, vocab, gamma
        self.window, self.tokens = TokenTree(), count()
        self.steps, self.rest_ms = 0, 50.0

    def open(self, tokens: Sequence[int]) -> None:
        """Begin with a text."""
        self.sessions.open(Opening(self.KEY, tokens, len(tokens), GREEDY, 0, 0))

    def close(self) -> None:
        """End it."""
        self.sessions.close(self.KEY)

    def step(self, shape: Shape) -> Iterator[Step]:
        """A fresh window where there is none; a rollout, and a verdict some time after its end."""
        if not self.window:
            yield {"fresh": _ms(self._draft_fresh)}
        rollout, given = self._rollout(shape)
        laps = Laps.of(rollout)
        sent = _ms(rollout.start)
        sleep(self.rest_ms / 1e3)  # nobody reads what comes
        best = max(given, key=lambda one: one.levels)
        said = (self.KEY, best.place, best.token if self.steps % 2 else -1)
        reused: dict[Any, Any] = {}
        verdict = _ms(lambda: reused.update(rollout.finish({said: [1] * (best.place + 1)}, [])))
        self.window = reused[said].chain if reused else TokenTree()
        self.steps, self.rest_ms = self.steps + 1, 1.5 * laps.ms + 2
        yield {"send": sent, "draft": laps.ms - sent, "verdict": verdict}

    def _draft_fresh(self) -> None:
        rollout = Rollout(self.sessions, self.vocab)
        rollout.begin(self.KEY, self.gamma)
        rollout.run()
        self.window = rollout.fresh[self.KEY].chain

    def _rollout(self, shape: Shape) -> tuple[Rollout, list[Branch]]:
        rollout, nodes = Rollout(self.sessions, self.vocab), [ROOT, *self.window.numbers]
        given = [
            Branch(self.KEY, nodes[min(place, len(nodes) - 1)], levels, next(self.tokens) % self.vocab, place)
            for place, levels in shape
        ]
        rollout.prepare(given)
        return rollout, given


def _ms(work: Any) -> float:
    began = perf_counter()
    work()
    return (perf_counter() - began) * 1e3


def parts_at_once(ask: MirrorFlags, shapes: Sequence[Shape]) -> list[Step]:
    """The target's parts and rollouts, while the drafter has always another one to draft."""
    base = _drafter_llm(ask)
    llm = _made_up(ask, base)
    round_: Any = base.engine.round
    busy = Busy(round_.sessions, shapes, others_of(ask, llm)[0]["prompt_token_ids"])
    step: Any = llm.engine.step

    def fed() -> Any:
        busy.feed()
        return step()

    llm.engine.step = fed  # type: ignore[method-assign]
    return [*_target_steps(ask, llm), *busy.found]


class Busy:
    """A drafter's process that never rests.

    Args:
        sessions: that it serves.
        shapes: of rollouts, by turns.
        tokens: the text.
    """

    def __init__(self, sessions: Any, shapes: Sequence[Shape], tokens: Sequence[int]) -> None:
        self.sessions, self._shapes = sessions, cycle(shapes)
        self._growing: dict[int, Any] = {}
        self.found: list[Step] = []
        self._fed = False  # what is there before is the text's
        for key in range(QUEUE):
            sessions.open(Opening(key, tokens, len(tokens), GREEDY, 0, 0))
            self._begin(key)
            sessions.wait(self._growing[key])  # with the text's own pass

    def feed(self) -> None:
        """Take what came, and give new work for it."""
        self.sessions.look()
        for key, growing in [*self._growing.items()]:
            if growing.done:
                if self._fed:
                    self.found.append({"draft": (growing.times[-1][1] - growing.times[0][0]) * 1e3})
                self.sessions.commit(key, [ROOT])
                self._begin(key)
        self._fed = True

    def _begin(self, key: int) -> None:
        shape = next(self._shapes)
        given = [(ROOT, token) for token in range(len(shape))]
        self._growing[key] = self.sessions.begin([Expand(key, given, levels=[levels for _, levels in shape])])
