"""What all parts share: the study, its options, and pipelines that run by a virtual clock."""

from __future__ import annotations

import math
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from kit.clock import VIRTUAL, VirtualClock
from kit.links import Link
from kit.scores import encoded_prompts, workload_of
from kit.study import Options, Study, asked
from kit.ticks import watch_ticks
from kit.timeline import Span
from kit.virtual_stages import Frames, VirtualSessions, VirtualStages

from paceline.api.assembly.drafting import drafter_context
from paceline.api.llm import LLM
from paceline.bench import workloads
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence
from paceline.draft import registry
from paceline.draft.base import DrafterSpec
from paceline.draft.text_sessions import LookUp
from paceline.engine.base import RoundParts
from paceline.engine.budget import FixedBudget
from paceline.engine.engine import Engine, EngineLimits
from paceline.engine.scheduler import SchedulerConfig
from paceline.kv.pool import KVPool
from paceline.papers.specpipe.config import PipelineConfig
from paceline.papers.specpipe.records import Tick
from paceline.papers.specpipe.round import PipelineRound
from paceline.plan.models import named

Value = TypeVar("Value")
Job = tuple[abc.Sequence[int], SamplingParams]
STAGES = 8
STAGE_MS = 302.39 / STAGES  # of the paper's own plain pipeline on HumanEval-X (section 4.2)
VLLM_STAGE_MS = 181.41 / STAGES  # of PP-vLLM, likewise
DRAFT_MS = 17.0  # of a level, whatever its rows: a token of Llama 1B on an L40 (section 3.3.1)
LEAP = 64  # rows of a GPU's matrix product: up to these a stage takes the same (figure 9)
GPU_BYTES, GPU_FLOPS = 936e9, 71e12  # a second, of an RTX 3090 (NVIDIA's GA102 white paper: bf16, float32 sums)
# Measured by `costs` on a Xeon with AMX, one thread: ms of the coordinator in a tick, for each row in flight and for
# each request; ms of a stage's plan for a frame, and for each of its rows.
COORDINATOR_MS = 0.29, 0.0103, 0.08
PLAN_MS = 0.218, 0.0047
FREE = Link()
ROW = 8192 * 2  # bytes of a row's states on a link: Llama 70B's (section 4.2: 16 KiB a token)
ETHERNET = Link(latency_ms=1.0, gbit_per_s=10.0)  # "10 GbE with millisecond-level latency" (section 4.2)
OWN = ("draft", "stages", "width", "children")  # options that figures look at
HOW = f"{VIRTUAL}: tokens, trees and pruning are real, times are those that stages, link and source are given"
ASSUMED = (
    f"assumed: {STAGE_MS:.1f} ms a stage up to {LEAP} rows (the paper's plain pipeline), then what an RTX 3090's "
    f"71 TFLOP/s take longer than its memory; {DRAFT_MS:g} ms a level of drafts. Measured, for verdicts, pruning and "
    f"frames: {COORDINATOR_MS[0]:g} ms a tick, {1e3 * COORDINATOR_MS[1]:.1f} us a row in flight and "
    f"{COORDINATOR_MS[2]:g} ms a request; for a stage's plan {PLAN_MS[0]:g} ms a frame and {1e3 * PLAN_MS[1]:.1f} us a "
    "row. The plain pipelines are charged none of these"
)


@dataclass(frozen=True, kw_only=True)
class PipeFlags(Options):
    """The options of this study."""

    draft: str = asked("paceline-small-draft", "Draft model.", "MODEL")
    stages: int = asked(STAGES, "Stages of the pipeline.", "M")
    width: int = asked(8, "Drafted tokens of a request that enter together.", "W")
    children: int = asked(4, "Candidates below each of them.", "K")
    measured: Path | None = asked(None, "Folder of times.json and costs.json, whose times are charged.", "DIR")

    def few(self, values: abc.Sequence[Value]) -> abc.Sequence[Value]:
        """What is swept; the first two where it is to be quick."""
        return values[:2] if self.quick else values


