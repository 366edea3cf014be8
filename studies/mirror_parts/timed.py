"""What is timed: the latency law, figures 3a and 6b, each run in a process of its own, and figures 4 and 5.

These need a machine without other work, of two cores at least.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from mirror_parts.common import SIX, Asked, drafter_of, listen, mirror_of, prompts_of, study
from paceline import LLM
from paceline.bench import figures
from paceline.bench.figures import Panel, Series
from paceline.bench.grid import apart
from paceline.bench.methods import parse_method
from paceline.bench.study import Entry, Grid, Table
from paceline.core.errors import CapabilityError, ConfigError
from paceline.distributed.clock import Pace, RealClock
from paceline.distributed.placement import cores, pin
from paceline.planning.latency import MirrorStep

STRETCHED, DRAFT = "stretch:paceline-small,times=8", "stretch:paceline-small-draft,times=4"
GAMMAS = (1, 2, 3, 4, 6, 8)
BATCHES = (1, 2, 4, 8)
MOST_LATE, MOST_EXPOSED, LEAST_SAVED, LEAST_RATIO = 0.05, 0.03, 0.8, 1.2  # what is wanted of the law


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One way of decoding: its times in ms, and what came out."""

    wall: float  # of all requests, from their first tokens on
    tokens: int  # after the first ones, as all that follows
    passes: int
    accepted: int
    draft: float  # on the critical path; with what the first passes had of it
    windows: int  # drafted in series by a draft with streams, and its passes for them
    internal: int
    steps: list[dict[str, Any]]  # of passes behind a prompt, in the mirror round

    @property
    def ms(self) -> float:
        """Of a token."""
        return self.wall / self.tokens


WAYS = {  # name: round behind "mirror", threads, whether the drafter has a core of its own
    "mirror, two processes": ("rollout=process", 1, True),
    "serial, one core": ("", 1, True),
    "serial, both cores": ("", 2, False),
    "mirror, one process": ("rollout=beside", 2, False),
}


def ran(ask: Asked, way: str, gammas: Sequence[int]) -> list[Ran]:
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


def _answered(ask: Asked, way: str, gamma: int, base: LLM) -> Ran:
    more, threads, alone = WAYS[way]
    if alone and not more:  # the cores that the mirror round's target has
        pin([core for core in cores() if core != ask.core][:1])
    options: dict[str, Any] = {**ask.llm, "threads": threads, "share": base}
    if more:
        core = f",cores=<{ask.core}>" if alone else ""
        given = f",level_ms={ask.level_ms}" if alone and ask.level_ms else ""
        options["round"] = mirror_of(ask, ask.candidates, more=f",{more}{core}{given}")
    else:
        options["budget"] = gamma
    llm = LLM(ask.model, drafter=drafter_of(ask, gamma), **options)
    if not more and ask.level_ms:
        slow(llm, ask.level_ms)
    chains: Any = None if more else _drafter(llm).chains
    windows = [] if chains is None else counted(_drafter(llm))
    prompts = [prompt for task in ask.names for prompt in prompts_of(ask, llm, task)]
    listen(llm, prompts[:1], ask, 0.0)  # what the first pass prepares
    heard = listen(llm, prompts, ask, 0.0, alone=True)
    stats = [output.stats for output in heard.outputs]
    return Ran(
        wall=sum(s.elapsed_ms - (s.ttft_ms or 0.0) for s in stats),
        tokens=sum(s.emitted - 1 for s in stats),
        passes=sum(s.passes - 1 for s in stats),
        accepted=sum(s.accepted for s in stats),
        draft=sum(s.draft_ms for s in stats),
        windows=len(windows),
        internal=0 if chains is None else chains.passes,
        steps=[_step(times, verdicts) for times, verdicts in heard.steps if verdicts],
    )


