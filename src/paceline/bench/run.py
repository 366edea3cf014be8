"""A benchmark from start to report: load, run every method interleaved, compare ids, write.

    for each point (temperature, top-k, context, batch)
        warm up every method, uncounted
        for each group number, for each workload, for each repeat
            the methods one right after the other, each time another one first

So what is compared was measured next to each other, all workloads advance together (a run that is cut short has some of
each), and nobody always runs first. Trials do not see each other's text: prefix caches and drafters' memories are
emptied before each. What a draft budget has learned of costs and acceptance stays, as in an engine that has run for a
while.
"""

from __future__ import annotations

import gc
import logging
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib import metadata
from itertools import count, product, zip_longest
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from .. import __version__
from ..api.llm import LLM
from ..core.errors import ConfigError
from ..train.files import writing
from ..weights.source import resolve_folder
from . import lossless, machine, workloads
from .config import BenchConfig
from .encoding import Encoded
from .measure import Builder, EngineRunner, Group, model_facts
from .records import Cell, Method, PromptIds, Report, Trial
from .report import JSON_NAME, write_report
from .workloads import Workload

log = logging.getLogger(__name__)

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")  # whose versions are reported
WARM_UP_TOKENS = 16
SETTINGS = (  # that a report repeats as they are
    *("prompts", "repeats", "seed", "device", "batches", "waves", "temperatures", "top_ks", "contexts"),
    *("ignore_eos", "time_limit_s", "applications"),
)