study = Study(
    "SpecPipe: the paper's tables and figures in virtual time.",
    PipeFlags,
    quick={"prompts": 1, "max_new_tokens": 10},
)


@cache
def loaded(model: str, dtype: str, threads: int | None) -> LLM:
    """A target, once for all figures."""
    return LLM(model, dtype=dtype, threads=threads, max_sequences=16)


def target(ask: PipeFlags) -> LLM:
    """The target that is asked for, on the CPU."""
    return loaded(ask.model, ask.dtype, ask.threads)


def prompts(ask: PipeFlags, tokens: int) -> list[list[int]]:
    """The first prompts of each task, with room for so many tokens."""
    found: list[list[int]] = []
    for task in ask.names:
        load = workloads.load(workload_of(task), folder=ask.data, limit=ask.prompts, seed=ask.seed)
        found += encoded_prompts(target(ask), load, tokens)[0]
    return found


def greedy(tokens: int, **options: Any) -> SamplingParams:
    """So many tokens, whatever they are."""
    return SamplingParams(**{"temperature": 0, "max_tokens": tokens, "ignore_eos": True} | options)


def plain(ask: PipeFlags, jobs: abc.Sequence[Job]) -> list[list[int]]:
    """What plain decoding says."""
    outputs = target(ask).generate([{"prompt_token_ids": [*ids]} for ids, _ in jobs], [params for _, params in jobs])
    return [output.outputs[0].token_ids for output in outputs]


def draft_of(ask: PipeFlags) -> Any:
    """The draft model, afresh."""
    llm = target(ask)
    chosen = registry.parse(f"draft_model:{ask.draft}")
    assert chosen is not None
    return registry.build(chosen, drafter_context(llm.config, llm.config.resolve()))


class Evenly(LookUp):
    """A synthetic source: knows the text, and is wrong about tokens at even distances. It guesses nothing.

    Args:
        text: prompt and answer.
        rate: share of the tokens that it is right about.
    """

    spec = DrafterSpec(name="synthetic", ahead=True)

    def __init__(self, text: abc.Sequence[int], rate: float) -> None:
        self.text, self.rate, self.vocab = text, rate, max(text) + 2

    def continuations(self, sequence: Sequence, path: abc.Sequence[int], width: int) -> list[tuple[int, float]]:
        """One token."""
        place = len(sequence.tokens) + len(path)
        if place >= len(self.text):
            return []
        right = [*sequence.tokens[sequence.prompt_len :], *path] == [*self.text[sequence.prompt_len : place]]
        misses = 1 - self.rate
        wrong = not right or int(place * misses) != int((place - 1) * misses)
        return [((self.text[place] + wrong) % self.vocab, -0.1)]


