"""One interleaved run: every method in turn on the same prompts, so that a slow moment hits all alike.

    for each sweep point (temperature, context, batch, new tokens)
        warm up every method, uncounted
        for each group number, for each workload, for each repeat
            the methods one right after the other, each time another one first

So what is compared was measured next to each other, all workloads advance together (a run that is cut short has
some of each), and nobody always runs first. Trials do not see each other's text: prefix caches and drafters' memories
are emptied before each. What a draft budget has learned of costs and acceptance stays, as in an engine that has run
for a while.
"""

from __future__ import annotations

import gc
import importlib.metadata
import logging
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch

from .. import __version__, zoo
from ..core.errors import ConfigError
from ..core.sampling import SamplingParams
from ..llm import LLM
from ..target.applications import identity
from ..target.loader import resolve_folder
from . import lossless, machine, workloads
from .journal import NAME as JOURNAL_NAME
from .journal import Journal, holds_trials
from .lossless import Asked
from .measure import Builder, EngineRunner, Group, Limits, model_facts
from .methods import OWN, drafter_config, is_plain, records_answers
from .models import materialised
from .peers import PEERS, Peer, PeerError
from .peers import available as peer_available
from .records import PLAIN, Cell, Method, PromptIds, Report, Trial
from .report import JSON_NAME, load_report, write_all
from .workloads import Encoded, Workload

log = logging.getLogger(__name__)

RANDOM = "random"  # the workload of a model without a tokenizer
WARM_UP_TOKENS = 16
SPARE_TOKENS = 64  # slots a sequence beside prompt and answer: drafts, rounding to blocks, a block of headroom
PREPARE_TOGETHER = 8  # conversations whose earlier turns are answered at once

# Settings that take several values, and what a user calls them.
NAMES = {
    "batches": "batch",
    "temperatures": "temperature",
    "top_ks": "top_k",
    "contexts": "context",
    "max_new_tokens": "max_new_tokens",
}


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What to measure."""

    model: str
    methods: tuple[Method, ...]  # swept ones included; plain decoding among them
    workloads: tuple[str, ...] = ()  # names or paths; empty: all that come with the package
    data: Path | None = None  # folder of the workloads that do not
    prompts: int = 10  # of each workload
    batches: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    top_ks: tuple[int, ...] = (0,)  # of sampling; 0: all tokens
    contexts: tuple[int | None, ...] = (None,)
    max_new_tokens: tuple[int | None, ...] = (None,)  # None: the workload's own
    prompt_tokens: int = 64  # of a random prompt
    repeats: int = 3
    seed: int = 0
    device: str = "cpu"
    threads: int | None = None
    ignore_eos: bool | None = None  # None: where peers or a random model run, so that all give the same count
    check: bool = True  # compare ids with plain decoding's
    time_limit_s: float | None = None  # no trial is begun after that long
    title: str = ""
    applications: Mapping[str, str] = field(default_factory=dict)  # folders of the trained sets that methods name

    def __post_init__(self) -> None:
        for name in ("prompts", "repeats", "prompt_tokens"):
            _at_least_one(name, getattr(self, name))
        for name in ("batches", "contexts", "max_new_tokens"):
            for value in getattr(self, name):
                if value is not None:
                    _at_least_one(NAMES[name], value)
        for value in self.temperatures:
            SamplingParams(temperature=value)
        for value in self.top_ks:
            SamplingParams(top_k=value)
        for name in NAMES:
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"{NAMES[name]}={values}", "a value is there twice, or none is", "give each once")
        if not self.methods:
            raise ConfigError("no method", "nothing would be measured", "name one with --method")
        if self.random and self.workloads:
            raise ConfigError(
                f"workload {self.workloads[0]} with model {self.model}",
                "a random model has no tokenizer, so its prompts are random ids",
                "leave the workload out",
            )
        unknown = next((m for m in self.methods if m.application and m.application not in self.applications), None)
        if unknown is not None:
            raise ConfigError(
                f"method {unknown.name} of application {unknown.application!r}",
                "no folder is given for it",
                f"add --application {unknown.application}=FOLDER",
            )
        for name in self.workloads:
            if self.workloads.count(name) > 1:
                raise ConfigError(f"workload {name}", "it is named twice", "name it once")

    @property
    def random(self) -> bool:
        """Whether the model is one of random weights."""
        return self.model.startswith("random:")

    @property
    def ignores_eos(self) -> bool:
        """Whether answers go on to their full length."""
        chosen = self.ignore_eos
        return self.random or any(m.engine != OWN for m in self.methods) if chosen is None else chosen


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name}={value}", "nothing would be measured", "give 1 or more")


class Watcher(Protocol):
    """Who is told how far a run is."""

    def stage(self, text: str) -> None:
        """A new part of the run begins."""
        ...

    def trial(self, done: int, total: int, group: Group, method: Method) -> None:
        """A trial is about to begin; ``done`` of ``total`` are behind."""
        ...


class Silent:
    """Tells nobody."""

    def stage(self, text: str) -> None:
        """Nothing."""

    def trial(self, done: int, total: int, group: Group, method: Method) -> None:
        """Nothing."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run came to."""

    report: Report
    files: tuple[Path, ...] = ()
    interrupted: bool = False


