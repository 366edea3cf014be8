"""What is timed: the latency law, figure 3a, each run in a process of its own, and figures 4 and 5.

These need a machine without other work, of two cores at least.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import Any

from kit import figures
from kit.clock import RealClock
from kit.figures import Panel, Series
from kit.grid import apart
from kit.paced import Pace, paced_drafters
from kit.study import Entry, Grid, Table

from mirror_parts.common import MirrorFlags, drafter_of, listen, mirror_of, prompts_of, study
from mirror_parts.forecast import ALONE, Forecast, Parts, Step, after, forecast, steps_of, whole
from paceline import LLM
from paceline.bench.methods import parse_method
from paceline.core.errors import CapabilityError, ConfigError
from paceline.runtime.placement import cores, pin

STRETCHED: dict[str, Any] = {"times": 8, "draft_times": 4}
GAMMAS = (1, 2, 3, 4, 6, 8)
BATCHES = (1, 2, 4, 8)
MOST_LATE, MOST_EXPOSED, LEAST_SAVED, LEAST_RATIO = 0.05, 0.03, 0.8, 1.2  # what is wanted of the law
KINDS = "reuse", "fallback"  # what went before a step


@dataclass(frozen=True, kw_only=True)
class TimedRun:
    """One way of decoding: its times in ms, and what came out."""

    wall: float  # of all requests, from their first tokens on
    tokens: int  # after the first ones, as all that follows
    passes: int
    accepted: int
    draft: float  # on the critical path; with what the first passes had of it
    steps: list[Step]  # of passes behind a prompt, in the mirror round

    @property
    def ms(self) -> float:
        """Of a token."""
        return self.wall / self.tokens


MIRROR, SERIAL = "mirror, two processes", "serial, one core"
WAYS = {  # name: round behind "mirror", threads, whether the drafter has a core of its own
    MIRROR: ("rollout=process", 1, True),
    SERIAL: ("", 1, True),
    "serial, both cores": ("", 2, False),
    "mirror, one process": ("rollout=beside", 2, False),
}


def ran(ask: MirrorFlags, way: str, gammas: Sequence[int]) -> list[TimedRun]:
    """Answer the prompts of all tasks, one after the other, with windows of each of these lengths; in a fresh process,
    which it keeps to some cores."""
    here, (_, threads, _) = cores(), WAYS[way]
    base = LLM(ask.model, **{**ask.llm, "threads": threads})
    found = []
    for gamma in gammas:
        pin(here)  # from which the mirror round takes the drafter's
        found.append(_answered(ask, way, gamma, base))
        gc.collect()  # with the drafter's process
    return found


def _answered(ask: MirrorFlags, way: str, gamma: int, base: LLM) -> TimedRun:
    more, threads, alone = WAYS[way]
    if alone and not more:  # the cores that the mirror round's target has
        pin([core for core in cores() if core != ask.core][:1])
    options: dict[str, Any] = {**ask.llm, "threads": threads, "share": base}
    if more:
        core = f",cores=<{ask.core}>" if alone else ""
        options["round"] = mirror_of(ask, ask.candidates, more=f",{more}{core}")
    else:
        options["budget"] = gamma
    with paced_drafters(ask.level_ms):
        llm = LLM(ask.model, drafter=drafter_of(ask, gamma), **options)
    if not more and ask.level_ms:
        slow(llm, ask.level_ms)
    prompts = [prompt for task in ask.names for prompt in prompts_of(ask, llm, task)]
    listen(llm, prompts[:1], ask, 0.0)  # what the first pass prepares
    heard = listen(llm, prompts, ask, 0.0, alone=True)
    stats = [output.stats for output in heard.outputs]
    return TimedRun(
        wall=sum(s.elapsed_ms - (s.ttft_ms or 0.0) for s in stats),
        tokens=sum(s.emitted - 1 for s in stats),
        passes=sum(s.passes - 1 for s in stats),
        accepted=sum(s.accepted for s in stats),
        draft=sum(s.draft_ms for s in stats),
        steps=steps_of(heard),
    )


def slow(llm: LLM, level_ms: float) -> None:
    """Give each level of serial speculation's drafts a time: each pass of the draft."""
    round_: Any = llm.engine.round
    drafter = round_.guard.drafter
    draft, pace = drafter.draft, Pace(RealClock(), lambda levels: levels * level_ms / 1e3)

    def paced(want: Any) -> Any:
        with pace.work(min(max(want.budgets), max(want.max_depths))):
            return draft(want)

    drafter.draft = paced


def _two_cores(ask: MirrorFlags) -> None:
    here = cores()
    if ask.core not in here or len(here) < 2:
        raise CapabilityError(f"--core {ask.core}", f"this process may use {here}", "give one of two cores or more")


