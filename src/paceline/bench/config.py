"""What a benchmark is asked to measure."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from ..core.errors import ConfigError
from ..core.model_spec import parse_model
from ..core.sampling import SamplingParams
from .records import Method

N = TypeVar("N", int, float)
LINE_EVERY_S = 10.0  # between lines of progress
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
    methods: tuple[Method, ...]  # plain decoding among them
    workloads: tuple[str, ...] = ()  # names or paths; empty: all that come with the package
    data: Path | None = None  # folder of the workloads that do not
    prompts: int = 10  # of each workload
    batches: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    top_ks: tuple[int, ...] = (0,)  # of sampling; 0: all tokens
    contexts: tuple[int | None, ...] = (None,)  # tokens that prompts are brought to (see `Run`); None: as they are
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
        self._check_numbers()
        if not self.methods:
            raise ConfigError("no method", "nothing would be measured", "name one with --method")
        peer = next((m for m in self.methods if not m.own), None)
        if peer is not None and parse_model(self.model).stretch > 1:  # it would be measured on a smaller model
            wrong = "other engines cannot stretch a model"
            raise ConfigError(f"{peer.name} with model {self.model}", wrong, "leave one of the two out")
        if self.random and self.workloads:
            raise ConfigError(
                f"workload {self.workloads[0]} with model {self.model}",
                "a random model has no tokenizer, so its prompts are random ids",
                "leave the workload out",
            )
        for name in self.workloads:
            if self.workloads.count(name) > 1:
                raise ConfigError(f"workload {name}", "it is named twice", "name it once")

    def _check_numbers(self) -> None:
        """Every setting of a cell has values of its range, none of them twice; counts are 1 or more."""
        counts = {name: (getattr(self, name),) for name in ("prompts", "repeats", "prompt_tokens")}
        counts |= {NAMES[name]: getattr(self, name) for name in ("batches", "contexts", "max_new_tokens")}
        for name, values in counts.items():
            for value in values:
                if value is not None and value < 1:
                    raise ConfigError(f"{name}={value}", "nothing would be measured", "give 1 or more")
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature)
        for top_k in self.top_ks:
            SamplingParams(top_k=top_k)
        for field_, name in NAMES.items():
            values = getattr(self, field_)
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"{name}={values}", "a value is there twice, or none is", "give each once")

    @property
    def random(self) -> bool:
        """Whether the model is one of random weights."""
        return parse_model(self.model).random

    @property
    def ignores_eos(self) -> bool:
        """Whether answers go on to their full length."""
        chosen = self.ignore_eos
        return self.random or any(not m.own for m in self.methods) if chosen is None else chosen


Progress = Callable[[str, tuple[int, int] | None], None]
"""Is told what a run does now, and, where it is a trial, how many are done of how many."""


def log_lines(console: Console, style: str | None = None, clock: Callable[[], float] = time.monotonic) -> Progress:
    """Progress in a log: a line for each stage, and one about trials now and then, with the time left."""
    last = first = clock()

    def tell(text: str, trials: tuple[int, int] | None) -> None:
        nonlocal last, first
        now = clock()
        if trials is not None:
            done, total = trials
            first = first if done else now
            if now - last < LINE_EVERY_S:
                return
            left = duration((now - first) / max(done, 1) * (total - done))
            text = f"{done} of {total} trials, {text}, about {left} left"
        last = now
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    return tell


def duration(seconds: float) -> str:
    """``1 min 5 s``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def numbers(flag: str, text: str, kind: Callable[[str], N] = int, least: float = 1) -> tuple[N, ...]:
    """``1,8`` as numbers; ``flag`` is what the error names."""
    try:
        found = tuple(kind(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(value >= least for value in found):
        wrong = f"not {'whole ' if kind is int else ''}numbers of {least:g} or more, with commas between"
        raise ConfigError(f"{flag} {text}", wrong, f"write {flag} 1,8")
    return found
