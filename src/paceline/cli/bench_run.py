"""``paceline bench`` itself: methods interleaved on the same prompts, then tables and a page."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..bench import config as settings
from ..bench import methods as known
from ..bench.config import BenchConfig, log_lines, numbers
from ..bench.report import FILES
from ..bench.report.terminal import render
from ..bench.run import Run
from ..bench.summary import Summary
from ..core.errors import ConfigError
from ..core.model_spec import parse_model
from .console import stderr, stdout
from .options import takes
from .session import DEFAULT_MODEL

MODEL_HELP = (
    "Embedded model, folder, hub name, or random:LAYERSxWIDTHxFFxVOCAB[xHEADSxKVHEADS] (a random Llama). "
    "stretch:MODEL,times=N is one of these with layers that cost N times as much and the same tokens."
)
DTYPE_HELP = "auto (the checkpoint's), bfloat16, float32, float64, int8, q8_0 or q4_0."
THREADS_HELP = "CPU threads; default: torch's choice."
Many = list[str] | None
Text = str | None
Count = int | None
CELL_VALUES = {"temperature": (float, 0), "top_k": (int, 0)}  # kind and least, where it is not a whole number above 0
INTERRUPTED = 130  # 128 + SIGINT, as shells report it


@dataclass(frozen=True, kw_only=True)
class RunSize:
    """How much is measured where the user does not say."""

    prompts: int
    repeats: int
    max_new_tokens: int | None  # None: each workload's own
    time_limit_s: float | None


FULL = RunSize(prompts=20, repeats=3, max_new_tokens=None, time_limit_s=None)
QUICK = RunSize(prompts=8, repeats=2, max_new_tokens=48, time_limit_s=110.0)


def _option(help: str, default: Any = None, **more: str) -> Any:
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The flags of ``paceline bench``. None: by the size of the run, or as `BenchConfig` has it."""

    model: str = _option(MODEL_HELP, DEFAULT_MODEL)
    workload: Many = _option(
        "What to ask; repeat it. `paceline bench workloads` lists the names. Default: all that come with Paceline.",
        metavar="NAME|PATH",
    )
    data: Text = _option("Folder of workloads that do not come along, and of full versions.", metavar="DIR")
    prompts: Count = _option(f"Prompts of each workload [default: {FULL.prompts}]", metavar="N")
    prompt_tokens: Count = _option("Length of a random model's prompts.", metavar="N")
    max_new_tokens: Text = _option("Tokens of an answer [default: the workload's own]", metavar="N,N,..")
    method: Many = _option(
        "A drafter with its settings, such as 'fast=ngram,depth=4;budget=8'; repeat it. Plain decoding always runs. "
        "Default: every drafter that fits the model.",
        metavar="[NAME=]DRAFTER[;OPTION=VALUE]..",
    )
    batch: Text = _option("Prompts at once [default: 1]", metavar="N,N,..")
    temperature: Text = _option("Of sampling; 0 is greedy [default: 0]", metavar="T,T,..")
    top_k: Text = _option("Likeliest tokens that sampling chooses from [default: 0, all]", metavar="N,N,..")
    repeats: Count = _option(f"Times each prompt runs [default: {FULL.repeats}]", metavar="N")
    seed: int = _option("Of the choice of prompts and of sampling.", 0)
    dtype: str = _option(DTYPE_HELP, "auto")
    device: str = _option("cpu or cuda.", "cpu")
    threads: Count = _option(THREADS_HELP)
    ignore_eos: bool | None = _option(
        "Go on to the full length, so that all methods give the same number of tokens [default: of a random model]",
        flag="--ignore-eos/--stop-at-eos",
    )
    check: bool = _option("Compare every method's token ids with plain decoding's.", True)
    quick: bool = _option(
        f"{QUICK.prompts} prompts, {QUICK.repeats} repeats, {QUICK.max_new_tokens} new tokens: done within three "
        "minutes.",
        False,
        flag="--quick",
    )
    title: str = _option("Of the report.", "")
    out: Text = _option("Write report.json, report.html and report.md there.", metavar="DIR")
    overwrite: bool = _option("Measure again where --out holds a report.", False, flag="--overwrite")


@takes(options=RunOptions)
def bench(context: typer.Context, options: dict[str, Any]) -> None:
    """Measure the speed-up on this machine: per task and method, against the memory bandwidth.

    Without a subcommand, all methods run interleaved on the same prompts, and a table with paired speed-ups and their
    95 % intervals is shown; with --out a page with plots is written. Ctrl-C keeps the trials so far.
    """
    if context.invoked_subcommand is not None:
        return
    asked = RunOptions(**options)
    size = QUICK if asked.quick else FULL
    chosen = known.parse_methods(asked.method, asked.dtype) if asked.method else None
    cells: dict[str, Any] = {
        field_: numbers(f"--{name.replace('_', '-')}", text, *CELL_VALUES.get(name, (int, 1)))
        for field_, name in settings.NAMES.items()
        if (text := options.get(name)) is not None
    }
    config = BenchConfig(
        methods=tuple(known.with_plain(chosen or known.default_methods(asked.model, asked.dtype))),
        workloads=tuple(asked.workload or ()),
        data=Path(asked.data) if asked.data else None,
        prompts=size.prompts if asked.prompts is None else asked.prompts,
        repeats=size.repeats if asked.repeats is None else asked.repeats,
        time_limit_s=size.time_limit_s,
        **{"max_new_tokens": (size.max_new_tokens,), **cells},
        **{name: options[name] for name in ("model", "seed", "device", "threads", "ignore_eos", "check", "title")},
        **_prompt_tokens(asked.model, asked.prompt_tokens),
    )
    out, console = Path(asked.out) if asked.out else None, stdout()
    command = ["paceline", *(a for a in sys.argv[1:] if a != "--overwrite")]
    with watching() as progress:
        report = Run(config, out=out, overwrite=asked.overwrite, command=command, progress=progress).execute()
    if report.trials:
        console.print(render(Summary(report)))
    for name in FILES if out else ():
        console.print(f"{out}/{name}", markup=False, highlight=False)
    if report.interrupted:
        stderr().print("interrupted: this is what was measured so far", style="yellow", markup=False)
        raise typer.Exit(INTERRUPTED)
    if any(not e.passed and report.is_own(e.method) for e in report.exactness):
        raise typer.Exit(1)


def _prompt_tokens(model: str, given: int | None) -> dict[str, Any]:
    if given is None:
        return {}
    if not parse_model(model).random:
        raise ConfigError(
            f"--prompt-tokens {given}", "only a random model's prompts have a length of choice", "leave it out"
        )
    return {"prompt_tokens": given}


@contextmanager
def watching() -> Iterator[settings.Progress]:
    """A bar on stderr, or lines where stderr is no terminal."""
    console = stderr()
    if not console.is_terminal:
        yield log_lines(console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Drawn between trials alone: a thread that draws would take time from what is measured.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("starting", total=None)

        def tell(text: str, trials: tuple[int, int] | None) -> None:
            done, total = trials or (None, None)
            bar.update(task, description=text, completed=done, total=total, refresh=True)

        yield tell
