"""The trials of a run: every method's runner, and each (method, group, repeat) that is not done yet.

Trials do not see each other's text: prefix caches and drafters' memories are emptied before each. What a draft budget
has learned of costs and acceptance stays, as in an engine that has run for a while.
"""

from __future__ import annotations

import gc
import logging
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import torch

from .. import zoo
from ..core.errors import ConfigError
from ..core.model_spec import parse_model
from ..llm import LLM
from ..network.loader import resolve_folder
from .config import BenchConfig, Watcher
from .journal import Journal
from .measure import Builder, EngineRunner, Group, Limits
from .methods import drafter_config, records_answers
from .peers import PEERS, Peer, PeerError, PeerResult
from .peers import available as peer_available
from .records import PLAIN, Cell, Method, Trial
from .schedule import Prepared, interleaved, rotated

log = logging.getLogger(__name__)

WARM_UP_TOKENS = 16


class PeerRunner:
    """A mode of a peer, paused while others run.

    Raises:
        PeerError: it does not start, or failed; then it will not run again.
    """

    def __init__(self, method: Method, folder: Path, draft: Path | None, limits: Limits, max_batch: int) -> None:
        self.method = method
        room = limits.max_model_len
        self.peer = Peer(
            method, folder, draft, threads=torch.get_num_threads(), max_model_len=room, max_batch=max_batch
        )
        self.peer.pause()

    def warm_up(self, group: Group, max_new_tokens: int) -> None:
        """Run a group without counting it."""
        self._ask(group, max_new_tokens)

    def run(self, group: Group, repeat: int) -> Trial:
        """One trial."""
        most = group.cell.max_new_tokens
        result = self._ask(group, most)
        finish = ["length" if len(ids) >= most else "stop" for ids in result.outputs]
        facts = vars(result) | {"ttft_ms": result.ttft_ms or [], "finish": finish, "passes": result.passes}
        return replace(group.blank(self.method.name, repeat), **facts)

    def _ask(self, group: Group, max_new_tokens: int) -> PeerResult:
        try:
            return self.peer.run([p.ids for p in group.prompts], max_new_tokens, group.cell.ignore_eos)
        finally:
            self.peer.pause()


Runner = EngineRunner | PeerRunner


def cannot_run(method: Method, cell: Cell) -> str | None:
    """Why a method has no place in a cell; None where it has."""
    if method.own:
        return None
    if cell.temperature > 0:
        return "peers run greedily: their sampling has other noise"
    most = PEERS[method.engine].modes[PLAIN if method.plain else method.drafter].max_batch
    return f"this mode takes {most} prompt at a time" if most is not None and cell.batch > most else None


class Trials:
    """All trials of a run.

    Args:
        config: of the run.
        builder: makes the engines.
        prepared: the groups of prompts.
        journal: takes the trials; those that it has are not run again.
        watcher: who is told how far it is.
        folder: of the model, for peers.
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
        watcher: Watcher,
        folder: Path,
        stack: ExitStack,
        began: float,
    ) -> None:
        self.unavailable: dict[str, str] = {}  # methods that cannot run here, or stopped on the way, and why
        self.versions: dict[str, str] = {}  # of peers
        self.notes: list[str] = []
        self._config, self._builder, self._prepared = config, builder, prepared
        self._journal, self._watcher = journal, watcher
        self._limits = prepared.limits()
        self._answers = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-bench-")))
        self._runners: dict[tuple[str, Cell | None], Runner] = {}  # a cell where recorded answers are its own
        self._done = {(t.method, t.cell, t.group, t.repeat) for t in journal.trials}
        self._turn = 0
        self._began = began
        self._points = interleaved(prepared.groups, config.repeats)
        self._build(folder, stack)
        left = sum(self._wanted(m, *pair) for point in self._points for pair in point for m in config.methods)
        self.total = left + len(self._done)

    # -- building

    def _build(self, folder: Path, stack: ExitStack) -> None:
        """Every method's runner, so that what cannot be is found before the first trial."""
        for method in self._config.methods:
            self._watcher.stage(f"preparing {method.name}")
            if not method.own:
                self._start_peer(method, folder, stack)
            elif not records_answers(method):
                self._runners[method.name, None] = self._builder.runner(method, self._limits)
        gc.collect()
        gc.freeze()  # what is there now stays: no collection between trials looks at it again
        stack.callback(gc.unfreeze)

    def _start_peer(self, method: Method, folder: Path, stack: ExitStack) -> None:
        reasons = {cell: cannot_run(method, cell) for cell in self._prepared.groups}
        batches = [cell.batch for cell, reason in reasons.items() if reason is None]
        why = peer_available(method.engine) or (None if batches else next(iter(reasons.values())))
        if why is None:
            try:
                runner = PeerRunner(method, folder, draft_folder(self._config), self._limits, max(batches))
            except (PeerError, ConfigError) as error:
                why = str(error)
            else:
                stack.callback(runner.peer.close)
                self._runners[method.name, None] = runner
                self.versions[method.engine] = runner.peer.version
        if why is not None:
            self.unavailable[method.name] = why

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
        return not done and method.name not in self.unavailable and cannot_run(method, group.cell) is None

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
        except PeerError as error:
            log.warning("%s: %s", method.name, error)
            self.unavailable[method.name] = str(error)
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
        if limit is None or perf_counter() - self._began < limit:
            return False
        note = f"stopped after {limit:g} s, with {len(self._journal.trials)} of {self.total} trials done"
        self.notes += [note] if note not in self.notes else []
        return True


def draft_folder(config: BenchConfig) -> Path | None:
    """The draft model for peers: the embedded target's own, or the one that a method of ours names."""
    entry = next((e for e in zoo.available() if e.name == parse_model(config.model).name), None)
    names = [entry.draft if entry is not None else None]
    names += [getattr(drafter_config(method), "model", None) for method in config.methods if method.own]
    name = next(filter(None, names), None)
    return Path(resolve_folder(name)) if name else None
