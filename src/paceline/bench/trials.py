"""The trials of a run: every method's runner, and each (method, group, repeat) that is not done yet.

Trials do not see each other's text: prefix caches and drafters' memories are emptied before each. What a draft budget
has learned of costs and acceptance stays, as in an engine that has run for a while.
"""

from __future__ import annotations

import gc
import logging
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Protocol

from ..core.errors import ConfigError, PacelineError
from ..llm import LLM
from .config import BenchConfig, RunWatcher
from .journal import Journal
from .measure import Builder, EngineRunner, Group, Limits
from .methods import records_answers
from .records import Cell, Method, Trial
from .schedule import Prepared, interleaved, rotated

log = logging.getLogger(__name__)

WARM_UP_TOKENS = 16


class Unavailable(PacelineError):
    """Another engine is not there, or failed: its method does not run any more."""


class Runner(Protocol):
    """One method, ready to be measured."""

    method: Method

    def warm_up(self, group: Group, max_new_tokens: int) -> None:
        """Run a group without counting it."""

    def run(self, group: Group, repeat: int) -> Trial:
        """One trial."""


class OtherRunner(Runner, Protocol):
    """A method of another engine. `Unavailable` may be raised by each of its methods."""

    version: str

    def refuses(self, cell: Cell) -> str | None:
        """Why it has no place in a cell; None where it has."""

    def close(self) -> None:
        """End it."""


Start = Callable[[Method, Path, Sequence[Cell], Limits], OtherRunner]  # of a method, for a model's folder


