"""Who is asked what, and in which order.

    for each sweep point (temperature, context, batch, new tokens)
        warm up every method, uncounted
        for each group number, for each workload, for each repeat
            the methods one right after the other, each time another one first

So what is compared was measured next to each other, all workloads advance together (a run that is cut short has
some of each), and nobody always runs first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from ..core.errors import ConfigError
from ..core.sampling import SamplingParams
from ..llm import LLM
from . import encoding, workloads
from .config import BenchConfig, RunWatcher
from .encoding import Encoded
from .journal import Journal
from .measure import Builder, Group, Limits
from .records import Cell, Method, PromptIds, Trial
from .workloads import Workload

RANDOM = "random"  # the workload of a model without a tokenizer
SPARE_TOKENS = 64  # slots a sequence beside prompt and answer: drafts, rounding to blocks, a block of headroom
PREPARE_TOGETHER = 8  # conversations whose earlier turns are answered at once


def cells_of(config: BenchConfig, loaded: Sequence[Workload]) -> list[Cell]:
    """Every cell; those of one sweep point are next to each other."""
    points = product(config.temperatures, config.top_ks, config.contexts, config.max_new_tokens, config.batches)
    return [
        Cell(
            workload=workload.name,
            batch=batch,
            temperature=temperature,
            top_k=top_k,
            context=context,
            max_new_tokens=new or workload.max_new_tokens,
            ignore_eos=config.ignores_eos,
        )
        for temperature, top_k, context, new, batch in points
        for workload in loaded
    ]


def groups_of(cell: Cell, prompts: Sequence[PromptIds], seed: int) -> list[Group]:
    """Batches of prompts, in their order. The last one is filled up with prompts from the front.

    Raises:
        ConfigError: fewer prompts than the batch has room for.
    """
    if len(prompts) < cell.batch:
        raise ConfigError(
            f"batch {cell.batch} of {cell.workload}",
            f"it has {len(prompts)} prompts here, and no prompt is in a batch twice",
            f"ask for {cell.batch} prompts or more, or for smaller batches",
        )
    count = -(-len(prompts) // cell.batch)
    ring = [*prompts, *prompts]
    batches = [tuple(ring[i * cell.batch : (i + 1) * cell.batch]) for i in range(count)]
    return [Group(cell=cell, index=i, prompts=batch, seed=seed) for i, batch in enumerate(batches)]


def interleaved(groups: Mapping[Cell, Sequence[Group]], repeats: int) -> list[list[tuple[Group, int]]]:
    """For each sweep point its (group, repeat) pairs, in the order in which they are run."""
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


def rotated(methods: Sequence[Method], turn: int) -> list[Method]:
    """A B C, B C A, C A B, ..: nobody always runs first."""
    start = turn % len(methods) if methods else 0
    return [*methods[start:], *methods[:start]]


# -- prompts


def random_workload(config: BenchConfig) -> Workload:
    """Stands for the prompts of a model without a tokenizer."""
    prompts = tuple(
        workloads.Prompt(id=f"{RANDOM}-{i}", category=RANDOM, turns=(f"{config.prompt_tokens} random ids",))
        for i in range(config.prompts)
    )
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


@dataclass(kw_only=True)
class Prepared:
    """What stands before the first trial."""

    groups: dict[Cell, list[Group]]
    notes: list[str] = field(default_factory=list)

    def request(self, trial: Trial, index: int) -> tuple[tuple[int, ...], SamplingParams]:
        """Ids and parameters of one sequence of a trial."""
        group = self.groups[trial.cell][trial.group]
        prompt = group.prompts[index]
        return prompt.ids, group.params(prompt)

    def limits(self) -> Limits:
        """Room for the largest of everything."""
        every = [group for of_cell in self.groups.values() for group in of_cell]
        lengths = [[len(p.ids) + g.cell.max_new_tokens for p in g.prompts] for g in every]
        return Limits(
            max_sequences=max(map(len, lengths)),
            max_model_len=max(map(max, lengths)),
            pool_tokens=max(sum(lengths) + len(lengths) * SPARE_TOKENS for lengths in lengths),
        )


def prepare(
    config: BenchConfig, builder: Builder, loaded: Sequence[Workload], journal: Journal, watcher: RunWatcher
) -> Prepared:
    """Ids of all prompts. Later turns of conversations follow on answers of plain, greedy decoding.

    Raises:
        ConfigError: a prompt that does not fit, a batch that cannot be filled.
    """
    cells = cells_of(config, loaded)
    known = {workload.name: workload for workload in loaded}
    prompts: dict[tuple[str, int | None], list[PromptIds]] = {}
    prepared = Prepared(groups={})
    asker = _Asker(config, builder, journal, watcher)
    for cell in cells:
        key = (cell.workload, cell.context)
        if key not in prompts:
            longest = max(c.max_new_tokens for c in cells if (c.workload, c.context) == key)
            prompts[key], notes = asker.ids(known[cell.workload], cell.context, longest)
            prepared.notes += notes
        prepared.groups[cell] = groups_of(cell, prompts[key], config.seed)
        spare = -len(prompts[key]) % cell.batch
        if spare:
            prepared.notes.append(
                f"{cell.workload}, batch {cell.batch}: {spare} of {len(prompts[key])} prompts are in two groups, "
                "to fill the last one"
            )
    return prepared


class _Asker:
    """Makes prompts into ids; answers the earlier turns of conversations."""

    def __init__(self, config: BenchConfig, builder: Builder, journal: Journal, watcher: RunWatcher) -> None:
        self._config, self._builder = config, builder
        self._journal, self._watcher = journal, watcher
        self._plain = next(m for m in config.methods if m.plain and m.own)
        self._target = builder.llm(self._plain)

    def ids(self, workload: Workload, context: int | None, max_new_tokens: int) -> tuple[list[PromptIds], list[str]]:
        """All prompts of a workload, first turns before later ones, and what must be said about them."""
        shape, config = self._target.decoder.config, self._config
        if config.random:
            length = context or config.prompt_tokens
            return encoding.random_prompts(len(workload.prompts), length, shape.vocab_size, config.seed), []
        encoded = Encoded(
            workload,
            self._target.tokenizer,
            context=context,
            max_model_len=shape.max_position,
            max_new_tokens=max_new_tokens,
        )
        found = list(encoded.prompts)
        turns = max(len(p.turns) for p in workload.prompts)
        if turns > 1:
            self._watcher.stage(f"answering the earlier turns of {workload.name}'s conversations")
            room = (shape.max_position + SPARE_TOKENS) * PREPARE_TOGETHER
            limits = Limits(max_sequences=PREPARE_TOGETHER, max_model_len=shape.max_position, pool_tokens=room)
            llm = self._builder.llm(self._plain, limits)
            latest = {p.id: list(ids.ids) for p, ids in zip(workload.prompts, encoded.prompts, strict=True)}
            for turn in range(1, turns):
                found += self._turn(llm, workload, encoded, turn, latest, max_new_tokens)
        return found, encoded.notes()

    def _turn(
        self,
        llm: LLM,
        workload: Workload,
        encoded: Encoded,
        turn: int,
        latest: dict[str, list[int]],
        max_new_tokens: int,
    ) -> list[PromptIds]:
        """Turn number ``turn`` (from 1) of the conversations that have one, each on the answers before it.

        Args:
            latest: by conversation, the ids of its latest prompt; brought up to date.
        """
        answers = self._journal.answers
        going_on = [p for p in workload.prompts if len(p.turns) > turn]
        names = {p.id: f"{workload.name}/{encoded.context}/{p.id}" for p in going_on}
        missing = [p.id for p in going_on if len(answers.get(names[p.id], [])) < turn]
        params = SamplingParams(temperature=0, max_tokens=max_new_tokens)
        going = [{"prompt_token_ids": latest[name]} for name in missing]
        outputs = llm.generate(going, params, application=self._plain.application)
        for name, output in zip(missing, outputs, strict=True):
            self._journal.add_answer(names[name], output.outputs[0].token_ids)
        found = []
        for prompt in going_on:
            said = [llm.tokenizer.decode(ids, skip_special_tokens=True) for ids in answers[names[prompt.id]][:turn]]
            found.append(encoded.next_turn(prompt, turn, said))
            latest[prompt.id] = list(found[-1].ids)
        return found