def slow(llm: LLM, level_ms: float) -> None:
    """Give each level of serial speculation's drafts a time: each pass of the draft."""
    drafter = _drafter(llm)
    if drafter.chains is not None:
        grow, one = drafter.chains.grow, Pace(RealClock(), lambda passes: passes * level_ms / 1e3)

        def grown(asks: Any) -> Any:
            with one.work(1):
                return grow(asks)

        drafter.chains.grow = grown
        return
    propose, pace = drafter.propose, Pace(RealClock(), lambda levels: levels * level_ms / 1e3)

    def paced(want: Any) -> Any:
        with pace.work(min(max(want.budgets), max(want.max_depths))):
            return propose(want)

    drafter.propose = paced


def counted(drafter: Any) -> list[int]:
    """The tokens wanted of each window that serial speculation has drafted from now on."""
    propose, windows = drafter.propose, list[int]()

    def noted(want: Any) -> Any:
        wanted = max(map(min, want.budgets, want.max_depths))
        if wanted > 0:
            windows.append(wanted)
        return propose(want)

    drafter.propose = noted
    return windows


def _drafter(llm: LLM) -> Any:
    """Of serial speculation."""
    round_: Any = llm.engine.round
    return round_.guard.drafter


def _step(times: Any, verdicts: Sequence[Any]) -> dict[str, Any]:
    names = ("fresh", "prefix", "suffix", "rendezvous_exit", "rendezvous_final", "exposed", "draft", "observed", "law")
    own = {name: float(getattr(times, name)) for name in names}
    return own | {"told": verdicts[0].told, "reused": verdicts[0].reused, "window": bool(verdicts[0].window)}


