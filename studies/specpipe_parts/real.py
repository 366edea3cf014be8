"""Real time: two stages pinned to two cores, beside the plain pipeline and one process with two threads."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from kit import figures
from kit.figures import Panel, Series
from kit.grid import apart
from kit.study import Table
from kit.synthetic import write_answers
from kit.ticks import watch_ticks

from paceline import LLM
from paceline.api.assembly.engine import load_target
from paceline.api.config import LLMConfig
from paceline.core.errors import CapabilityError
from paceline.core.inference import inference
from paceline.core.sampling import SamplingParams
from paceline.kv.pool import KVPool
from paceline.model.stages import TEXT, Frame, Stage, StageRows
from paceline.papers.specpipe.config import PipelineConfig
from paceline.runtime.placement import cores, pin
from paceline.runtime.stage_worker import service
from specpipe_parts.common import PipeFlags, prompts, study, target

STRETCHED = 16  # times
RATE = 0.95
KEYS = 128  # that a row sees where a stage is timed by itself
TIMED_S = 2.0
CONTEXT, WARM_UP, PASSES = 256, 3, 25  # where layers are timed: tokens in front, passes
LEAST_OF_CEILING, LEAST_OVER_PLAIN = 0.95, 1.6  # what is wanted
RIGHT = f"synthetic,answers={{}},accept={RATE},depth=64"  # a drafter, by the file of its answers
PLAIN, SYNTHETIC, THREADS = "plain pipeline", f"synthetic, P = {RATE}", "one process, two threads"
ROUND = "pipeline,width={},children={}"
WAYS: dict[str, dict[str, Any]] = {  # the options of each, beside those that all have
    THREADS: {"threads": 2},
    f"{THREADS}, n-gram": {"threads": 2, "drafter": "ngram"},
    PLAIN: {"pipeline": True},
    SYNTHETIC: {
        "pipeline": True,
        "drafter": f"synthetic,answers={{}},accept={RATE},depth=64",
        "round": ROUND.format(1, 1),
    },
    "n-gram": {"pipeline": True, "drafter": "ngram", "round": ROUND.format(2, 2)},
    "suffix": {"pipeline": True, "drafter": "suffix", "round": ROUND.format(2, 2)},
}


@dataclass(frozen=True, kw_only=True)
class StageRun:
    """One way of decoding."""

    tbt: float  # ms, mean of each prompt
    said: list[list[int]]
    rate: float  # tokens that were in flight when they were said
    bubble: float  # ticks without a token for each one with a token


def ran(ask: PipeFlags, way: str, found: Sequence[Sequence[int]], answers: str) -> StageRun:
    """Answer prompts one after the other, in a fresh process."""
    options = dict(WAYS[way])
    if options.pop("pipeline", False):
        a, b = cores()[:2]
        options["pipeline"] = f"2,cores=<{a},{b}>"
    if "drafter" in options:
        options["drafter"] = options["drafter"].format(answers)
    llm = LLM(ask.model, dtype=ask.dtype, max_sequences=1, kv_memory="1GiB", **options)
    round_: Any = llm.engine.round
    ticks: list[Any] = []
    if hasattr(round_, "tick"):
        watch_ticks(round_, ticks.append)
    tokens = ask.max_new_tokens or 0
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    llm.generate({"prompt_token_ids": [*found[0]]}, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    said, times, verdicts, empty = [], [], [], 0
    for ids in found:
        ticks.clear()
        began = 0.0
        output: Any = None
        for chunk in llm.stream({"prompt_token_ids": [*ids]}, params):
            began = began or time.perf_counter()
            output = chunk.output
        times.append(1e3 * (time.perf_counter() - began) / (tokens - 1))
        said.append([*output.outputs[0].token_ids])
        verdicts += [verdict for tick in ticks for verdict in tick.verdicts]
        counts = [tick.count for tick in ticks]
        empty += counts[next((place for place, count in enumerate(counts) if count), 0) :].count(0)
    hits = sum(verdict.hit for verdict in verdicts)
    return StageRun(
        tbt=fmean(times), said=said, rate=hits / max(1, len(verdicts)), bubble=empty / max(1, len(verdicts))
    )


def _stage(ask: PipeFlags, index: int) -> tuple[Stage, Any]:
    """A stage as a process has it, and the head that belongs to the last one."""
    config = LLMConfig(model=ask.model, dtype=ask.dtype, pipeline=2)
    if index:
        decoder = load_target(config, config.resolve()).decoder
        pool = KVPool(*decoder.cache_shape, 2 * KEYS, decoder.dtype, decoder.device)
        return Stage(decoder, 0, decoder.num_layers, pool.tensors), decoder.read
    layers = config.resolve().shape.num_layers
    start, stop = PipelineConfig(stages=2).bounds(layers)[:2]
    made = service("cpu", {"model": ask.model, "dtype": ask.dtype}, start, stop, 2 * KEYS)
    return made.stage, lambda hidden: hidden


@inference
def _work(ask: PipeFlags, index: int, line: Any) -> None:
    """A stage on its core: passes of one row, for as long as it is told to; answers with the ms of a pass."""
    pin([cores()[index]])
    torch.set_num_threads(1)
    stage, read = _stage(ask, index)
    decoder = stage.decoder
    hidden = torch.ones(1, decoder.config.d_model, dtype=decoder.dtype)
    row = StageRows(0, 0, [0], [TEXT], [KEYS - 1], slice(0, KEYS), KEYS, KEYS - 1)
    read(stage.run(Frame(0, [row], hidden.clone())).hidden)
    line.send(0.0)
    while seconds := line.recv():
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            read(stage.run(Frame(0, [row], hidden.clone())).hidden)
            count += 1
        line.send(1e3 * (time.perf_counter() - began) / count)


def alone_and_both(ask: PipeFlags) -> tuple[list[float], list[float]]:
    """Ms of a pass of each stage, where the other one rests, and where both work."""
    context = multiprocessing.get_context("spawn")
    lines = []
    for index in range(2):
        own, theirs = context.Pipe()
        context.Process(target=_work, args=(ask, index, theirs), daemon=True).start()
        lines.append(own)
    for line in lines:
        line.recv()

    def timed(chosen: Sequence[Any]) -> list[float]:
        for line in chosen:
            line.send(TIMED_S)
        return [line.recv() for line in chosen]

    alone: list[list[float]] = []
    both: list[list[float]] = []
    for _ in range(3):
        alone.append([*timed(lines[:1]), *timed(lines[1:])])
        both.append(timed(lines))
    for line in lines:
        line.send(0.0)
    return [[median(column) for column in zip(*rows, strict=True)] for rows in (alone, both)]  # type: ignore[return-value]


@inference
def layers_ms(ask: PipeFlags, rows: Sequence[int], context: int) -> dict[int, float]:
    """Median ms of all layers without the head, by rows of a tree's level behind so many tokens."""
    decoder = target(ask).decoder
    pool = KVPool(*decoder.cache_shape, context + max(rows), decoder.dtype, decoder.device)
    stage = Stage(decoder, 0, decoder.num_layers, pool.tensors)
    hidden = torch.ones(max(rows), decoder.config.d_model, dtype=decoder.dtype)
    times: dict[int, list[float]] = {count: [] for count in rows}
    for _ in range(WARM_UP + PASSES):
        for count, own in times.items():  # in turn, so that a slow moment hits all alike
            keys = context + count
            level = StageRows(
                *(0, 0, [0] * count, [*range(count)], [context] * count, slice(0, keys), keys, context),
                torch.eye(count, dtype=torch.bool),
                [context] * count,
            )
            began = time.perf_counter()
            stage.run(Frame(0, [level], hidden[:count].clone()))
            own.append(1e3 * (time.perf_counter() - began))
    return {count: median(own[WARM_UP:]) for count, own in times.items()}


