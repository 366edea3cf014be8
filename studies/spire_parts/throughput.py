"""Throughput by batch and context, predicted and measured; and the draft budget from the planner's table of costs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise, zip_longest
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

from kit import figures
from kit.figures import Panel, Series
from kit.filled import Filled
from kit.random_model import materialised
from kit.scores import workload_of
from kit.study import Table

from paceline.api.llm import LLM
from paceline.bench import machine, workloads
from paceline.bench.measure import Builder
from paceline.bench.passes import time_passes
from paceline.bench.records import PLAIN, Method
from paceline.core.errors import ConfigError
from paceline.core.sampling import SamplingParams
from paceline.engine.costs import CostTable
from paceline.model.hot import load_hot
from paceline.papers.spire.model import read_shape as read_draft
from paceline.plan.models import read_shape, shape_of
from paceline.plan.throughput import ServedModel
from paceline.weights.source import resolve_folder
from spire_parts.common import (
    CONTEXTS,
    DEPTH,
    DOMAINS,
    MAGICDEC,
    SPIRE,
    SpireFlags,
    contestants,
    folder_of,
    method_of,
    study,
    verdict,
)
from spire_parts.judged import HEAD, Cells, JudgedCell
from spire_parts.law import nodes_that_pay
from spire_parts.lent import LentPrompts, computed, made_up

from .fitted_law import MeasuredLaw, measure_law

BATCHES = (1, 2, 4, 8, 16, 32)  # sequences of one row each
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # of one sequence
CONTEXT = 128  # committed tokens of each
LONG = 3968  # tokens of a context for targets with 4,096 positions
STEPS = 6  # timed steps of a cell: most answers are longer
SMALL_TURNS = 4  # over the batch: turns of small batches in a repeat
VIEW = 65  # keys of a SPIRe draft
MOST_ROWS = 8192  # of a pass over the ends of all prompts
ACCEPTS = (0.2, 0.4, 0.6, 0.8, 0.9)
SMALL: dict[str, Any] = {
    "repeats": 1,
    "fitted": [(batch, 16, rows, part) for batch, rows in ((1, 1), (1, 4), (1, 8), (2, 1)) for part in (False, True)],
    "held_out": [(2, 32, 2, False)],
}


def network_of(llm: LLM) -> ServedModel:
    """The target's sizes, as it is stored."""
    decoder = llm.decoder
    number = float(decoder.dtype.itemsize)
    return ServedModel(shape=shape_of(decoder.config), weight_bytes=1.0 if decoder.quant else number, kv_bytes=number)


def draft_of(ask: SpireFlags, name: str, target: ServedModel) -> ServedModel:
    """What a draft's passes are of."""
    if name == MAGICDEC:
        return replace(target, keys=ask.window + 1)
    if name == SPIRE:
        folder = resolve_folder(folder_of(ask, name))
        shape, hot = target.shape.last_layers(read_draft(folder).layers), load_hot(folder, target.shape.vocab_size)
        return replace(target, shape=shape if hot is None else replace(shape, vocab_size=len(hot)), keys=VIEW)
    return replace(target, shape=read_shape(resolve_folder(folder_of(ask, name))))