class Runner(Protocol):
    """A method that can be measured."""

    method: Method

    def warm_up(self, group: Group, max_new_tokens: int) -> None:
        """Run a group without counting it."""
        ...

    def run(self, group: Group, repeat: int) -> Trial:
        """One trial."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...


# -- the order of things


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


def point_of(cell: Cell) -> tuple[Any, ...]:
    """What cells of one sweep point have in common. (New tokens may be a workload's own.)"""
    return cell.temperature, cell.top_k, cell.context, cell.batch


def interleaved(groups: Mapping[Cell, Sequence[Group]], repeats: int) -> list[list[tuple[Group, int]]]:
    """For each sweep point its (group, repeat) pairs, in the order in which they are run."""
    points: dict[tuple[Any, ...], list[Sequence[Group]]] = {}
    for cell, of_cell in groups.items():
        points.setdefault(point_of(cell), []).append(of_cell)
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


@dataclass(kw_only=True)
class Prepared:
    """What stands before the first trial."""

    groups: dict[Cell, list[Group]]
    notes: list[str] = field(default_factory=list)

    def asked(self, trial: Trial, index: int) -> Asked:
        """What one sequence of a trial was asked."""
        group = self.groups[trial.cell][trial.group]
        prompt = group.prompts[index]
        return Asked(prompt_ids=prompt.ids, params=group.params(prompt))

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
    config: BenchConfig, builder: Builder, loaded: Sequence[Workload], journal: Journal, watcher: Watcher
) -> Prepared:
    """Ids of all prompts. Later turns of conversations follow on answers of plain, greedy decoding.

    Raises:
        ConfigError: a prompt that does not fit, a batch that cannot be filled.
    """
    cells = cells_of(config, loaded)
    prompts: dict[tuple[str, int | None], list[PromptIds]] = {}
    prepared = Prepared(groups={})
    asker = _Asker(config, builder, journal, watcher)
    for cell in cells:
        key = (cell.workload, cell.context)
        if key not in prompts:
            longest = max(c.max_new_tokens for c in cells if (c.workload, c.context) == key)
            workload = next(w for w in loaded if w.name == cell.workload)
            prompts[key], notes = asker.ids(workload, cell.context, longest)
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

    def __init__(self, config: BenchConfig, builder: Builder, journal: Journal, watcher: Watcher) -> None:
        self._config = config
        self._builder = builder
        self._journal = journal
        self._watcher = watcher
        self._plain = next(m for m in config.methods if is_plain(m) and m.engine == OWN)
        self._target = builder.llm(self._plain)

    def ids(self, workload: Workload, context: int | None, max_new_tokens: int) -> tuple[list[PromptIds], list[str]]:
        """All prompts of a workload, first turns before later ones, and what must be said about them."""
        shape = self._target.decoder.config
        if self._config.random:
            length = context or self._config.prompt_tokens
            return workloads.random_prompts(len(workload.prompts), length, shape.vocab_size, self._config.seed), []
        encoded = workloads.encode(
            workload,
            self._target.tokenizer,
            context=context,
            max_model_len=shape.max_position,
            max_new_tokens=max_new_tokens,
        )
        turns = max(len(p.turns) for p in workload.prompts)
        later: list[PromptIds] = []
        if turns > 1:
            self._watcher.stage(f"answering the earlier turns of {workload.name}'s conversations")
            llm = self._builder.llm(self._plain, self._room(shape.max_position))
            latest = {p.id: list(ids.ids) for p, ids in zip(workload.prompts, encoded.prompts, strict=True)}
            for turn in range(1, turns):
                later += self._turn(llm, workload, encoded, turn, latest, max_new_tokens)
        return [*encoded.prompts, *later], encoded.notes()

    def _room(self, positions: int) -> Limits:
        return Limits(
            max_sequences=PREPARE_TOGETHER,
            max_model_len=positions,
            pool_tokens=(positions + SPARE_TOKENS) * PREPARE_TOGETHER,
        )

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