def after(steps: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Steps behind an outcome that was prepared for, and behind a fallback; the first of a request is of neither."""
    pairs = [*zip(steps, steps[1:], strict=False)]
    return [b for a, b in pairs if a["reused"]], [b for a, b in pairs if a["told"] and not a["reused"]]


def _two_cores(ask: Asked) -> None:
    here = cores()
    if ask.core not in here or len(here) < 2:
        raise CapabilityError(f"--core {ask.core}", f"this process may use {here}", "give one of two cores or more")


@study.table(
    takes=("draft", "streams", "gamma", "heads", "candidates", "core", "rows", "level_ms"),
    model=STRETCHED,
    draft=DRAFT,
    tasks="sql",
    prompts=8,
    max_new_tokens=64,
)
def law(ask: Asked) -> Iterator[Table | None]:
    """The latency law on two cores: predicted and observed, on steps that reuse and on those behind a fallback."""
    _two_cores(ask)
    if ask.level_ms is not None and ask.level_ms <= 0:
        raise ConfigError(f"--level-ms {ask.level_ms:g}", "no time", "give more than 0")
    yield None
    # One process has no other device.
    ways = [way for way in WAYS if ask.level_ms is None or way != "mirror, one process"]
    found: dict[str, list[Ran]] = {way: [] for way in ways}
    for _ in range(ask.repeats):  # in turns
        for way, runs in found.items():
            runs += apart(ran, ask, way, [ask.gamma])
    best = {way: min(runs, key=lambda run: run.ms) for way, runs in found.items()}
    mirror, serial = best["mirror, two processes"], best["serial, one core"]
    facts = law_of(mirror, serial)
    rows = [
        [way, f"{run.ms:.2f}", f"{run.ms / mirror.ms:.2f}", f"{run.tokens / run.passes:.2f}"]
        for way, run in best.items()
    ]
    yield Table(
        title="The latency law",
        head=("way", "ms a token", "of the mirror round's", "tokens a pass"),
        parts={"": rows},
        values={"ms": {way: [run.ms for run in runs] for way, runs in found.items()}, **facts},
        remarks=[
            *_said(facts, serial.ms / mirror.ms),
            *_terms(facts, ask.level_ms),
            f"best of {ask.repeats} runs of each, in turns",
        ],
    )


def law_of(mirror: Ran, serial: Ran) -> dict[str, Any]:
    """The law against what was observed, in ms and as shares."""
    steps, (reuse, fallback) = mirror.steps, after(mirror.steps)
    facts: dict[str, Any] = {"steps": len(steps), "reuse": len(reuse), "fallback": len(fallback)}
    if reuse:
        facts["late"] = median(abs(s["observed"] - s["law"]) / s["law"] for s in reuse)
        facts["exposed"] = median(s["exposed"] / s["observed"] for s in reuse)
    fresh = fmean(s["fresh"] for s in fallback) if fallback else 0.0
    predicted = fmean(s["law"] - s["fresh"] for s in steps) + fresh * len(fallback) / len(steps)
    facts |= {"fresh": fresh, "observed": fmean(s["observed"] for s in steps), "predicted": predicted}
    suffix, rendezvous = (fmean(sum(s[n] for n in names) for s in steps) for names in (("suffix",), _RENDEZVOUS))
    chain = serial.draft / serial.passes
    possible = MirrorStep(prefix=0, suffix=suffix, draft=chain).saved - rendezvous
    pass_ms = serial.wall / serial.passes
    saved = pass_ms - mirror.wall / mirror.passes
    if reuse:
        facts["saved_reuse"] = pass_ms - fmean(s["observed"] for s in reuse)
    facts["target_ms"] = {"serial": pass_ms - chain, "mirror": fmean(s["prefix"] + s["suffix"] for s in steps)}
    facts["draft"] = fmean(s["draft"] for s in steps)
    return facts | {"budget": suffix, "rendezvous": rendezvous, "chain": chain, "possible": possible, "saved": saved}


def _terms(facts: dict[str, Any], level_ms: float | None) -> list[str]:
    """What the figures are made of."""
    both = facts["target_ms"]
    return [
        f"target of a pass: {both['serial']:.2f} ms in serial, {both['mirror']:.2f} ms beside the drafter's process, "
        f"{facts['budget']:.2f} ms of it behind the exit",
        f"draft: a chain in series {facts['chain']:.2f} ms, a rollout {facts['draft']:.2f} ms, a fresh one "
        f"{facts['fresh']:.2f} ms; both rendezvous with the exit's head {facts['rendezvous']:.2f} ms",
        f"{facts['fallback']} of {facts['steps']} steps are behind a fallback",
        *([f"each level of a draft is given {level_ms:g} ms, as on a device of its own"] if level_ms else []),
    ]


_RENDEZVOUS = ("rendezvous_exit", "rendezvous_final")


def _said(facts: dict[str, Any], ratio: float) -> list[str]:
    """Each figure beside what was wanted of it."""
    rows = []
    if "late" in facts:
        rows += [("median |observed - law| on steps that reuse", facts["late"], MOST_LATE, True)]
        rows += [("median exposed draft time on these", facts["exposed"], MOST_EXPOSED, True)]
    off = abs(facts["observed"] / facts["predicted"] - 1)
    rows += [("mean step against law + FF x fresh", off, MOST_LATE, True)]
    if facts["possible"] > 0:
        words = "saved of min(budget, chain) less rendezvous, "
        rows += [(f"{words}over all steps", facts["saved"] / facts["possible"], LEAST_SAVED, False)]
        if "saved_reuse" in facts:
            share = facts["saved_reuse"] / facts["possible"]
            rows += [(f"{words}on steps that reuse", share, LEAST_SAVED, False)]
    rows += [("serial with the same placement over mirror", ratio, LEAST_RATIO, False)]
    return [
        f"{words}: {value:.3f}, {'at most' if most else 'at least'} {bound} wanted: "
        + ("yes" if (value <= bound if most else value >= bound) else "NO")
        for words, value, bound, most in rows
    ]


@study.figure(
    takes=("draft", "streams", "heads", "candidates", "core", "rows", "level_ms"),
    model=STRETCHED,
    draft=DRAFT,
    tasks="sql",
    prompts=4,
    max_new_tokens=32,
    repeats=1,
)
def figure_3a(ask: Asked) -> Iterator[Table | None]:
    """Windows of 1 to 8 tokens: tokens accepted, and draft time on the critical path, serial and mirror."""
    _two_cores(ask)
    yield None
    rows, series = [], []
    gammas = GAMMAS[:2] if ask.quick else GAMMAS
    for drafts, one in _drafts(ask).items():
        for way in ("serial, one core", "mirror, two processes"):
            accepted, exposed = [], []
            for gamma, run in zip(gammas, apart(ran, one, way, gammas), strict=True):
                accepted.append(run.accepted / run.passes)
                exposed.append(run.draft / run.passes)
                name = f"{way}{drafts}"
                rows.append([name, str(gamma), f"{accepted[-1]:.2f}", f"{exposed[-1]:.2f}", f"{run.ms:.2f}"])
            series.append(Series(label=f"{way}{drafts}", x=accepted, y=exposed))
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


def _drafts(ask: Asked) -> dict[str, Asked]:
    """The plain draft, and that with streams, where there are any: what is behind a label, and who is asked."""
    plain = {"": replace(ask, streams=None)}
    return plain | ({", streams": ask} if ask.streams else {})


@study.table(
    takes=("draft", "streams", "gamma", "core"),
    model=STRETCHED,
    draft=DRAFT,
    tasks=SIX,
    prompts=2,
    max_new_tokens=48,
    gamma=5,
)
def figure_6b(ask: Asked) -> Iterator[Table | None]:
    """A draft with streams against a plain one, in series: its passes and its time for a window."""
    _two_cores(ask)
    if not ask.streams:
        raise ConfigError("figure_6b", "no streams of the draft are named", "give --streams FOLDER")
    yield None
    rows, values = [], {}
    for task in ask.names:
        best: dict[str, Ran] = {}
        for _ in range(ask.repeats):  # in turns
            for name, one in _drafts(replace(ask, tasks=task)).items():
                (run,) = apart(ran, one, "serial, one core", [ask.gamma])
                if name not in best or run.draft / run.passes < best[name].draft / best[name].passes:
                    best[name] = run
        plain, streams = best[""], best[", streams"]
        times = [run.draft / run.passes for run in (plain, streams)]
        steps = streams.internal / streams.windows
        same = (plain.passes, plain.accepted) == (streams.passes, streams.accepted)
        values[task] = {"plain_ms": times[0], "streams_ms": times[1], "internal_steps": steps, "same": same}
        shown = (
            f"{steps:.2f}",
            f"{ask.gamma / steps:.2f}",
            f"{times[0]:.2f}",
            f"{times[1]:.2f}",
            f"{times[0] / times[1]:.2f}",
        )
        rows.append([task, *shown, "yes" if same else "NO"])
    yield Table(
        title="A draft with streams, alone",
        head=(
            "task",
            "passes a window",
            "tokens a pass",
            "plain, ms",
            "streams, ms",
            "speed-up",
            "same windows accepted",
        ),
        parts={"": rows},
        values={"tasks": values, "gamma": ask.gamma},
        remarks=[
            f"windows of {ask.gamma} tokens, which the plain draft drafts in as many passes",
            f"best of {ask.repeats}",
        ],
    )


def _both(ask: Asked) -> list[Entry]:
    """Serial speculation, and the mirror round with a drafter's process; target and drafter have a thread each."""
    if len(cores()) < 2:
        raise CapabilityError("two processes", "this process may use one core", "give it two")
    entries, more = [], ",rollout=process,threads=1"
    for drafts, one in _drafts(ask).items():
        drafter, name = drafter_of(one), drafts.replace(", ", "-")
        round_ = mirror_of(ask, ask.candidates, more=more)
        entries += [
            Entry(parse_method(f"serial{name}={drafter};budget={ask.gamma}"), f"serial{drafts}"),
            Entry(parse_method(f"mirror{name}={drafter};round={round_}"), f"mirror{drafts}"),
        ]
    return entries


BOTH = ("draft", "streams", "candidates", "gamma", "heads", "rows")


@study.figure(takes=BOTH, model=STRETCHED, draft=DRAFT, tasks="sql,gsm8k", prompts=4, max_new_tokens=48, threads=1)
def figure_4(ask: Asked) -> Grid:
    """Speed-up over the target alone: serial and mirror, a plain draft and one with streams, greedy and at T = 1."""
    cells = {"temperatures": (0.0, 1.0)}
    return Grid(title="Serial and mirror", entries=_both(ask), x_label="temperature", cell="temperature", cells=cells)


@study.figure(takes=BOTH, model=STRETCHED, draft=DRAFT, tasks="sql", prompts=8, max_new_tokens=48, threads=1)
def figure_5(ask: Asked) -> Grid:
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
