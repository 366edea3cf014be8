"""Peers in a run of the benchmark: how they are started and written, and how their figures stand beside ours."""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline.api.llm import LLM
from paceline.bench import report as say
from paceline.bench.config import BenchConfig
from paceline.bench.measure import EngineRunner, Group
from paceline.bench.methods import drafter_of, parse_method
from paceline.bench.records import PLAIN, Cell, Method, Report, Trial
from paceline.bench.run import Run
from paceline.bench.summary import Interval, Summary, best, overall_ratio
from paceline.bench.workloads import Workload
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.options import named_values, read, suggest
from paceline.core.sampling import SamplingParams
from paceline.draft import registry
from paceline.weights import zoo
from paceline.weights.source import resolve_folder

from . import near_ties
from .filled import encoded
from .peers import IN_BLOCKS, PEERS, Peer, PeerError, PeerResult, available, check, kind_of
from .stretched import write_untied

log = logging.getLogger(__name__)

PEER_TEXT = re.compile(r"([^=,:;/]+=)?[^=,:;/]+/")  # a name, then ENGINE/


class PeerRunner:
    """A mode of a peer in a run, paused while others run.

    Raises:
        PeerError: it does not start, or failed; then it will not run again.
        ConfigError: it has no place in any of the cells.
    """

    def __init__(
        self, method: Method, folder: Path, cells: Sequence[Cell], longest: int, draft: Path | None = None
    ) -> None:
        self.method = method
        reason = available(method.engine)
        if reason:
            raise PeerError(reason)
        refused = [self.refuses(cell) for cell in cells]
        batches = [cell.batch for cell, why in zip(cells, refused, strict=True) if why is None]
        if not batches:
            raise PeerError(str(refused[0]))
        self.peer = Peer(
            method,
            folder,
            draft,
            threads=torch.get_num_threads(),
            max_model_len=longest,
            max_batch=max(batches),
        )
        self.version = self.peer.version
        self.peer.pause()

    def refuses(self, cell: Cell) -> str | None:
        """Why it has no place in a cell; None where it has."""
        if cell.temperature > 0:
            return "peers run greedily: their sampling has other noise"
        most = PEERS[self.method.engine].modes[PLAIN if self.method.plain else self.method.drafter].max_batch
        return f"this mode takes {most} prompt at a time" if most is not None and cell.batch > most else None

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

    def close(self) -> None:
        """End its process."""
        self.peer.close()

    def _ask(self, group: Group, max_new_tokens: int) -> PeerResult:
        try:
            return self.peer.run([p.ids for p in group.prompts], max_new_tokens, group.cell.ignore_eos)
        finally:
            self.peer.pause()


class PeerRun(Run):
    """A run in which modes of peers take their turns.

    Their draft model is the embedded target's own, or the one that a method of ours names. A peer that is not there, or
    that fails on the way, is named in the report and stops nothing. Weights in blocks are written anew for them
    (`stretched.write_untied`), so that they have our weights.
    """

    peers: dict[str, PeerRunner]
    encode = staticmethod(encoded)  # prompts of studies may be brought to a context

    def __init__(self, config: BenchConfig, **options: Any) -> None:
        super().__init__(config, **options)
        self.unavailable: dict[str, str] = {}  # methods that cannot run here, or stopped on the way, and why
        self.versions: dict[str, str] = {}  # of other engines

    def build(self, folder: Path, stack: ExitStack) -> None:
        self.peers = {}
        entry = next((e for e in zoo.available() if e.name == self.config.model), None)
        names = [entry.draft if entry is not None else None]
        configs = [registry.parse(drafter_of(method)) for method in self.config.methods if method.ours]
        names += [getattr(config, "model", None) for config in configs]
        name = next(filter(None, names), None)
        draft = Path(resolve_folder(name)) if name else None
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-")))
        for method in self.config.methods:
            if method.ours:
                continue
            try:
                target, own_draft = self._written(method, folder, draft, scratch)
                peer = PeerRunner(method, target, list(self.groups), max(map(max, self.lengths)), own_draft)
            except (PeerError, PacelineError) as error:
                self.unavailable[method.name] = str(error)
                continue
            stack.callback(peer.close)
            self.peers[method.name] = peer
            self.versions[method.engine] = peer.version
        super().build(folder, stack)

    def _written(self, method: Method, folder: Path, draft: Path | None, scratch: Path) -> tuple[Path, Path | None]:
        """The checkpoints that a peer gets for a target and a draft."""
        if method.dtype not in IN_BLOCKS:
            return folder, draft
        for place, written in ((folder, scratch / "target"), (draft, scratch / "draft")):
            if place is not None and not written.exists():
                write_untied(place, written)
        return scratch / "target", None if draft is None else scratch / "draft"

    def llm(self, method: Method) -> LLM:
        """The engine of one of our own methods."""
        runner: EngineRunner = super().runner(method)
        return runner.llm

    def request(self, trial: Trial, index: int) -> tuple[tuple[int, ...], SamplingParams]:
        """Ids and parameters of one sequence of a trial."""
        group = self.groups[trial.cell][trial.group]
        return group.prompts[index].ids, group.params(group.prompts[index])

    def report(self, loaded: Sequence[Workload], target: LLM) -> Report:
        made, ran = super().report(loaded, target), {trial.method for trial in self.trials}
        made.methods = [m for m in made.methods if m.name in ran or m.name not in self.unavailable]
        made.versions |= self.versions
        made.unavailable = self.unavailable
        return made

    def compare(self, report: Report) -> None:
        report.exactness, notes = near_ties.check(report, near_ties.NearTies(self.llm, self.request))
        report.notes += notes

    def runs(self, method: Method, group: Group) -> bool:
        if method.name in self.unavailable:
            return False
        return method.ours or self.peers[method.name].refuses(group.cell) is None

    def runner(self, method: Method) -> Any:
        return super().runner(method) if method.ours else self.peers[method.name]

    def trial(self, method: Method, group: Group, repeat: int, warm: set[str]) -> None:
        try:
            super().trial(method, group, repeat, warm)
        except PeerError as error:
            log.warning("%s: %s", method.name, error)
            self.unavailable[method.name] = str(error)