# -- peers


class PeerRunner:
    """A mode of a peer, paused while others run.

    Raises:
        PeerError: it does not start.
    """

    def __init__(
        self, method: Method, folder: Path, draft: Path | None, limits: Limits, max_batch: int, threads: int
    ) -> None:
        self.method = method
        self._peer = Peer(method.engine)
        self._peer.start(
            method, folder, draft, threads=threads, max_model_len=limits.max_model_len, max_batch=max_batch
        )
        self._peer.pause()

    @property
    def version(self) -> str:
        """Of the peer."""
        return self._peer.version

    def warm_up(self, group: Group, max_new_tokens: int) -> None:
        """Run a group without counting it."""
        try:
            self._peer.run([p.ids for p in group.prompts], max_new_tokens, group.cell.ignore_eos)
        finally:
            self._peer.pause()

    def run(self, group: Group, repeat: int) -> Trial:
        """One trial.

        Raises:
            PeerError: the peer failed; it will not run again.
        """
        trial = group.blank(self.method.name, repeat)
        most = group.cell.max_new_tokens
        try:
            result = self._peer.run([p.ids for p in group.prompts], most, group.cell.ignore_eos)
        finally:
            self._peer.pause()
        trial.outputs = result.outputs
        trial.finish = ["length" if len(ids) >= most else "stop" for ids in result.outputs]
        trial.wall_ms = result.wall_ms
        trial.ttft_ms = list(result.ttft_ms or [])
        trial.waits_ms, trial.arrivals = list(result.waits_ms), list(result.arrivals)
        trial.drafted, trial.accepted = result.drafted or 0, result.accepted or 0
        trial.passes = result.passes
        return trial

    def close(self) -> None:
        """End its process."""
        self._peer.close()


def cannot_run(method: Method, cell: Cell) -> str | None:
    """Why a method has no place in a cell; None where it has."""
    if method.engine == OWN:
        return None
    mode = PEERS[method.engine].modes[PLAIN if is_plain(method) else method.drafter]
    if cell.temperature > 0:
        return "peers run greedily: their sampling has other noise"
    if mode.max_batch is not None and cell.batch > mode.max_batch:
        return f"this mode takes {mode.max_batch} prompt at a time"
    return None


# -- the run