@dataclass(kw_only=True)
class PipelineRun:
    """What came of some requests."""

    said: list[list[int]]
    seconds: float  # of the virtual clock, from the first prompt on
    ticks: list[Tick]
    times: list[list[float]]  # of each request's tokens
    spans: list[Span] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Share of the tokens that were in flight when they were said (an answer's last one is not looked up)."""
        verdicts = [verdict for tick in self.ticks for verdict in tick.verdicts]
        return sum(verdict.hit for verdict in verdicts) / max(1, len(verdicts))

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens, of all requests."""
        return [after - before for row in self.times for before, after in zip(row, row[1:], strict=False)]

    @property
    def tbt(self) -> float:
        """Mean seconds between tokens."""
        return sum(self.gaps) / max(1, len(self.gaps))

    @property
    def mean_bubble(self) -> float:
        """Ticks without a token for each one with a token, from the first one that gave one on."""
        said = [tick.count for tick in self.ticks]
        first = next(place for place, count in enumerate(said) if count)
        return said[first:].count(0) / max(1, sum(said) - 1)

    @property
    def throughput(self) -> float:
        """Tokens a second, prompts included in the time."""
        return sum(map(len, self.said)) / self.seconds


def two_hosts(ask: PipeFlags) -> dict[str, Any]:
    """The first half of the stages behind the coordinator's 10 GbE; with assumed times rows are as large as the
    paper's."""
    decoder = target(ask).decoder
    row = decoder.config.d_model * decoder.dtype.itemsize
    link = ETHERNET if ask.measured else replace(ETHERNET, gbit_per_s=ETHERNET.gbit_per_s * row / ROW)
    half = ask.stages // 2
    return {"link": link, "hosts": [1] * half + [0] * (ask.stages - half)}


def beyond_ms(rows: int) -> float:
    """What a stage of Llama 70B takes longer for rows in blocks of 64 than for one: a roofline."""
    large = named("llama-3-70b")
    assert large is not None
    parameters = large.body_parameters / STAGES
    blocks = math.ceil(rows / LEAP) * LEAP
    return 1e3 * max(0.0, 2 * parameters * blocks / GPU_FLOPS - 2 * parameters / GPU_BYTES)


def stage_of(flat_ms: float) -> Callable[[int], float]:
    """Seconds of a stage by rows: its time up to 64 of them, and what more take."""
    return lambda rows: (flat_ms + beyond_ms(rows)) * 1e-3


def planned(stage_s: Callable[[int], float], plan_ms: abc.Sequence[float] = PLAN_MS) -> Callable[[int], float]:
    """A stage with our plan of its rows."""
    return lambda rows: stage_s(rows) + (plan_ms[0] + plan_ms[1] * rows) * 1e-3


def coordinator_of(requests: int, costs_ms: abc.Sequence[float] = COORDINATOR_MS) -> Callable[[int], float]:
    """Seconds of verdicts, pruning and frames by rows in flight: in every tick, and beside nothing."""
    tick, row, request = costs_ms
    return lambda rows: (tick + row * rows + request * requests) * 1e-3


def nothing(rows: int) -> float:
    """No time."""
    return 0.0


@dataclass(frozen=True, kw_only=True)
class Times:
    """What is charged: the paper's times, or those that were measured of the model itself. All are of one request."""

    stages: abc.Sequence[Callable[[int], float]]  # seconds of each by rows, of its layers and head alone
    draft_s: Callable[[int], float] = lambda rows: DRAFT_MS * 1e-3  # of a level by nodes that are expanded
    plan_ms: abc.Sequence[float] = PLAN_MS
    coordinator_ms: abc.Sequence[float] = COORDINATOR_MS
    layers: str = ""  # of each stage; none: even
    words: str = ASSUMED

    @property
    def bare(self) -> dict[str, Any]:
        """For `decode`: of a plain pipeline, as the paper measured a whole token of it."""
        return {"stage_s": self.stages, "coordinator_s": nothing}

    @property
    def whole(self) -> dict[str, Any]:
        """For `decode`: with plans, verdicts and frames."""
        stages = [planned(own, self.plan_ms) for own in self.stages]
        return {
            "stage_s": stages,
            "draft_s": self.draft_s,
            "coordinator_s": coordinator_of(1, self.coordinator_ms),
        }

    @property
    def tick_ms(self) -> float:
        """Of the slowest stage with one row."""
        return 1e3 * max(own(1) for own in self.stages)

    def step_s(self, rows: int) -> float:
        """Of the slowest stage with so many."""
        return max(planned(own, self.plan_ms)(rows) for own in self.stages)

    def expected_ms(self, rate: float) -> float:
        """P t + (1 - P) m t: a hit is a tick, a miss the sum of all stages."""
        return rate * self.tick_ms + (1 - rate) * 1e3 * sum(own(1) for own in self.stages)


BARE: dict[str, Any] = {"stage_s": stage_of(STAGE_MS), "coordinator_s": nothing}  # as the paper measured a whole token
EVEN: dict[str, Any] = {"stage_s": lambda rows: STAGE_MS * 1e-3, "coordinator_s": nothing}  # the formula's


def decode(
    ask: PipeFlags,
    jobs: abc.Sequence[Job],
    drafter: Any,
    config: PipelineConfig,
    together: int | None = None,
    stage_s: Callable[[int], float] | abc.Sequence[Callable[[int], float]] | None = None,
    draft_s: Callable[[int], float] = lambda rows: DRAFT_MS * 1e-3,
    coordinator_s: Callable[[int], float] | None = None,
    link: Link = FREE,
    hosts: abc.Sequence[int] | None = None,
    frames: Frames = "coordinator",
) -> PipelineRun:
    """Requests through a pipeline in virtual time.

    Args:
        ask: names the target.
        jobs: prompts and parameters.
        drafter: the source's; None: a plain pipeline.
        config: of the round.
        together: requests that run at once; None: all.
        stage_s: seconds of a stage by rows, of all or of each; None: the paper's, with our plan.
        draft_s: seconds of a level by nodes that are expanded.
        coordinator_s: seconds of the coordinator in a tick by rows in flight; None: as measured.
        link: of every host.
        hosts: of each stage; None: all are on one.
        frames: the way that they go.
    """
    pool = pool_of(ask, jobs, drafter)
    decoder, together = target(ask).decoder, together or len(jobs)
    own_s = coordinator_of(together) if coordinator_s is None else coordinator_s
    one = planned(stage_of(STAGE_MS)) if stage_s is None else stage_s
    each = [one] * config.stages if callable(one) else [*one]
    with VirtualClock() as clock:
        stage_line = VirtualStages(clock, config.cut(decoder, pool), each, link, hosts, own_s, frames)
        round_ = config.over(RoundParts(target=decoder, pool=pool, drafter=drafter), stage_line)
        if round_.source is not None:
            inner: Any = round_.source.sessions
            round_.source.sessions = VirtualSessions(clock, inner, draft_s, stage_line.timeline)
        ticks = watch_ticks(round_)
        engine = engine_over(ask, round_, pool, together)
        live = [engine.live[engine.submit(ids, params)].sequences[0] for ids, params in jobs]
        times: list[list[float]] = [[] for _ in live]
        while engine.busy:
            engine.step()
            for row, state in zip(times, live, strict=True):
                row += [clock.now()] * (len(state.output_ids) - len(row))
        assert round_.failure is None, round_.failure
        said = [state.output_ids for state in live]
        return PipelineRun(said=said, seconds=clock.now(), ticks=ticks, times=times, spans=stage_line.timeline.spans)


def pool_of(ask: PipeFlags, jobs: abc.Sequence[Job], drafter: Any) -> KVPool:
    """Room for all requests, which the drafter has, too."""
    decoder = target(ask).decoder
    slots = sum(len(ids) + (params.max_tokens or 0) + 64 for ids, params in jobs) + 4096
    if drafter is not None:
        drafter.bind(decoder.info("target", target(ask).tokenizer), len(jobs), slots, decoder.device)
    return KVPool(*decoder.cache_shape, slots, decoder.dtype, decoder.device)


def engine_over(ask: PipeFlags, round_: PipelineRound, pool: KVPool, together: int) -> Engine:
    """So many requests at once."""
    shape = target(ask).decoder.config
    limits = EngineLimits(vocab_size=shape.vocab_size, max_model_len=shape.max_position, eos_ids=shape.eos_ids)
    scheduler = SchedulerConfig(max_sequences=together)
    return Engine(round_, pool, limits, scheduler, FixedBudget(1), None, {})


def levels(ask: PipeFlags, **options: Any) -> PipelineConfig:
    """SpecPipe's pipeline, as asked for."""
    return PipelineConfig(**{"stages": ask.stages, "width": ask.width, "children": ask.children} | options)
