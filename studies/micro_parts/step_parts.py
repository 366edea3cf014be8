"""Where the time of a step goes: milliseconds of each of its parts, over a real run.

The parts are timed from outside, by taking the place of the functions and methods that a round is made of: the engine
knows nothing of it. A part's own time is without the parts inside it, and is split into compiled calls and everything
else ("host"). The timing itself costs about a third of a microsecond a call, some 5 microseconds a step.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from statistics import median
from time import perf_counter
from typing import Any

import torch

from paceline import kernels
from paceline.api.llm import LLM
from paceline.core.errors import CapabilityError, ConfigError
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine

# part -> names in the modules of a round's classes
FUNCTIONS = {
    "pack": ("lay_out", "embed"),
    "head": ("read_logits",),
    "verdict": ("decide",),
    "pass and verdict": ("decide_compiled",),
    "keep": ("keep",),
    "streams": ("choose_carriers", "count_streams", "read_streams", "read_compiled"),
}
# part -> methods, from the engine on; of those a round has some
METHODS = {
    "schedule": ("scheduler.schedule",),
    "budget": ("budget.plan", "budget.observe"),
    "propose": ("round.guard.draft", "round.sessions.grow"),
    "passes": ("round.target.run_layers",),
    "emit": ("round.emitter.emit",),
    "observe": ("round.guard.observe",),
}
COMPILED = (
    *("pl_run_layers", "pl_logits", "pl_roll", "pl_grow", "pl_sample", "pl_choose", "pl_choose_streams", "pl_top"),
    *("pl_heads", "pl_keys", "pl_recall"),
)
PARTS = (
    *("schedule", "budget", "propose", "pack", "passes", "head", "verdict", "pass and verdict"),
    *("emit", "keep", "streams", "observe", "rest"),
)


@dataclass(frozen=True, kw_only=True)
class PartTime:
    """Medians over steps, in ms."""

    part: str
    host_ms: float
    native_ms: float


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """One drafter at one batch size. Steps that compute prompts are left out."""

    batch: int
    steps: int  # behind the medians
    tokens: float  # a step, over the batch
    step_ms: float
    host_ms: float  # of a step, outside of compiled calls
    parts: tuple[PartTime, ...]


@dataclass(slots=True)
class Stopwatch:
    """Adds up each part's own time, host and compiled apart, step by step."""

    running: bool = False
    steps: list[dict[tuple[str, bool], float]] = field(default_factory=list)
    _now: defaultdict[tuple[str, bool], float] = field(default_factory=lambda: defaultdict(float))
    _inside: list[tuple[str, float]] = field(default_factory=list)  # open parts, and what their own parts took

    def timed(self, part: str, call: Callable[..., Any], compiled: bool = False) -> Callable[..., Any]:
        """``call``, its time added to ``part``; compiled calls count for the part that they are made in."""

        @functools.wraps(call, assigned=())
        def run(*args: Any, **options: Any) -> Any:
            if not self.running:
                return call(*args, **options)
            name = self._inside[-1][0] if compiled and self._inside else part
            self._inside.append((name, 0.0))
            began = perf_counter()
            try:
                return call(*args, **options)
            finally:
                took = perf_counter() - began
                self._now[name, compiled] += took - self._inside.pop()[1]
                if self._inside:
                    outer, inner = self._inside[-1]
                    self._inside[-1] = (outer, inner + took)

        return run

    def step(self, engine: Engine) -> None:
        """One step of the engine, recorded where it computes no prompt."""
        decoding = all(s.pending == 1 for s in engine.scheduler.running) and not engine.scheduler.waiting
        self._now.clear()
        self.running = decoding
        try:
            self.timed("rest", engine.step)()
        finally:
            self.running = False
        if decoding:
            self.steps.append(dict(self._now))


@contextmanager
def compiled_calls(watch: Stopwatch) -> Iterator[None]:
    """Compiled calls in here are timed.

    Raises:
        CapabilityError: nothing is compiled here.
    """
    library = kernels.library()
    if library is None:
        raise CapabilityError(
            "the parts of a step", kernels.unavailable() or "no compiled layers", "use a CPU with g++"
        )
    before = {name: getattr(library, name) for name in COMPILED}
    for name, call in before.items():
        setattr(library, name, watch.timed("rest", call, compiled=True))
    try:
        yield
    finally:
        for name, call in before.items():
            setattr(library, name, call)


@contextmanager
def _watched(engine: Engine, watch: Stopwatch) -> Iterator[None]:
    modules = [import_module(kind.__module__) for kind in type(engine.round).__mro__ if kind is not object]
    places: list[tuple[Any, str, str]] = []
    for part, names in FUNCTIONS.items():
        places += [(module, name, part) for module in modules for name in names if hasattr(module, name)]
    for part, paths in METHODS.items():
        for path in paths:
            *owners, name = path.split(".")
            whole: Any = engine
            owner = functools.reduce(lambda found, step: getattr(found, step, None), owners, whole)
            if owner is not None:  # rounds differ in what they are made of
                places.append((owner, name, part))
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in places]
    try:
        for owner, name, part in places:
            vars(owner)[name] = watch.timed(part, getattr(owner, name))  # also where the owner is frozen
        yield
    finally:
        for owner, name, own in before:
            vars(owner)[name] = own
            if own is None:
                del vars(owner)[name]


def measure(llm: LLM, watch: Stopwatch, groups: Sequence[Sequence[Sequence[int]]], params: SamplingParams) -> StepParts:
    """Answer prompts, a group of token ids at once, and time the parts of every step that computes no prompt.

    Raises:
        CapabilityError: nothing is compiled here.
        ConfigError: every step computed a prompt.
    """
    engine = llm.engine
    watch.steps.clear()
    tokens: list[int] = []
    # As `LLM.generate` runs it.
    with engine.lock, torch.inference_mode(), compiled_calls(watch), _watched(engine, watch):
        for prompts in groups:
            engine.forget()  # prompts come again at other batch sizes
            live = [engine.live[engine.submit(ids, params)] for ids in prompts]
            while engine.busy:
                known, said = len(watch.steps), _said(live)
                watch.step(engine)
                if len(watch.steps) > known:
                    tokens.append(_said(live) - said)
    if not watch.steps:
        raise ConfigError("the parts of a step", "no step only decoded", "ask for answers of two tokens or more")
    totals = [sum(step.values()) * 1e3 for step in watch.steps]
    hosts = [sum(t for (_, compiled), t in step.items() if not compiled) * 1e3 for step in watch.steps]
    parts = tuple(
        PartTime(part=part, host_ms=_median(watch, part, False), native_ms=_median(watch, part, True)) for part in PARTS
    )
    return StepParts(
        batch=max(map(len, groups)),
        steps=len(watch.steps),
        tokens=sum(tokens) / max(1, len(tokens)),
        step_ms=median(totals),
        host_ms=median(hosts),
        parts=parts,
    )


def _said(live: Sequence[Any]) -> int:
    return sum(len(s.output_ids) for request in live for s in request.sequences)


def _median(watch: Stopwatch, part: str, compiled: bool) -> float:
    return median(step.get((part, compiled), 0.0) for step in watch.steps) * 1e3