class Run:
    """A benchmark from start to report.

    Args:
        config: what to measure.
        out: folder for journal and report; None keeps nothing.
        resume: go on with the journal in ``out``.
        overwrite: start again where ``out`` holds a run.
        command: the command line that repeats it.
        watcher: who is told how far it is.
    """

    def __init__(
        self,
        config: BenchConfig,
        *,
        out: Path | None = None,
        resume: bool = False,
        overwrite: bool = False,
        command: Sequence[str] = (),
        watcher: Watcher | None = None,
    ) -> None:
        self.config = config
        self.out = out
        self.resume = resume
        self.overwrite = overwrite
        self.command = list(command)
        self.watcher = watcher or Silent()
        self.unavailable: dict[str, str] = {}
        self.notes: list[str] = []
        self.began = perf_counter()
        self.versions = _versions()
        self.commit = commit()

    def execute(self) -> Outcome:
        """Prepare, measure, check, report.

        An interrupt (Ctrl-C) while it measures ends it early: the report has what there is.

        Raises:
            ConfigError: anything that cannot be as it was asked for; found before the first trial.
        """
        self.began = perf_counter()
        loaded = self._load_workloads()
        cells = cells_of(self.config, loaded)
        for cell in cells:
            _enough(cell, loaded, self.config)
        _check_out(self.out, self.resume, self.overwrite)
        with ExitStack() as stack:
            self.watcher.stage(f"loading {self.config.model}")
            folder = stack.enter_context(materialised(self.config.model))
            builder = Builder(folder, self.config.device, self.config.threads, self.config.applications)
            methods = [m for m in self.config.methods if m.engine == OWN]
            target = builder.llm(next(m for m in methods if is_plain(m)))
            if target.tokenizer is None and not self.config.random:
                raise ConfigError(
                    f"model {self.config.model}", "it has no tokenizer, so text means nothing to it", "add its files"
                )
            settings = self._settings(loaded, cells)
            journal = stack.enter_context(Journal(self._journal_path(), settings, resume=self.resume))
            prepared = prepare(self.config, builder, loaded, journal, self.watcher)
            measuring = _Measuring(self, builder, prepared, journal, Path(resolve_folder(folder)), stack)
            interrupted = measuring.run()
            report = self._report(loaded, settings, target, prepared, journal.trials)
            if self.config.check and not interrupted:
                self.watcher.stage("comparing token ids with plain decoding's")
                report.exactness = lossless.check(report, measuring.llm, prepared.asked)
                report.notes += lossless.unchecked(report)
            if interrupted:
                done, total = len(journal.trials), measuring.total
                report.notes.append(f"interrupted after {done} of {total} trials; ids were not compared")
                report.settings["interrupted"] = True
        files = write_all(report, self.out) if self.out is not None else []
        return Outcome(report=report, files=tuple(files), interrupted=interrupted)

    def _load_workloads(self) -> list[Workload]:
        config = self.config
        if config.random:
            return [_random_workload(config)]
        rows = workloads.available(config.data)
        names = config.workloads or tuple(row.name for row in rows if row.packaged)
        loaded = [workloads.load(name, folder=config.data, limit=config.prompts, seed=config.seed) for name in names]
        twins = [w.name for w in loaded if sum(w.name == other.name for other in loaded) > 1]
        if twins:
            raise ConfigError(f"workload {twins[0]}", "two workloads have that name", "rename one's file")
        return loaded

    def _journal_path(self) -> Path | None:
        return None if self.out is None else self.out / JOURNAL_NAME

    def _settings(self, loaded: Sequence[Workload], cells: Sequence[Cell]) -> dict[str, Any]:
        """Everything on which trials depend."""
        config = self.config
        facts = machine.describe(config.device)
        return {
            "model": config.model,
            "methods": [asdict(m) for m in config.methods],
            "cells": [asdict(c) for c in cells],
            "prompts": {w.name: w.fingerprint for w in loaded},
            "prompt_tokens": config.prompt_tokens if config.random else None,
            "applications": {name: identity(resolve_folder(at)) for name, at in config.applications.items()},
            "repeats": config.repeats,
            "seed": config.seed,
            "device": config.device,
            "threads": facts.threads,
            "processor": facts.processor,
            "torch": facts.torch,
            "paceline": __version__,
            "commit": self.commit,
        }

    def _report(
        self,
        loaded: Sequence[Workload],
        settings: Mapping[str, Any],
        target: LLM,
        prepared: Prepared,
        trials: Sequence[Trial],
    ) -> Report:
        config = self.config
        self.watcher.stage("measuring the memory's read bandwidth")
        facts = machine.describe(config.device).as_dict()
        # The faster of reading from memory, and of reading again and again what may lie in a cache: the weights.
        weights = target.decoder.pass_bytes
        facts["read_bandwidth_bytes_per_s"] = max(
            machine.read_bandwidth(config.device), machine.read_bandwidth(config.device, weights)
        )
        ran = {t.method for t in trials}
        kept = ("repeats", "seed", "device", "threads", "prompt_tokens")
        return Report(
            title=config.title or f"{config.model}: what speculation is worth",
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command=self.command,
            model=model_facts(target, config.model),
            machine=facts,
            versions=self.versions,
            commit=self.commit,
            settings={
                **{name: settings[name] for name in kept},
                "batches": list(config.batches),
                "temperatures": list(config.temperatures),
                **({"top_ks": list(config.top_ks)} if config.top_ks != (0,) else {}),
                **({"applications": dict(config.applications)} if config.applications else {}),
                "contexts": list(config.contexts),
                "prompts_per_workload": config.prompts,
                "ignore_eos": config.ignores_eos,
                "time_limit_s": config.time_limit_s,
                "order": "methods in rotated order within (group, repeat); workloads in turns",
                "between_trials": "prefix caches and drafters' memories are emptied; what a draft budget learned stays",
                "warm_up_tokens": WARM_UP_TOKENS,
            },
            workloads={w.name: w.as_dict() for w in loaded},
            methods=[m for m in config.methods if m.name in ran or m.name not in self.unavailable],
            trials=list(trials),
            unavailable=self.unavailable,
            notes=[*prepared.notes, *self.notes],
        )