def prompts_of(ask: SpireFlags, llm: LLM, count: int, context: int, room: int) -> list[list[int]]:
    """Prompts of the tasks in turn, filled with book text to one context; random ids where text means nothing."""
    if ask.model.startswith("random:"):
        draw, vocab = random.Random(f"{ask.seed} {context}"), llm.decoder.config.vocab_size
        return [draw.choices(range(8, vocab), k=context) for _ in range(count)]
    found = []
    for task in ask.names:
        each = -(-count // len(ask.names))
        workload = workloads.load(workload_of(task), folder=ask.data, limit=each, seed=ask.seed)
        longest = {"max_model_len": llm.decoder.config.max_position, "max_new_tokens": room}
        made = Filled(workload, llm.tokenizer, context=context, **longest)
        found.append([list(prompt.ids) for prompt in made.prompts])
    mixed = [ids for turn in zip_longest(*found) for ids in turn if ids is not None]
    if len(mixed) < count:
        wrong = f"there are {len(mixed)} prompts of {', '.join(ask.names)}"
        raise ConfigError(f"a batch of {count}", wrong, "give --data with more, or more --tasks")
    return mixed[:count]


def decode_speed(
    llm: LLM, prompts: Sequence[Sequence[int]], steps: int, seed: int, temperature: float
) -> tuple[list[float], float]:
    """Seconds of each step in which all of a batch are decoding, and tokens of a sequence a step."""
    engine, batch, room = llm.engine, len(prompts), room_of(steps)
    given: dict[str, Any] = {"temperature": temperature, "max_tokens": room, "ignore_eos": True}
    params = [SamplingParams(seed=seed + i, **given) for i in range(batch)]
    names = [engine.submit(list(ids), one) for ids, one in zip(prompts, params, strict=True)]
    try:
        running = [engine.live[name].sequences[0] for name in names]
        while any(len(sequence.output_ids) < 2 for sequence in running):
            engine.step()
        before, times = sum(len(sequence.output_ids) for sequence in running), [perf_counter()]
        for _ in range(steps):
            engine.step()
            times.append(perf_counter())
        made = sum(len(sequence.output_ids) for sequence in running) - before
    finally:
        for name in list(engine.live):
            engine.abort(name)
    return [end - start for start, end in pairwise(times)], made / (batch * steps)


def room_of(steps: int) -> int:
    """Tokens that a sequence may come to in so many steps, with those before they are timed."""
    return (DEPTH + 1) * (steps + 4)


def prepare(ask: SpireFlags, model: str, contexts: Sequence[int], steps: int) -> dict[int, LentPrompts]:
    """By context the prompts of the largest batch, computed once for all methods."""
    found, count = dict[int, LentPrompts](), texts_at_once(ask)
    for context in contexts:
        llm = Builder(model, ask.device, ask.threads).llm(
            _at_once(Method(name=PLAIN), ask.dtype), _lengths(count, context, 0)
        )
        found[context] = lent_prompts(ask, llm, context, room_of(steps))
    return found


def texts_at_once(ask: SpireFlags) -> int:
    """Prompts that are computed."""
    most = max(ask.numbers("batches"))
    return min(most, ask.texts or most)


def lent_prompts(ask: SpireFlags, llm: LLM, context: int, room: int) -> LentPrompts:
    """Prompts of one context, computed by plain decoding."""
    prompts = prompts_of(ask, llm, texts_at_once(ask), context, room)
    return (made_up if ask.model.startswith("random:") else computed)(llm, prompts)


def measured_cells(ask: SpireFlags, model: str, known: Mapping[int, LentPrompts], steps: int) -> list[JudgedCell]:
    """Every method in every cell; a K/V pool that the largest cell fits into, so that nothing is preempted.

    A method goes through all cells once a repeat, so that a slow moment is in one turn of a cell. Small batches take
    more turns, each with other prompts: their steps are short, and tau is a mean over prompts.
    """
    methods = [Method(name=PLAIN), *(method_of(ask, name, verifier="sample_and_match") for name in contestants(ask))]
    builder, found, room = Builder(model, ask.device, ask.threads), [], room_of(steps)
    places = [(batch, context) for context in known for batch in ask.numbers("batches")]
    for method in methods:
        llm = builder.llm(_at_once(method, ask.dtype), _lengths(max(ask.numbers("batches")), max(known), room))
        taken: dict[tuple[int, int], list[tuple[list[float], float]]] = {place: [] for place in places}
        for batch, context in places * ask.repeats:
            for _ in range(max(1, SMALL_TURNS // batch)):
                turn = len(taken[batch, context])
                own = known[context].part(turn, batch)
                own.lend(llm, room)
                seed = ask.seed + 1000 * turn
                taken[batch, context].append(decode_speed(llm, own.prompts, steps, seed, ask.temperature))
        for (batch, context), turns in taken.items():
            seconds, tau = median(one for steps_s, _ in turns for one in steps_s), mean(tokens for _, tokens in turns)
            found.append(JudgedCell(method=method.name, batch=batch, context=context, seconds=seconds, tau=tau))
    return sorted(found, key=lambda one: (one.batch, one.context))


def _lengths(batch: int, context: int, room: int) -> list[list[int]]:
    return [[context + room + DEPTH + 1] * batch]


def _at_once(method: Method, dtype: str) -> Method:
    """Its ends of prompts are computed in one pass, so that all of a batch begin to decode together."""
    return replace(method, dtype=dtype, settings={**method.settings, "max_batch_rows": MOST_ROWS})


def predicted_cells(
    found: Sequence[JudgedCell], law: MeasuredLaw, networks: Mapping[str, ServedModel]
) -> list[JudgedCell]:
    """With what the law says of a step: its passes, and the engine's own work, which two plain cells tell."""
    target, host, made = networks[PLAIN], host_work(found, law, networks[PLAIN]), []
    fitted = {one.place for one in ends_of(found)}
    for one in found:
        batch, context, plain = one.batch, one.context, one.method == PLAIN
        seconds = host[0] + host[1] * batch + law.law.seconds(target, batch, context, 1 if plain else 1 + DEPTH)
        if not plain:  # all passes of a draft are one call
            seconds += DEPTH * (law.law.seconds(networks[one.method], batch, context) - law.law.host)
        made.append(replace(one, predicted=max(seconds, 1e-9), fitted=plain and one.place in fitted))
    return made


def ends_of(found: Sequence[JudgedCell]) -> list[JudgedCell]:
    """Plain decoding at the shortest context, with the fewest and the most sequences."""
    plain = [one for one in found if one.method == PLAIN]
    shortest = min(one.context for one in plain)
    ordered = sorted((one for one in plain if one.context == shortest), key=lambda one: one.batch)
    return [ordered[0], ordered[-1]] if len(ordered) > 1 else ordered


def host_work(found: Sequence[JudgedCell], law: MeasuredLaw, target: ServedModel) -> tuple[float, float]:
    """Seconds of a step beside its passes, and those that each sequence adds."""
    ends = ends_of(found)
    beside = [one.seconds - law.law.seconds(target, one.batch, one.context) for one in ends]
    if len(ends) == 1:
        return beside[0], 0.0
    slope = (beside[1] - beside[0]) / (ends[1].batch - ends[0].batch)
    return beside[0] - slope * ends[0].batch, slope


def contexts_of(llm: LLM, steps: int) -> list[int]:
    """Those that the target has positions for."""
    most = llm.decoder.config.max_position - room_of(steps) - DEPTH - 1
    return [min(context, most) for context in (*CONTEXTS, LONG) if context <= llm.decoder.config.max_position] or [most]


@study.figure(
    needs=("here",),
    takes=("spire", "vanilla", "draft", "temperature", "window", "batches", "contexts", "texts"),
    tasks=DOMAINS,
    repeats=3,
)
def cells(ask: SpireFlags) -> Iterator[Table | None]:
    """Throughput by batch and context of plain decoding and of every draft: measured, and by this machine's law."""
    steps = 2 if ask.quick else STEPS
    if not ask.numbers("batches"):
        raise ConfigError("--batches", "there is none", "name one at least")
    wanted = ask.numbers("contexts")
    yield None
    with materialised(ask.model) as folder:
        llm = LLM(folder, max_sequences=1, **ask.llm)
        target = network_of(llm)
        most = llm.decoder.config.max_position - room_of(steps) - DEPTH - 1
        if max(wanted, default=1) > most:
            wrong = f"{llm.decoder.config.max_position} positions leave {most} beside the answers"
            raise ConfigError(f"--contexts {ask.contexts}", wrong, f"give {most} or less")
        known = prepare(ask, folder, wanted or ask.few(contexts_of(llm, steps)), steps)
        law = measure_law(llm, target, **(SMALL if ask.quick else {}))
        measured = measured_cells(ask, folder, known, steps)
    networks = {PLAIN: target, **{name: draft_of(ask, name, target) for name in contestants(ask)}}
    found = Cells(predicted_cells(measured, law, networks))
    off = median(abs(one["error"]) for one in law.held_out)
    held = f"the law's median error of passes that it was not fitted to: {off:.0%}"
    yield Table(
        title=f"Throughput of decoding steps by batch and context, T={ask.temperature:g}",
        head=HEAD,
        parts={"": found.rows()},
        values={
            "cells": [asdict(one) for one in found.all],
            "law": asdict(law.law),
            "law_error": off,
            "machine": machine.describe(ask.device),
        },
        remarks=[*found.remarks(), held],
        plots={".svg": lambda path: _draw(found, path)},
    )


def _draw(found: Cells, path: Path) -> Path:
    panels = []
    for context in dict.fromkeys(one.context for one in found.all):
        series = []
        for name in dict.fromkeys(one.method for one in found.drafts):
            own = [one for one in found.drafts if (one.method, one.context) == (name, context)]
            series.append(Series(label=name, x=[one.batch for one in own], y=[found.times(one) for one in own]))
        axes: dict[str, Any] = {"x_label": "batch", "y_label": "times plain", "log_x": True, "line_at": 1.0}
        panels.append(Panel(title=f"Context {context:,}", series=series, y_from=0.0, **axes))
    return figures.lines(panels, path)


def cost_table(seconds: Callable[[int, float, int], float], max_position: int) -> CostTable:
    """Return the costs of passes.

    Args:
        seconds: what a pass is predicted to take, by sequences, tokens that each has, and rows of each.
        max_position: of the model.
    """
    context = max(0, min(CONTEXT, max_position - ROWS[-1]))
    chain = [(rows, 1e3 * seconds(1, context, rows)) for rows in ROWS]
    return CostTable(chain, [(batch, 1e3 * seconds(batch, context, 1)) for batch in (*BATCHES, 64)])


@study.table(needs=("here",), repeats=9)
def budgets(ask: SpireFlags) -> Iterator[Table | None]:
    """Drafted nodes that pay: by a calibrated table of costs, and by the planner's, which a law of the passes gives."""
    yield None
    llm = LLM(ask.model, max_sequences=1, **ask.llm)
    target, room = network_of(llm), llm.decoder.config.max_position
    law = measure_law(llm, target, **(SMALL if ask.quick else {"repeats": ask.repeats}))
    sizes, batches = ((1, 2, 4), (1, 2)) if ask.quick else ([r for r in ROWS if r < room], BATCHES)
    cells = [(1, 128, r, None) for r in sizes] + [(b, 128, 1, None) for b in batches]
    timed = time_passes(llm.decoder, cells, ask.repeats)
    chain = [(r, median(timed[1, 128, r, None])) for r in sizes]
    calibrated = CostTable(chain, [(b, median(timed[b, 128, 1, None])) for b in batches])
    planned = cost_table(lambda batch, context, rows: law.law.seconds(target, batch, context, rows), room)
    rows, apart = [], []
    for batch in ask.few((1, 4, 16)):
        for accept in ACCEPTS:
            nodes = [nodes_that_pay(table, accept, batch) for table in (calibrated, planned)]
            apart.append(abs(nodes[0] - nodes[1]))
            rows.append([str(batch), f"{accept:.1f}", *map(str, nodes)])
    yield Table(
        title="Drafted nodes that pay, by table of costs",
        head=("batch", "a token's chance", "calibrated", "planner's"),
        parts={"": rows},
        values={
            "nodes": rows,
            "calibrated": calibrated.chain,
            "planned": planned.chain,
            "law": asdict(law.law),
            "law_errors": [one["error"] for one in law.held_out],
            "machine": machine.describe(ask.device),
        },
        remarks=[verdict(f"at most {max(apart)} nodes apart, 1 wanted", max(apart) <= 1)],
    )