@study.figure(tasks="sql", prompts=1)
def figure_9(ask: PipeFlags) -> Iterator[Table | None]:
    """Real time, on an idle machine: what a layer takes by rows of a level."""
    target(ask)
    yield None
    found = layers_ms(ask, ask.few((1, 2, 4, 8, 16, 32, 48, 64, 65, 80, 96, 128, 192, 256)), CONTEXT)
    layers, threads = target(ask).decoder.num_layers, torch.get_num_threads()
    each = {count: ms / layers for count, ms in found.items()}
    panel = Panel(
        title="", x_label="rows", y_label="ms of a layer", series=[Series(label="", x=[*each], y=[*each.values()])]
    )
    yield Table(
        title=f"Time of a layer of {ask.model} by rows",
        head=("rows", "ms of a layer", "times one row's"),
        parts={"": [[str(n), f"{ms:.3f}", f"{ms / each[1]:.2f}"] for n, ms in each.items()]},
        values={"ms": {str(n): ms for n, ms in each.items()}, "threads": threads},
        how=[
            [f"{CONTEXT} tokens in front, {threads} threads, median of {PASSES} passes of all {layers} layers, no head"]
        ],
        plots={".svg": lambda path: figures.lines([panel], path)},
        same=True,
    )


@study.table(times=STRETCHED, tasks="sql", prompts=2, max_new_tokens=64)
def real(ask: PipeFlags) -> Iterator[Table | None]:
    """Real time, on an idle machine: two stages on two cores against the ceiling, the plain pipeline, two threads."""
    if len(cores()) < 2:
        raise CapabilityError("two stages on two cores", "this process may use one core", "give it two")
    tokens = ask.max_new_tokens or 0
    found = prompts(ask, tokens)
    yield None
    alone, both = alone_and_both(ask)
    runs: dict[str, list[StageRun]] = {way: [] for way in WAYS}
    same = True
    with TemporaryDirectory() as folder:
        answers = str(Path(folder) / "answers.jsonl")
        for _ in range(ask.repeats):
            for way, own in runs.items():
                own.append(apart(ran, ask, way, found, answers))
                write_answers(answers, [*zip(found, runs[THREADS][0].said, strict=True)])
                same &= own[-1].said == runs[THREADS][0].said
    ms = {way: median(run.tbt for run in own) for way, own in runs.items()}
    rate = runs[SYNTHETIC][0].rate
    ratio = fmean(alone) / max(both)
    ceiling = 2 / (2 - rate) * ratio
    times, times_alone = ms[PLAIN] / ms[SYNTHETIC], sum(alone) / ms[SYNTHETIC]
    rows = []
    for way, own in runs.items():
        shown = (f"{own[0].rate:.3f}", f"{own[0].bubble:.2f}") if "pipeline" in WAYS[way] else ("", "")
        rows.append([way, *shown, f"{ms[way]:.1f}", f"{ms[PLAIN] / ms[way]:.2f}"])
    lost = ms[SYNTHETIC] / (1 + runs[SYNTHETIC][0].bubble) - max(both)
    yield Table(
        title="Two stages on two cores",
        head=("", "in flight when said", "bubbles a token", "TBT ms", "times the plain pipeline"),
        parts={"": rows},
        values={
            "alone_ms": alone,
            "both_ms": both,
            "ceiling": ceiling,
            "times_plain": times,
            "of_ceiling": times / ceiling,
            "of_ceiling_by_stages_alone": times_alone / ceiling,
            "tick_lost_ms": lost,
            "ms": ms,
            "rates": {way: own[0].rate for way, own in runs.items()},
        },
        remarks=[
            f"a pass of a stage takes {alone[0]:.2f} and {alone[1]:.2f} ms alone, "
            f"{both[0]:.2f} and {both[1]:.2f} at once",
            f"ceiling 2 / (2 - P) x (alone / at once) = {ceiling:.3f}; "
            f"reached {times:.3f}, {times / ceiling:.1%} of it "
            f"({LEAST_OF_CEILING:.0%} and {LEAST_OVER_PLAIN} times the plain pipeline are wanted)",
            "against both stages' times alone, without what a plain pipeline's ticks take beside them: "
            f"{times_alone:.3f} times, {times_alone / ceiling:.1%} of the ceiling",
            f"a tick takes {lost:.2f} ms more than the slower stage where both work",
        ],
        how=[[f"{len(found)} prompts, {tokens} tokens each, {ask.repeats} times; a synthetic source predicts nothing"]],
        same=same,
    )