class _Measuring:
    """The trials of a run."""

    def __init__(
        self, run: Run, builder: Builder, prepared: Prepared, journal: Journal, folder: Path, stack: ExitStack
    ) -> None:
        self._run = run
        self._config = run.config
        self._builder = builder
        self._prepared = prepared
        self._journal = journal
        self._stack = stack
        self._folder = folder
        self._limits = prepared.limits()
        self._runners: dict[str, Runner] = {}
        self._synthetic: dict[tuple[str, Cell], Runner] = {}
        self._answers = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-bench-")))
        self._done = {(t.method, t.cell, t.group, t.repeat) for t in journal.trials}
        self._turn = 0
        self._build()
        self.total = sum(
            1 for point in self._points() for pair in point for m in self._methods() if self._wanted(m, *pair)
        ) + len(self._done)

    # -- building

    def _build(self) -> None:
        """Every method's runner, so that what cannot be is found before the first trial."""
        for method in self._config.methods:
            self._run.watcher.stage(f"preparing {method.name}")
            if method.engine != OWN:
                self._start_peer(method)
            elif not records_answers(method):
                self._runners[method.name] = self._builder.runner(method, self._limits)
        gc.collect()
        gc.freeze()  # what is there now stays: no collection between trials looks at it again
        self._stack.callback(gc.unfreeze)

    def _start_peer(self, method: Method) -> None:
        why = peer_available(method.engine)
        cells = [cell for cell in self._prepared.groups if cannot_run(method, cell) is None]
        if why is None and not cells:
            why = cannot_run(method, next(iter(self._prepared.groups)))
        if why is None:
            try:
                runner = PeerRunner(
                    method,
                    self._folder,
                    draft_folder(self._config),
                    self._limits,
                    max(cell.batch for cell in cells),
                    torch.get_num_threads(),
                )
            except (PeerError, ConfigError) as error:
                why = str(error)
            else:
                self._stack.callback(runner.close)
                self._runners[method.name] = runner
                self._run.versions[method.engine] = runner.version
        if why is not None:
            self._run.unavailable[method.name] = why

    def llm(self, method: Method) -> LLM:
        """The engine of one of our own methods."""
        runner = self._runners[method.name]
        assert isinstance(runner, EngineRunner)
        return runner.llm

    def _runner(self, method: Method, cell: Cell) -> Runner:
        if not records_answers(method):
            return self._runners[method.name]
        key = (method.name, cell)
        if key not in self._synthetic:
            answers = self._recorded(method, cell)
            self._synthetic[key] = self._builder.runner(method, self._limits, str(answers))
        return self._synthetic[key]

    def _recorded(self, method: Method, cell: Cell) -> Path:
        """A file of what the target says to the cell's prompts, asked in the cell's own batches."""
        from ..drafters.synthetic import write_answers

        kind = (method.dtype, method.application)
        own = [m for m in self._config.methods if m.engine == OWN and is_plain(m)]
        plain = next(m for m in own if (m.dtype, m.application) == kind)
        number = list(self._prepared.groups).index(cell)
        path = self._answers / f"{method.dtype}-{own.index(plain)}-{number}.jsonl"
        if not path.exists():
            self._run.watcher.stage(f"recording the target's answers to {cell.workload}")
            pairs: list[tuple[tuple[int, ...], list[int]]] = []
            for group in self._prepared.groups[cell]:
                trial = self._runners[plain.name].run(group, 0)
                if trial.error:
                    raise ConfigError(
                        f"method {method.name}", f"plain decoding failed ({trial.error})", "see its error"
                    )
                pairs += zip([p.ids for p in group.prompts], trial.outputs, strict=True)
            write_answers(path, pairs)
        return path

    # -- measuring

    def run(self) -> bool:
        """All trials that are not done yet. Returns whether they were interrupted."""
        try:
            for point in self._points():
                self._run_point(point)
        except KeyboardInterrupt:
            return True
        return False

    def _points(self) -> list[list[tuple[Group, int]]]:
        return interleaved(self._prepared.groups, self._config.repeats)

    def _methods(self) -> list[Method]:
        return [m for m in self._config.methods if m.name not in self._run.unavailable]

    def _wanted(self, method: Method, group: Group, repeat: int) -> bool:
        key = (method.name, group.cell, group.index, repeat)
        return key not in self._done and cannot_run(method, group.cell) is None

    def _run_point(self, point: Sequence[tuple[Group, int]]) -> None:
        warm: set[str] = set()
        for group, repeat in point:
            order = rotated(self._methods(), self._turn)
            self._turn += 1
            wanted = [method for method in order if self._wanted(method, group, repeat)]
            if wanted and self._late():  # here and not between methods: what is compared stays complete
                return
            for method in wanted:
                self._trial(method, group, repeat, warm)

    def _trial(self, method: Method, group: Group, repeat: int, warm: set[str]) -> None:
        self._run.watcher.trial(len(self._journal.trials), self.total, group, method)
        try:
            runner = self._runner(method, group.cell)
            if method.name not in warm:
                self._warm_up(runner, group)
                warm.add(method.name)
            trial = runner.run(group, repeat)
        except PeerError as error:
            log.warning("%s: %s", method.name, error)
            self._run.unavailable[method.name] = str(error)
            return
        self._done.add((method.name, group.cell, group.index, repeat))
        self._journal.add(trial)

    def _warm_up(self, runner: Runner, group: Group) -> None:
        try:
            runner.warm_up(group, min(WARM_UP_TOKENS, group.cell.max_new_tokens))
        except PeerError:
            raise
        except Exception as error:  # the trial that follows will meet and record it
            log.warning("%s failed in its warm-up", runner.method.name, exc_info=error)

    def _late(self) -> bool:
        limit = self._config.time_limit_s
        if limit is None or perf_counter() - self._run.began < limit:
            return False
        note = f"stopped after {limit:g} s, with {len(self._journal.trials)} of {self.total} trials done"
        if note not in self._run.notes:
            self._run.notes.append(note)
        return True