class Run:
    """A benchmark.

    Args:
        out: folder for the report; None keeps nothing.
        overwrite: start again even if ``out`` holds a report.
        command: the command line that repeats it.
    """

    encode: Callable[..., Encoded] = Encoded  # makes ids of a workload's prompts

    def __init__(
        self,
        config: BenchConfig,
        *,
        out: Path | None = None,
        overwrite: bool = False,
        command: Sequence[str] = (),
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.config, self.out, self.overwrite = config, out, overwrite
        self.command, self.commit = list(command), commit()
        self.trials: list[Trial] = []
        self.notes: list[str] = []
        self._tell = progress
        self.groups: dict[Cell, list[Group]] = {}
        self._runners: dict[str, EngineRunner] = {}  # by method
        self._plain = next(m for m in config.methods if m.ours and m.plain)

    def execute(self) -> Report:
        """Prepare, measure, check, report.

        Ctrl-C during the measurement ends it early: the report has the trials so far, and notes that it was
        interrupted. So has the report of a run that an error ends.

        Raises:
            ConfigError: options that cannot be used; found before the first trial.
        """
        config = self.config
        named = config.workloads or [name for name, facts in workloads.WORKLOADS.items() if facts.packaged]
        options: dict[str, Any] = {"folder": config.data, "limit": config.prompts, "seed": config.seed}
        loaded = [workloads.load(name, **options) for name in named]
        if twin := next((name for name, many in Counter(w.name for w in loaded).items() if many > 1), None):
            raise ConfigError(f"workload {twin}", "two workloads have that name", "rename one's file")
        cells = cells_of(config, loaded)
        _check_out(self.out, self.overwrite)
        stopped: BaseException | None = None
        with ExitStack() as stack:
            self._tell(f"loading {config.model}")
            self._builder = Builder(config.model, config.device, config.threads, config.applications)
            target = self._builder.llm(self._plain)
            self._prepare(cells, {workload.name: workload for workload in loaded})
            groups = [group for of in self.groups.values() for group in of]
            self.lengths = [group.lengths for group in groups]
            self.build(Path(resolve_folder(config.model)), stack)
            points = interleaved(self.groups, config.repeats)
            total = sum(self.runs(m, group) for point in points for group, _ in point for m in config.methods)
            try:
                self._measure(points, total)
            except BaseException as error:  # measurements are kept, whatever ends the run
                stopped = error
            report = self.report(loaded, target)
            if stopped is not None:
                report.notes.append(f"interrupted after {len(self.trials)} of {total} trials; ids were not compared")
                report.settings["interrupted"] = True
            else:
                self._tell("comparing token ids with plain decoding's")
                self.compare(report)
        if self.out is not None:
            write_report(report, self.out)
        if stopped is not None and not isinstance(stopped, KeyboardInterrupt):
            raise stopped
        return report

    # -- before the first trial

    def _prepare(self, cells: Sequence[Cell], loaded: dict[str, Workload]) -> None:
        """Prepare groups of prompts for every cell."""
        self._tell("preparing the prompts")
        if (waves := self.config.waves) > 1:
            self.notes.append(f"each place of a batch answers {waves} prompts in turn")
        llm = self._builder.llm(self._plain)
        prepared: dict[tuple[str, int | None], list[PromptIds]] = {}
        for cell in cells:
            key = (cell.workload, cell.context)
            if key not in prepared:
                lengths = {"max_model_len": llm.decoder.config.max_position, "max_new_tokens": cell.max_new_tokens}
                lengths |= {} if cell.context is None else {"context": cell.context}
                encoded = self.encode(loaded[cell.workload], llm.tokenizer, **lengths)
                prepared[key] = encoded.prompts
                self.notes += encoded.notes()
            prompts = prepared[key]
            self.groups[cell] = groups_of(cell, prompts, self.config.seed, self.config.waves)
            if spare := -len(prompts) % (cell.batch * self.config.waves):
                where = f"{cell.workload}, batch {cell.batch}"
                self.notes.append(f"{where}: {spare} of {len(prompts)} prompts are in two groups, to fill the last")

    def build(self, folder: Path, stack: ExitStack) -> None:
        """Build every runner, so that errors show before the first trial; ``stack`` closes what is opened."""
        for method in self.config.methods:
            if method.ours:
                self._tell(f"preparing {method.name}")
                self._runners[method.name] = EngineRunner(method, self._builder.llm(method, self.lengths))
        gc.collect()
        gc.freeze()  # present objects stay: no collection between trials visits them again
        stack.callback(gc.unfreeze)

    # -- measuring

    def runs(self, method: Method, group: Group) -> bool:
        """Return whether it is to run a group."""
        return method.ours

    def runner(self, method: Method) -> Any:
        """Return the runner of a method: it has `warm_up` and `run`, as `EngineRunner` has."""
        return self._runners[method.name]

    @property
    def unprepared(self) -> Method | None:
        """Return the method that an error before the first trial is about: the first without a runner."""
        return next((m for m in self.config.methods if m.ours and m.name not in self._runners), None)

    def _measure(self, points: Sequence[Sequence[tuple[Group, int]]], total: int) -> None:
        """Run all trials; after the time limit, which counts from here, no group begins but the first."""
        limit, turns, began = self.config.time_limit_s, count(), perf_counter()
        for point in points:
            warm: set[str] = set()
            for group, repeat in point:
                # Here and not between methods, so that comparisons stay complete.
                if limit is not None and self.trials and perf_counter() - began >= limit:
                    self.notes.append(f"stopped after {limit:g} s, with {len(self.trials)} of {total} trials done")
                    return
                methods = self.config.methods
                first = next(turns) % len(methods)
                for method in [*methods[first:], *methods[:first]]:  # A B C, B C A, ..: nobody always runs first
                    if self.runs(method, group):
                        done = f"{len(self.trials)} of {total} trials"
                        self._tell(f"{done}, {group.cell.workload}, {method.name}")
                        self.trial(method, group, repeat, warm)

    def trial(self, method: Method, group: Group, repeat: int, warm: set[str]) -> None:
        """Run one trial, after a warm-up if the method is not in ``warm``."""
        runner = self.runner(method)
        if method.name not in warm:
            warm.add(method.name)
            try:
                runner.warm_up(group, min(WARM_UP_TOKENS, group.cell.max_new_tokens))
            except Exception as error:  # the trial that follows will meet and record it
                log.warning("%s failed in its warm-up", method.name, exc_info=error)
        self.trials.append(runner.run(group, repeat))

    # -- the report

    def compare(self, report: Report) -> None:
        """Compare ids with plain decoding's."""
        report.exactness, notes = lossless.check(report)
        report.notes += notes

    def report(self, loaded: Sequence[Workload], target: LLM) -> Report:
        """Return the report; ids are not compared yet."""
        config = self.config
        self._tell("measuring the memory's read bandwidth")
        # The faster of reading from memory, and of reading again and again what may lie in a cache: the weights.
        cached = machine.read_bandwidth(config.device, target.decoder.pass_bytes)
        bandwidth = max(machine.read_bandwidth(config.device), cached)
        return Report(
            title=config.title or f"{config.model}: what speculation is worth",
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command=self.command,
            model=model_facts(target, config.model),
            machine={**machine.describe(config.device), "read_bandwidth_bytes_per_s": bandwidth},
            versions={"paceline": __version__} | {p: metadata.version(p) for p in PACKAGES},
            commit=self.commit,
            settings={
                **{name: getattr(config, name) for name in SETTINGS},
                "threads": torch.get_num_threads(),
                "order": "methods in rotated order within (group, repeat); workloads in turns",
                "between_trials": "prefix caches and drafters' memories are emptied; what a draft budget learned stays",
                "warm_up_tokens": WARM_UP_TOKENS,
            },
            workloads={w.name: w.as_dict() for w in loaded},
            methods=[*config.methods],
            trials=self.trials,
            notes=self.notes,
        )


# -- the prompts of each trial, and their order


def cells_of(config: BenchConfig, loaded: Sequence[Workload]) -> list[Cell]:
    """Return every cell; those of one point are next to each other.

    Raises:
        ConfigError: a batch that the prompts of a workload cannot fill.
    """
    for batch, workload in product(config.batches, loaded):
        if (many := len(workload.prompts)) < batch * config.waves:
            wrong = f"{many} prompts were requested, of {workload.total} that there are"
            waves = f"{config.waves} waves of " if config.waves > 1 else ""
            raise ConfigError(f"{waves}batch {batch} of {workload.name}", wrong, "raise --prompts, or lower the batch")
    return [
        Cell(
            workload=workload.name,
            batch=batch,
            temperature=temperature,
            top_k=top_k,
            context=context,
            max_new_tokens=config.max_new_tokens or workload.max_new_tokens,
            ignore_eos=config.ignore_eos,
        )
        for temperature, top_k, context, batch, workload in product(
            config.temperatures, config.top_ks, config.contexts, config.batches, loaded
        )
    ]


def groups_of(cell: Cell, prompts: Sequence[PromptIds], seed: int, waves: int = 1) -> list[Group]:
    """Return batches of prompts, ``waves`` of them a group, in order; the last group is filled up from the front."""
    size = cell.batch * waves
    ring, starts = [*prompts, *prompts], range(0, len(prompts), size)
    batches = [tuple(ring[start : start + size]) for start in starts]
    return [Group(cell=cell, index=i, prompts=batch, seed=seed) for i, batch in enumerate(batches)]


def interleaved(groups: Mapping[Cell, Sequence[Group]], repeats: int) -> list[list[tuple[Group, int]]]:
    """Return for each point its (group, repeat) pairs, in the order in which they are run."""
    points: dict[tuple[Any, ...], list[Sequence[Group]]] = {}
    for cell, of_cell in groups.items():
        point = cell.temperature, cell.top_k, cell.context, cell.batch  # not new tokens: they may be a workload's own
        points.setdefault(point, []).append(of_cell)
    turns = [[group for turn in zip_longest(*of_point) for group in turn if group] for of_point in points.values()]
    return [[(group, repeat) for group in of_point for repeat in range(repeats)] for of_point in turns]


def _check_out(out: Path | None, overwrite: bool) -> None:
    """Make the folder, and refuse to overwrite a report in it.

    Raises:
        ConfigError: it cannot be written, or holds a report already.
    """
    if out is None:
        if overwrite:
            raise ConfigError("--overwrite without --out", "there is no folder to look in", "name it: --out DIR")
        return
    with writing(f"--out {out}", "name another folder"):
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    if (out / JSON_NAME).exists() and not overwrite:
        raise ConfigError(f"--out {out}", "it holds a report", "name another folder, or give --overwrite")


def commit() -> str | None:
    """Return the project's commit where it runs from a checkout, with "-dirty" where files were changed."""
    root = Path(__file__).resolve().parents[3]
    if shutil.which("git") is None or not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return done.stdout.strip() or None
