"""What a benchmark is asked to measure."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from ..core.errors import ConfigError
from ..core.model_spec import parse_model
from ..core.options import option
from .records import Method

N = TypeVar("N", int, float)
LINE_EVERY_S = 10.0  # between lines of progress
PROMPT_TOKENS = 64  # of a random model's prompts
MODEL_HELP = (
    "Embedded model, folder, hub name, or random:LAYERSxWIDTHxFFxVOCAB[xHEADSxKVHEADS] (a random Llama). "
    "stretch:MODEL,times=N is one of these with layers that cost N times as much and the same tokens."
)
THREADS_HELP = "CPU threads; default: torch's choice."


def _many(flag: str, default: Any, help: str, kind: type = int, least: float = 1, **more: Any) -> Any:
    """A setting that takes several values, none below ``least``; on the command line one text with commas in it."""
    letter = "T" if kind is float else "N"
    rules = {"flag": f"--{flag}", "metavar": f"{letter},{letter},..", "least": least, **more}
    return option(default, help=help, read=partial(numbers, kind=kind, least=least), **rules)


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


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What to measure; the flags of ``paceline bench`` are made of its fields."""

    model: str = option(help=MODEL_HELP)
    methods: tuple[Method, ...] = option(help="plain decoding among them", cli=False)
    workloads: tuple[str, ...] = option(
        (),
        help="What to ask; repeat it. `paceline bench workloads` lists the names. "
        "Default: all that come with Paceline.",
        flag="--workload",
        metavar="NAME|PATH",
    )
    data: Path | None = option(
        None, help="Folder of workloads that do not come along, and of full versions.", metavar="DIR"
    )
    prompts: int = option(20, help="Prompts of each workload.", metavar="N")
    prompt_tokens: int | None = option(
        None, help=f"Length of a random model's prompts (default: {PROMPT_TOKENS}).", metavar="N"
    )
    max_new_tokens: int | None = option(None, help="Tokens of an answer (default: the workload's own).", metavar="N")
    batches: tuple[int, ...] = _many("batch", (1,), "Prompts at once.")
    temperatures: tuple[float, ...] = _many("temperature", (0.0,), "Of sampling; 0 is greedy.", float, 0)
    top_ks: tuple[int, ...] = _many("top-k", (0,), "Likeliest tokens that sampling chooses from; 0: all.", least=0)
    contexts: tuple[int | None, ...] = _many(
        "context", (None,), "tokens that prompts are brought to (see `Run`); None: as they are", cli=False
    )
    repeats: int = option(3, help="Times each prompt runs.", metavar="N")
    seed: int = option(0, help="Of the choice of prompts and of sampling.")
    device: str = option("cpu", help="cpu or cuda.")
    threads: int | None = option(None, help=THREADS_HELP)
    ignore_eos: bool | None = option(
        None,
        help="Go on to the full length, so that all methods give the same number of tokens "
        "(default: of a random model).",
        flag="--ignore-eos/--stop-at-eos",
    )
    check: bool = option(True, help="Compare every method's token ids with plain decoding's.")
    time_limit_s: float | None = option(None, help="no trial is begun after that long", cli=False)
    title: str = option("", help="Of the report.")
    applications: Mapping[str, str] = field(default_factory=dict, metadata={"cli": False})  # folders of trained sets

    def __post_init__(self) -> None:
        for name in ("prompts", "repeats", "prompt_tokens", "max_new_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name}={value}", "nothing would be measured", "give 1 or more")
        if not self.methods:
            raise ConfigError("no method", "nothing would be measured", "name one with --method")
        for spec in fields(self):
            values, least = getattr(self, spec.name), spec.metadata.get("least")
            if least is None:
                continue
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"{spec.name}={values}", "a value is there twice, or none is", "give each once")
            if any(value is not None and value < least for value in values):
                raise ConfigError(f"{spec.name}={values}", "one is too small", f"give {least:g} or more")
        peer = next((m for m in self.methods if not m.own), None)
        if peer is not None and parse_model(self.model).stretch > 1:  # it would be measured on a smaller model
            wrong = "other engines cannot stretch a model"
            raise ConfigError(f"{peer.name} with model {self.model}", wrong, "leave one of the two out")
        if self.random and self.workloads:
            wrong = "a random model has no tokenizer, so its prompts are random ids"
            raise ConfigError(f"workload {self.workloads[0]} with model {self.model}", wrong, "leave the workload out")
        if self.prompt_tokens is not None and not self.random:
            wrong = "only a random model's prompts have a length of choice"
            raise ConfigError(f"--prompt-tokens {self.prompt_tokens}", wrong, "leave it out")
        if twin := next((name for name in self.workloads if self.workloads.count(name) > 1), None):
            raise ConfigError(f"workload {twin}", "it is named twice", "name it once")

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
    """Progress in a log: a line for each stage, and one about trials now and then."""
    last = clock()

    def tell(text: str, trials: tuple[int, int] | None) -> None:
        nonlocal last
        if trials is not None:
            if clock() - last < LINE_EVERY_S:
                return
            text = f"{trials[0]} of {trials[1]} trials, {text}"
        last = clock()
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    return tell