def peer_methods(engines: Iterable[str], dtype: str = "auto") -> list[Method]:
    """Every mode of these peers that needs no trained head.

    Raises:
        ConfigError: no such peer.
    """
    return [
        Method(name=f"{engine}/{mode}", engine=engine, drafter=mode, dtype=dtype)
        for engine in engines
        for mode, facts in kind_of(engine).modes.items()
        if not facts.head
    ]


def read_methods(texts: Iterable[str], dtype: str = "auto") -> list[Method]:
    """Methods as `bench.methods` reads them, and modes of peers: ``[NAME=]ENGINE/MODE[;OPTION=VALUE]...``.

    Raises:
        ConfigError: no such drafter, peer, mode or option.
    """
    return [_mode(text, dtype) if PEER_TEXT.match(text) else parse_method(text, dtype) for text in texts]


def _mode(text: str, dtype: str) -> Method:
    head, *rest = (part.strip() for part in text.split(";"))
    name, _, body = head.rpartition("=")
    engine, _, mode = body.partition("/")
    modes = kind_of(engine).modes
    if mode not in modes:
        raise ConfigError(f"--method {text!r}", f"{engine} has no mode {mode!r}", suggest(mode, modes, "mode"))
    settings = named_values("--method", rest)
    dtype = settings.pop("dtype", dtype)
    values: dict[str, Any] = {key: read(value, int | float | str) for key, value in settings.items()}
    method = Method(name=name or text, engine=engine, drafter=mode, settings=values, dtype=dtype)
    check(method)
    return method


# -- beside ours


def against(summary: Summary, section: Cell) -> dict[str, dict[str, Interval]]:
    """Other engines' plain decoding -> method -> how many times as fast it is, over the section's workloads."""
    rows = summary.of(section)
    cells = list(dict.fromkeys(row.cell for row in rows if row.cell))
    names = list(dict.fromkeys(row.method.name for row in rows))
    peers = [n for n in names if not summary.methods[n].ours and summary.methods[n].plain]
    ratios = {p: {n: overall_ratio(summary, n, p, cells) for n in names if n != p} for p in peers}
    return {peer: {name: ratio for name, ratio in of.items() if ratio is not None} for peer, of in ratios.items()}


def agreement_line(report: Report) -> str | None:
    """How often the peers' ids are ours. Their kernels are their own: a difference is no failure."""
    found = [e for e in report.exactness if not report.is_own(e.method)]
    if not found:
        return None
    same, total = sum(e.identical for e in found), sum(e.sequences for e in found)
    return f"peers' ids equal our plain decoding: {same:,} of {say.count_of(total, 'sequence')}"


def peer_headline(summary: Summary) -> str | None:
    """The best method beside the fastest peer."""
    found = rival(summary)
    if found is None:
        return None
    ours, name, ratio = found
    return f"Against the fastest peer: {ours} is {say.interval(ratio)} times {name}."


def rival(summary: Summary) -> tuple[str, str, Interval] | None:
    """The best method here, the fastest peer, speculative or plain, and how many times as fast it the first is."""
    total = summary.total(summary.main)
    ours, theirs = best(total), max((r for r in total if not r.method.ours), key=lambda r: r.speed or 0.0, default=None)
    if ours is None or theirs is None or not theirs.speed:
        return None
    cells = [r.cell for r in summary.of(ours.section) if r.method.name == theirs.method.name and r.cell]
    ratio = overall_ratio(summary, ours.method.name, theirs.method.name, cells)
    return None if ratio is None else (ours.method.name, theirs.method.name, ratio)
