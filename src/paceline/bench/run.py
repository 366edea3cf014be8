"""A benchmark from start to report: load, run every method interleaved (`schedule`, `trials`), compare ids, write."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Any

from .. import __version__
from ..core.errors import ConfigError
from ..core.model_spec import parse_model
from ..core.sampling import SamplingParams
from ..llm import LLM
from ..network.applications import identity
from ..network.loader import resolve_folder
from . import lossless, machine, workloads
from .config import BenchConfig, RunWatcher
from .journal import NAME as JOURNAL_NAME
from .journal import Journal, holds_trials
from .measure import Builder, model_facts
from .models import materialised
from .records import Cell, Method, Report, Trial
from .report import JSON_NAME, load_report, write_all
from .schedule import cells_of, prepare, random_workload
from .trials import WARM_UP_TOKENS, Start, Trials
from .workloads import Workload

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")  # whose versions are reported


RequestOf = Callable[[Trial, int], tuple[Sequence[int], SamplingParams]]  # of a trial's sequence, by its place
Judges = Callable[[Callable[[Method], LLM], RequestOf], lossless.Judgement]


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """The result of a run."""

    report: Report
    files: tuple[Path, ...] = ()
    interrupted: bool = False


class Run:
    """A benchmark.

    Args:
        config: what to measure.
        out: folder for journal and report; None keeps nothing.
        resume: go on with the journal in ``out``.
        overwrite: start again even if ``out`` holds a run.
        command: the command line that repeats it.
        watcher: is told the progress.
        start: starts methods of other engines.
        judge: makes the judge of differences in ids, from the engines and requests of the run.
    """

    def __init__(
        self,
        config: BenchConfig,
        *,
        out: Path | None = None,
        resume: bool = False,
        overwrite: bool = False,
        command: Sequence[str] = (),
        watcher: RunWatcher | None = None,
        start: Start | None = None,
        judge: Judges | None = None,
    ) -> None:
        self.config, self.out = config, out
        self.resume, self.overwrite = resume, overwrite
        self.command = list(command)
        self.watcher = watcher or RunWatcher()
        self.start, self.judge = start, judge
        self.commit = commit()

    def execute(self) -> RunOutcome:
        """Prepare, measure, check, report.

        An interrupt (Ctrl-C) during the measurement ends it early: the report has the trials so far.

        Raises:
            ConfigError: options that cannot be used; found before the first trial.
        """
        began = perf_counter()
        config = self.config
        loaded = _load_workloads(config)
        cells = cells_of(config, loaded)
        for cell in cells:
            _enough(cell, loaded)
        _check_out(self.out, self.resume, self.overwrite)
        with ExitStack() as stack:
            self.watcher.stage(f"loading {config.model}")
            folder = stack.enter_context(materialised(config.model))
            builder = Builder(folder, config.device, config.threads, config.applications)
            target = builder.llm(next(m for m in config.methods if m.own and m.plain))
            if target.tokenizer is None and not config.random:
                raise ConfigError(
                    f"model {config.model}", "it has no tokenizer, so text means nothing to it", "add its files"
                )
            settings = self._settings(loaded, cells)
            path = None if self.out is None else self.out / JOURNAL_NAME
            journal = stack.enter_context(Journal(path, settings, resume=self.resume))
            prepared = prepare(config, builder, loaded, journal, self.watcher)
            at = Path(resolve_folder(parse_model(folder).name))
            trials = Trials(config, builder, prepared, journal, self.watcher, at, self.start, stack, began)
            interrupted = trials.run()
            report = self._report(loaded, settings, target, trials)
            report.trials, report.notes = journal.trials, [*prepared.notes, *trials.notes]
            if interrupted:
                done = f"{len(journal.trials)} of {trials.total} trials"
                report.notes.append(f"interrupted after {done}; ids were not compared")
                report.settings["interrupted"] = True
            elif config.check:
                self.watcher.stage("comparing token ids with plain decoding's")
                judge = self.judge and self.judge(trials.llm, prepared.request)
                report.exactness = lossless.check(report, judge)
                report.notes += lossless.unchecked(report, judge is not None)
        files = write_all(report, self.out) if self.out is not None else []
        return RunOutcome(report=report, files=tuple(files), interrupted=interrupted)

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

    def _report(self, loaded: Sequence[Workload], settings: dict[str, Any], target: LLM, trials: Trials) -> Report:
        """The report, without its trials."""
        config = self.config
        self.watcher.stage("measuring the memory's read bandwidth")
        facts = machine.describe(config.device).as_dict()
        # The faster of reading from memory, and of reading again and again what may lie in a cache: the weights.
        weights = target.decoder.pass_bytes
        facts["read_bandwidth_bytes_per_s"] = max(
            machine.read_bandwidth(config.device), machine.read_bandwidth(config.device, weights)
        )
        return Report(
            title=config.title or f"{parse_model(config.model).label}: what speculation is worth",
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command=self.command,
            model=model_facts(target, config.model),
            machine=facts,
            versions={"paceline": __version__} | {p: metadata.version(p) for p in PACKAGES} | trials.versions,
            commit=self.commit,
            settings={
                **{name: settings[name] for name in ("repeats", "seed", "device", "threads", "prompt_tokens")},
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
            methods=[m for m in config.methods if m.name in trials.ran or m.name not in trials.unavailable],
            trials=[],
            unavailable=trials.unavailable,
        )


def _load_workloads(config: BenchConfig) -> list[Workload]:
    if config.random:
        return [random_workload(config)]
    packaged = tuple(row.name for row in workloads.available(config.data) if row.packaged)
    loaded = [
        workloads.load(name, folder=config.data, limit=config.prompts, seed=config.seed)
        for name in config.workloads or packaged
    ]
    names = [workload.name for workload in loaded]
    twin = next((name for name in names if names.count(name) > 1), None)
    if twin is not None:
        raise ConfigError(f"workload {twin}", "two workloads have that name", "rename one's file")
    return loaded


def _enough(cell: Cell, loaded: Sequence[Workload]) -> None:
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
    """Make the folder, and refuse to overwrite its content.

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