class Trials:
    """All trials of a run.

    Args:
        config: of the run.
        builder: makes the engines.
        prepared: the groups of prompts.
        journal: takes the trials; those that it has are not run again.
        watcher: who is told how far it is.
        folder: of the model, for other engines.
        start: starts a method of another engine.
        stack: closes what is opened here.
        began: when the run did, by `perf_counter`.

    Raises:
        ConfigError: a method and the model do not fit together.
    """

    def __init__(
        self,
        config: BenchConfig,
        builder: Builder,
        prepared: Prepared,
        journal: Journal,
        watcher: RunWatcher,
        folder: Path,
        start: Start | None,
        stack: ExitStack,
        began: float,
    ) -> None:
        self.unavailable: dict[str, str] = {}  # methods that cannot run here, or stopped on the way, and why
        self.versions: dict[str, str] = {}  # of other engines
        self.notes: list[str] = []
        self._config, self._builder, self._prepared = config, builder, prepared
        self._journal, self._watcher = journal, watcher
        self._limits = prepared.limits()
        self._answers = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-bench-")))
        self._runners: dict[tuple[str, Cell | None], Runner] = {}  # a cell where recorded answers are its own
        self._done = {(t.method, t.cell, t.group, t.repeat) for t in journal.trials}
        self._others: dict[str, OtherRunner] = {}
        self._turn = 0
        self._began = began
        self._points = interleaved(prepared.groups, config.repeats)
        self._build(folder, start, stack)
        left = sum(self._wanted(m, *pair) for point in self._points for pair in point for m in config.methods)
        self.total = left + len(self._done)

    # -- building

    def _build(self, folder: Path, start: Start | None, stack: ExitStack) -> None:
        """Every method's runner, so that what cannot be is found before the first trial."""
        for method in self._config.methods:
            self._watcher.stage(f"preparing {method.name}")
            if not method.own:
                self._start(method, folder, start, stack)
            elif not records_answers(method):
                self._runners[method.name, None] = self._builder.runner(method, self._limits)
        gc.collect()
        gc.freeze()  # what is there now stays: no collection between trials looks at it again
        stack.callback(gc.unfreeze)

    def _start(self, method: Method, folder: Path, start: Start | None, stack: ExitStack) -> None:
        """Another engine, for the cells that it can run."""
        try:
            if start is None:
                raise Unavailable(f"nothing here starts {method.engine}")
            runner = start(method, folder, list(self._prepared.groups), self._limits)
        except (Unavailable, ConfigError) as error:
            self.unavailable[method.name] = str(error)
            return
        stack.callback(runner.close)
        self._runners[method.name, None] = self._others[method.name] = runner
        self.versions[method.engine] = runner.version

    @property
    def ran(self) -> set[str]:
        """Methods with a trial."""
        return {trial.method for trial in self._journal.trials}

    def llm(self, method: Method) -> LLM:
        """The engine of one of our own methods."""
        runner = self._runners[method.name, None]
        assert isinstance(runner, EngineRunner)
        return runner.llm

    def _runner(self, method: Method, cell: Cell) -> Runner:
        if not records_answers(method):
            return self._runners[method.name, None]
        if (method.name, cell) not in self._runners:
            answers = str(self._recorded(method, cell))
            self._runners[method.name, cell] = self._builder.runner(method, self._limits, answers)
        return self._runners[method.name, cell]

    def _recorded(self, method: Method, cell: Cell) -> Path:
        """A file of what the target says to the cell's prompts, asked in the cell's own batches."""
        from ..drafters.synthetic import write_answers

        kind = (method.dtype, method.application)
        own = [m for m in self._config.methods if m.own and m.plain]
        plain = next(m for m in own if (m.dtype, m.application) == kind)
        number = list(self._prepared.groups).index(cell)
        path = self._answers / f"{method.dtype}-{own.index(plain)}-{number}.jsonl"
        if path.exists():
            return path
        self._watcher.stage(f"recording the target's answers to {cell.workload}")
        pairs: list[tuple[tuple[int, ...], list[int]]] = []
        for group in self._prepared.groups[cell]:
            trial = self._runners[plain.name, None].run(group, 0)
            if trial.error:
                raise ConfigError(f"method {method.name}", f"plain decoding failed ({trial.error})", "see its error")
            pairs += zip([p.ids for p in group.prompts], trial.outputs, strict=True)
        write_answers(path, pairs)
        return path

    # -- measuring

    def run(self) -> bool:
        """All trials that are not done yet. Returns whether they were interrupted."""
        try:
            for point in self._points:
                self._run_point(point)
        except KeyboardInterrupt:
            return True
        return False

    def _wanted(self, method: Method, group: Group, repeat: int) -> bool:
        done = (method.name, group.cell, group.index, repeat) in self._done
        if done or method.name in self.unavailable:
            return False
        return method.own or self._others[method.name].refuses(group.cell) is None

    def _run_point(self, point: Sequence[tuple[Group, int]]) -> None:
        warm: set[str] = set()
        for group, repeat in point:
            order = rotated([m for m in self._config.methods if m.name not in self.unavailable], self._turn)
            self._turn += 1
            wanted = [method for method in order if self._wanted(method, group, repeat)]
            if wanted and self._late():  # here and not between methods: what is compared stays complete
                return
            for method in wanted:
                self._trial(method, group, repeat, warm)

    def _trial(self, method: Method, group: Group, repeat: int, warm: set[str]) -> None:
        self._watcher.trial(len(self._journal.trials), self.total, group, method)
        try:
            runner = self._runner(method, group.cell)
            if method.name not in warm:
                self._warm_up(runner, group)
                warm.add(method.name)
            trial = runner.run(group, repeat)
        except Unavailable as error:
            log.warning("%s: %s", method.name, error)
            self.unavailable[method.name] = str(error)
            return
        self._done.add((method.name, group.cell, group.index, repeat))
        self._journal.add(trial)

    def _warm_up(self, runner: Runner, group: Group) -> None:
        try:
            runner.warm_up(group, min(WARM_UP_TOKENS, group.cell.max_new_tokens))
        except Unavailable:
            raise
        except Exception as error:  # the trial that follows will meet and record it
            log.warning("%s failed in its warm-up", runner.method.name, exc_info=error)

    def _late(self) -> bool:
        limit = self._config.time_limit_s
        if limit is None or perf_counter() - self._began < limit:
            return False
        note = f"stopped after {limit:g} s, with {len(self._journal.trials)} of {self.total} trials done"
        self.notes += [note] if note not in self.notes else []
        return True