# -- what surrounds a run


def draft_folder(config: BenchConfig) -> Path | None:
    """The draft model for peers: the embedded target's own, or the one that a method of ours names."""
    entry = next((e for e in zoo.available() if e.name == config.model), None)
    names = [entry.draft] if entry is not None and entry.draft else []
    for method in config.methods:
        match = getattr(drafter_config(method), "model", None) if method.engine == OWN else None
        names += [match] if match else []
    return Path(resolve_folder(names[0])) if names else None


def _random_workload(config: BenchConfig) -> Workload:
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
        long_context=False,
    )


def _enough(cell: Cell, loaded: Sequence[Workload], config: BenchConfig) -> None:
    """Refuse a batch that cannot be filled, before the model is loaded."""
    workload = next(w for w in loaded if w.name == cell.workload)
    count = sum(len(p.turns) for p in workload.prompts)
    if count < cell.batch:
        raise ConfigError(
            f"batch {cell.batch} of {cell.workload}",
            f"{count} prompts were asked for, of {workload.total} that there are",
            "raise --prompts, or lower the batch",
        )


def _check_out(out: Path | None, resume: bool, overwrite: bool) -> None:
    """Make the folder, and refuse to spoil what is in it.

    Raises:
        ConfigError: it cannot be written, holds a run already, or has nothing to resume.
    """
    if out is None:
        if resume or overwrite:
            raise ConfigError(
                "--resume or --overwrite without --out", "there is no folder to look in", "name it: --out DIR"
            )
        return
    if resume and overwrite:
        raise ConfigError("--resume with --overwrite", "one goes on, the other starts again", "give one of them")
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ConfigError(f"--out {out}", f"cannot be written ({error})", "name a folder that can") from error
    journal = out / JOURNAL_NAME
    if resume and not journal.exists():
        raise ConfigError(f"--resume with --out {out}", f"it has no {JOURNAL_NAME}", "leave --resume out")
    if resume or overwrite:
        return
    if (out / JSON_NAME).exists():
        title = load_report(out / JSON_NAME).title
        raise ConfigError(f"--out {out}", f"it holds the report {title!r}", "name another folder, or give --overwrite")
    if journal.exists() and holds_trials(journal):
        raise ConfigError(f"--out {out}", "it holds a run that was cut off", "go on with --resume, or give --overwrite")


def _versions() -> dict[str, str]:
    packages = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
    return {"paceline": __version__} | {name: importlib.metadata.version(name) for name in packages}


def commit() -> str | None:
    """The project's commit where it runs from a checkout, with "-dirty" where files were changed."""
    root = Path(__file__).resolve().parents[3]
    if shutil.which("git") is None or not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=30)
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "HEAD")
    return (head + "-dirty" if git("status", "--porcelain", "--untracked-files=no") else head) or None