@study.table(
    takes=("draft", "draft_times", "gamma", "heads", "candidates", "core", "rows", "level_ms"),
    **STRETCHED,
    tasks="sql",
    prompts=8,
    max_new_tokens=64,
)
def law(ask: MirrorFlags) -> Iterator[Table | None]:
    """The latency law on two cores: steps forecast from times in isolation on other prompts, and observed."""
    _two_cores(ask)
    if ask.level_ms is not None and ask.level_ms <= 0:
        raise ConfigError(f"--level-ms {ask.level_ms:g}", "no time", "give more than 0")
    yield None
    said = forecast(ask)
    # One process has no other device.
    ways = [way for way in WAYS if ask.level_ms is None or way != "mirror, one process"]
    found: dict[str, list[TimedRun]] = {way: [] for way in ways}
    for _ in range(ask.repeats):  # in turns
        for way, runs in found.items():
            runs += apart(ran, ask, way, [ask.gamma])
    best = {way: min(runs, key=lambda run: run.ms) for way, runs in found.items()}
    mirror, serial = best[MIRROR], best[SERIAL]
    steps = [step for run in found[MIRROR] for step in run.steps]
    facts = law_of(steps, said, ask.gamma) | saved_of(mirror, serial, steps, said, ask.gamma)
    rows = [
        [way, f"{run.ms:.2f}", f"{run.ms / mirror.ms:.2f}", f"{run.tokens / run.passes:.2f}"]
        for way, run in best.items()
    ]
    yield Table(
        title="The latency law",
        head=("way", "ms a token", "of the mirror round's", "tokens a pass"),
        parts={"": rows},
        values={"ms": {way: [run.ms for run in runs] for way, runs in found.items()}, **facts},
        remarks=[*_said(facts), *_terms(facts, ask.level_ms), f"best of {ask.repeats} runs of each, in turns"],
    )


def law_of(steps: Sequence[Step], said: Forecast, gamma: int) -> dict[str, Any]:
    """Steps against their forecast. Of what is compared only the clock around a whole step comes from the steps."""
    kinds = dict(zip(KINDS, (whole(own, gamma) for own in after(steps)), strict=True))
    both = [step for own in kinds.values() for step in own]
    facts: dict[str, Any] = {"all": len(steps), "steps": {kind: len(own) for kind, own in kinds.items()}}
    facts |= {"share": said.share, "counted": said.counted, "observed": fmean(step["wall"] for step in both)}
    facts["parts"] = {name: asdict(own) for name, own in said.parts.items()}
    facts["exposed"] = median(step["exposed"] / step["wall"] for step in kinds["reuse"] or both)
    facts["forecast"] = {name: said.mean(name) for name in said.parts}
    facts["late"] = {
        name: {kind: median(abs(step["wall"] / one - 1) for step in kinds[kind]) for kind, one in own if kinds[kind]}
        | {"mean": abs(facts["observed"] / said.mean(name) - 1)}
        for name, own in ((name, _steps_of_parts(own)) for name, own in said.parts.items())
    }
    return facts


def _steps_of_parts(own: Parts) -> list[tuple[str, float]]:
    return [*zip(KINDS, (own.reuse, own.fallback), strict=True)]


def saved_of(mirror: TimedRun, serial: TimedRun, steps: Sequence[Step], said: Forecast, gamma: int) -> dict[str, Any]:
    """What is saved a step of serial speculation's, in ms, beside min(budget, chain) less both rendezvous."""
    chain, pass_ms = serial.draft / serial.passes, serial.wall / serial.passes
    alone = said.parts[ALONE].law
    reuse = whole(after(steps)[0], gamma)
    facts: dict[str, Any] = {"chain": chain, "pass": pass_ms, "possible": replace(alone, draft=chain).saved}
    facts |= {"saved": pass_ms - mirror.wall / mirror.passes, "ratio": serial.ms / mirror.ms}
    facts["ratios_forecast"] = {name: pass_ms / said.mean(name) for name in said.parts}
    if reuse:
        facts["saved_reuse"] = pass_ms - fmean(step["wall"] for step in reuse)
    names = ("prefix", "rendezvous_exit", "suffix", "draft", "exposed", "host")
    facts["in_step"] = {name: median(step[name] for step in whole(steps, gamma)) for name in names}
    return facts


def _terms(facts: dict[str, Any], level_ms: float | None) -> list[str]:
    """What the figures are made of, in ms."""
    shown = {**facts["parts"], "in the step": facts["in_step"]}
    lines = [f"{name}: " + ", ".join(f"{part} {ms:.2f}" for part, ms in own.items()) for name, own in shown.items()]
    steps = facts["steps"]
    return [
        *lines,
        f"in series: a pass with its chain {facts['pass']:.2f}, the chain {facts['chain']:.2f}",
        f"{steps['fallback']} of {sum(steps.values())} steps are behind a fallback, {facts['share']:.2f} of "
        f"{facts['counted']} on other prompts; the other {facts['all'] - sum(steps.values())} are a request's first or "
        "have shorter windows",
        *([f"each level of a draft is given {level_ms:g} ms, as on a device of its own"] if level_ms else []),
    ]


