"""Who is asked what, and in which order.

    for each point (temperature, top-k, context, batch)
        warm up every method, uncounted
        for each group number, for each workload, for each repeat
            the methods one right after the other, each time another one first

So what is compared was measured next to each other, all workloads advance together (a run that is cut short has
some of each), and nobody always runs first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

from ..core.errors import ConfigError
from ..core.sampling import SamplingParams
from ..llm import LLM
from .config import PROMPT_TOKENS, BenchConfig
from .encoding import Encoded, random_prompts
from .measure import Group, Limits
from .records import Cell, PromptIds
from .workloads import Prompt, Workload

RANDOM = "random"  # the workload of a model without a tokenizer
SPARE_TOKENS = 64  # slots a sequence beside prompt and answer: drafts, rounding to blocks, a block of headroom
PREPARE_TOGETHER = 8  # conversations whose earlier turns are answered at once
Encode = Callable[..., Encoded]  # of workload, tokenizer, context, max_model_len and max_new_tokens


def cells_of(config: BenchConfig, loaded: Sequence[Workload]) -> list[Cell]:
    """Every cell; those of one point are next to each other.

    Raises:
        ConfigError: a batch that the prompts of a workload cannot fill.
    """
    points = product(config.temperatures, config.top_ks, config.contexts, config.max_new_tokens, config.batches)
    found = []
    for temperature, top_k, context, new, batch in points:
        for workload in loaded:
            count = sum(len(p.turns) for p in workload.prompts)
            if count < batch:
                raise ConfigError(
                    f"batch {batch} of {workload.name}",
                    f"{count} prompts were asked for, of {workload.total} that there are",
                    "raise --prompts, or lower the batch",
                )
            cell = Cell(
                workload=workload.name,
                batch=batch,
                temperature=temperature,
                top_k=top_k,
                context=context,
                max_new_tokens=new or workload.max_new_tokens,
                ignore_eos=config.ignores_eos,
            )
            found.append(cell)
    return found


def groups_of(cell: Cell, prompts: Sequence[PromptIds], seed: int) -> list[Group]:
    """Batches of prompts, in their order. The last one is filled up with prompts from the front."""
    count = -(-len(prompts) // cell.batch)
    ring = [*prompts, *prompts]
    batches = [tuple(ring[i * cell.batch : (i + 1) * cell.batch]) for i in range(count)]
    return [Group(cell=cell, index=i, prompts=batch, seed=seed) for i, batch in enumerate(batches)]


def interleaved(groups: Mapping[Cell, Sequence[Group]], repeats: int) -> list[list[tuple[Group, int]]]:
    """For each point its (group, repeat) pairs, in the order in which they are run."""
    points: dict[tuple[Any, ...], list[Sequence[Group]]] = {}
    for cell, of_cell in groups.items():
        point = cell.temperature, cell.top_k, cell.context, cell.batch  # not new tokens: they may be a workload's own
        points.setdefault(point, []).append(of_cell)
    return [
        [
            (of_cell[index], repeat)
            for index in range(max(map(len, of_point)))
            for of_cell in of_point
            if index < len(of_cell)
            for repeat in range(repeats)
        ]
        for of_point in points.values()
    ]


def limits_of(groups: Mapping[Cell, Sequence[Group]]) -> Limits:
    """Room for the largest of everything."""
    lengths = [[len(p.ids) + g.cell.max_new_tokens for p in g.prompts] for of in groups.values() for g in of]
    return Limits(
        max_sequences=max(map(len, lengths)),
        max_model_len=max(map(max, lengths)),
        pool_tokens=max(sum(each) + len(each) * SPARE_TOKENS for each in lengths),
    )


# -- prompts


def random_workload(config: BenchConfig) -> Workload:
    """Stands for the prompts of a model without a tokenizer."""
    text = f"{config.prompt_tokens or PROMPT_TOKENS} random ids"
    prompts = tuple(Prompt(id=f"{RANDOM}-{i}", category=RANDOM, turns=(text,)) for i in range(config.prompts))
    return Workload(
        name=RANDOM,
        title="Random prompts",
        description="token ids drawn from a seed",
        source="this program",
        licence="none needed",
        origin="drawn",
        prompts=prompts,
        total=len(prompts),
        chat=False,
        max_new_tokens=128,
    )


def prompt_ids(
    config: BenchConfig,
    workload: Workload,
    engine: Callable[[Limits | None], LLM],
    context: int | None,
    max_new_tokens: int,
    application: str | None = None,
    encode: Encode = lambda workload, tokenizer, context, **lengths: Encoded(workload, tokenizer, **lengths),
) -> tuple[list[PromptIds], list[str]]:
    """All prompts of a workload, first turns before later ones, and what must be said about them.

    Later turns follow on answers of plain, greedy decoding.

    Args:
        config, workload: what is asked.
        engine: plain decoding, with room for so much.
        context: tokens that ``encode`` brings every prompt to; None: prompts as they are.
        max_new_tokens: of the longest answer.
        application: whose adapters give those answers.
        encode: makes ids of the prompts.

    Raises:
        ConfigError: a prompt that does not fit.
    """
    shape, tokenizer = (llm := engine(None)).decoder.config, llm.tokenizer
    if config.random:
        length = context or config.prompt_tokens or PROMPT_TOKENS
        return random_prompts(len(workload.prompts), length, shape.vocab_size, config.seed), []
    lengths = {"max_model_len": shape.max_position, "max_new_tokens": max_new_tokens}
    encoded = encode(workload, tokenizer, context, **lengths)
    found = list(encoded.prompts)
    latest = {p.id: list(ids.ids) for p, ids in zip(workload.prompts, encoded.prompts, strict=True)}
    answers: dict[str, list[str]] = {name: [] for name in latest}
    turn, room = 1, (shape.max_position + SPARE_TOKENS) * PREPARE_TOGETHER
    limits = Limits(max_sequences=PREPARE_TOGETHER, max_model_len=shape.max_position, pool_tokens=room)
    while going_on := [p for p in workload.prompts if len(p.turns) > turn]:
        llm = engine(limits) if turn == 1 else llm
        params = SamplingParams(temperature=0, max_tokens=max_new_tokens)
        asked = [{"prompt_token_ids": latest[p.id]} for p in going_on]
        for prompt, output in zip(going_on, llm.generate(asked, params, application=application), strict=True):
            ids = output.outputs[0].token_ids
            answers[prompt.id].append(tokenizer.decode(ids, skip_special_tokens=True))
            found.append(encoded.next_turn(prompt, turn, answers[prompt.id]))
            latest[prompt.id] = list(found[-1].ids)
        turn += 1
    return found, encoded.notes()