def _said(facts: dict[str, Any]) -> list[str]:
    """Each figure beside what was wanted of it."""
    rows = []
    for name, late in facts["late"].items():
        mean = f"mean step, forecast {facts['forecast'][name]:.2f} ms and observed {facts['observed']:.2f} ms"
        words = {kind: f"median |observed - forecast| of steps behind a {kind}" for kind in KINDS} | {"mean": mean}
        rows += [(f"parts {name}: {words[kind]}", value, MOST_LATE, True) for kind, value in late.items()]
    rows += [("median share of waiting for the draft, of steps that reuse", facts["exposed"], MOST_EXPOSED, True)]
    for name, which in (("saved", "all steps"), ("saved_reuse", "steps that reuse")):
        if facts["possible"] > 0 and name in facts:
            share = facts[name] / facts["possible"]
            rows += [(f"saved of min(budget, chain) less rendezvous, {which}", share, LEAST_SAVED, False)]
    ratios = ", ".join(f"{ratio:.2f} {name}" for name, ratio in facts["ratios_forecast"].items())
    rows += [(f"serial with the same placement over mirror (forecast: {ratios})", facts["ratio"], LEAST_RATIO, False)]
    return [
        f"{words}: {value:.3f}, {'at most' if most else 'at least'} {bound} wanted: "
        + ("yes" if (value <= bound if most else value >= bound) else "NO")
        for words, value, bound, most in rows
    ]


@study.figure(
    takes=("draft", "draft_times", "heads", "candidates", "core", "rows", "level_ms"),
    **STRETCHED,
    tasks="sql",
    prompts=4,
    max_new_tokens=32,
    repeats=1,
)
def figure_3a(ask: MirrorFlags) -> Iterator[Table | None]:
    """Windows of 1 to 8 tokens: tokens accepted, and draft time on the critical path, serial and mirror."""
    _two_cores(ask)
    yield None
    rows, series = [], []
    gammas = GAMMAS[:2] if ask.quick else GAMMAS
    for way in (SERIAL, MIRROR):
        accepted, exposed = [], []
        for gamma, run in zip(gammas, apart(ran, ask, way, gammas), strict=True):
            accepted.append(run.accepted / run.passes)
            exposed.append(run.draft / run.passes)
            rows.append([way, str(gamma), f"{accepted[-1]:.2f}", f"{exposed[-1]:.2f}", f"{run.ms:.2f}"])
        series.append(Series(label=way, x=accepted, y=exposed))
    yield Table(
        title="Accepted tokens and draft time on the critical path",
        head=("way", "window", "accepted a pass", "draft ms a pass", "ms a token"),
        parts={"": rows},
        values={"points": [{"way": s.label, "accepted": [*s.x], "draft_ms": [*s.y]} for s in series]},
        plots={
            ".svg": lambda path: figures.lines(
                [
                    Panel(
                        title="Draft time",
                        series=series,
                        x_label="accepted a pass",
                        y_label="ms a pass",
                        y_from=0,
                        columns=2,
                    )
                ],
                path,
                width=1.3,
            )
        },
    )


def _both(ask: MirrorFlags) -> list[Entry]:
    """Serial speculation, and the mirror round with a drafter's process; target and drafter have a thread each."""
    if len(cores()) < 2:
        raise CapabilityError("two processes", "this process may use one core", "give it two")
    drafter, round_ = drafter_of(ask), mirror_of(ask, ask.candidates, more=",rollout=process,threads=1")
    return [
        Entry(parse_method(f"serial={drafter};budget={ask.gamma}"), "serial"),
        Entry(parse_method(f"mirror={drafter};round={round_}"), "mirror"),
    ]


BOTH = ("draft", "draft_times", "candidates", "gamma", "heads")


@study.figure(takes=BOTH, **STRETCHED, tasks="sql,gsm8k", prompts=4, max_new_tokens=48, threads=1)
def figure_4(ask: MirrorFlags) -> Grid:
    """Speed-up over the target alone: serial and mirror, greedy and at T = 1."""
    cells = {"temperatures": (0.0, 1.0)}
    return Grid(title="Serial and mirror", entries=_both(ask), x_label="temperature", cell="temperature", cells=cells)


@study.figure(takes=BOTH, **STRETCHED, tasks="sql", prompts=8, max_new_tokens=48, threads=1)
def figure_5(ask: MirrorFlags) -> Grid:
    """Speed-up by batch size, serial and mirror."""
    batches = BATCHES[:2] if ask.quick else BATCHES
    cells = {"batches": batches}
    return Grid(
        title="By batch size",
        entries=_both(ask),
        x_label="batch size",
        cell="batch",
        cells=cells,
        prompts=max(batches),
    )
