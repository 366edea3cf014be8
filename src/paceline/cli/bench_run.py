"""``paceline bench`` itself: methods interleaved on the same prompts, then tables and a page."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ..bench import methods as known
from ..bench.config import NAMES, BenchConfig, LogLines, RunWatcher
from ..bench.measure import Group
from ..bench.methods import CELL_SETTINGS, Sweep
from ..bench.records import Method
from ..bench.report.terminal import render
from ..bench.run import Run
from ..core.errors import ConfigError
from ..core.model_spec import parse_model
from .console import stderr, stdout
from .options import takes
from .session import DEFAULT_MODEL

MODEL_HELP = (
    "Embedded model, folder, hub name, or random:LAYERSxWIDTHxFFxVOCAB[xHEADSxKVHEADS] (a random Llama). "
    "stretch:MODEL,times=N is one of these with layers that cost N times as much and the same tokens."
)
DTYPE_HELP = "auto (the checkpoint's), bfloat16, float32, float64 or int8."
THREADS_HELP = "CPU threads; default: torch's choice."
Many = list[str] | None
Text = str | None
Count = int | None
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
    sweep: Many = _option(
        "Run every value: budget=2,8,auto, dtype=float32,bfloat16, ngram.depth=2,8, batch=1,8, context=256; repeat it.",
        metavar="SETTING=V,V,..",
    )
    batch: Text = _option("Prompts at once [default: 1]", metavar="N,N,..")
    context_length: Text = _option(
        "Cut and fill prompts to so many tokens [default: as they are]", metavar="N,N,..", flag="--context"
    )
    temperature: Text = _option("Of sampling; 0 is greedy [default: 0]", metavar="T,T,..")
    top_k: Text = _option("Likeliest tokens that sampling chooses from [default: 0, all]", metavar="N,N,..")
    application: dict[str, str] | None = _option(
        "A trained set that methods may name: 'sql=streams;application=sql'; repeat it for several.",
        metavar="NAME=FOLDER",
    )
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
    out: Text = _option("Write report.json, report.html and report.md there, and a journal.", metavar="DIR")
    resume: bool = _option("Go on with the run in --out that was cut off.", False, flag="--resume")
    overwrite: bool = _option("Start again where --out holds a run.", False, flag="--overwrite")


@takes(options=RunOptions)
def bench(context: typer.Context, options: dict[str, Any]) -> None:
    """Measure the speed-up on this machine: per task and method, against the memory bandwidth.

    Without a subcommand, all methods run interleaved on the same prompts, and a table with paired speed-ups and their
    95 % intervals is shown; with --out a page with plots is written. Ctrl-C keeps the trials so far.
    """
    if context.invoked_subcommand is not None:
        return
    asked = RunOptions(**options)
    sweeps = _sweeps(asked)
    size = QUICK if asked.quick else FULL
    cells: dict[str, Any] = {many: sweeps[name].values for many, name in NAMES.items() if name in sweeps}
    config = BenchConfig(
        methods=_methods(asked, sweeps.values()),
        applications=asked.application or {},
        workloads=tuple(asked.workload or ()),
        data=Path(asked.data) if asked.data else None,
        prompts=size.prompts if asked.prompts is None else asked.prompts,
        repeats=size.repeats if asked.repeats is None else asked.repeats,
        time_limit_s=size.time_limit_s,
        **{"max_new_tokens": (size.max_new_tokens,), **cells},
        **{name: options[name] for name in ("model", "seed", "device", "threads", "ignore_eos", "check", "title")},
        **_prompt_tokens(asked.model, asked.prompt_tokens),
    )
    _run(config, Path(asked.out) if asked.out else None, asked.resume, asked.overwrite)


def _run(config: BenchConfig, out: Path | None, resume: bool, overwrite: bool) -> None:
    command = ["paceline", *(a for a in sys.argv[1:] if a not in ("--resume", "--overwrite"))]
    with watching() as watcher:
        run = Run(config, out=out, resume=resume, overwrite=overwrite, command=command, watcher=watcher)
        outcome = run.execute()
    console, report = stdout(), outcome.report
    if report.trials:
        console.print(render(report))
    for file in outcome.files:
        console.print(str(file), markup=False, highlight=False)
    if outcome.interrupted:
        how = "the same command with --resume goes on" if out else "with --out DIR a run can be resumed"
        stderr().print(f"interrupted: {how}", style="yellow", markup=False)
        raise typer.Exit(INTERRUPTED)
    if any(not e.passed and report.is_own(e.method) for e in report.exactness):
        raise typer.Exit(1)


# -- options


def _prompt_tokens(model: str, given: int | None) -> dict[str, Any]:
    if given is None:
        return {}
    if not parse_model(model).random:
        raise ConfigError(
            f"--prompt-tokens {given}", "only a random model's prompts have a length of choice", "use --context"
        )
    return {"prompt_tokens": given}


def _sweeps(asked: RunOptions) -> dict[str, Sweep]:
    """By setting; what makes cells has a flag of its own too."""
    texts = [(f"--sweep {text}", text) for text in asked.sweep or []]
    for setting in CELL_SETTINGS:
        text = getattr(asked, "context_length" if setting == "context" else setting)
        texts += [(f"--{setting.replace('_', '-')} {text}", f"{setting}={text}")] if text is not None else []
    found: dict[str, tuple[str, Sweep]] = {}
    for said, text in texts:
        sweep = known.parse_sweep(text, said)
        if sweep.setting in found:
            raise ConfigError(
                f"{found[sweep.setting][0]} with {said}", f"{sweep.setting} is swept twice", "give one of them"
            )
        found[sweep.setting] = (said, sweep)
    return {setting: sweep for setting, (_, sweep) in found.items()}


def _methods(asked: RunOptions, sweeps: Iterable[Sweep]) -> tuple[Method, ...]:
    texts = asked.method
    chosen = known.parse_methods(texts, asked.dtype) if texts else known.default_methods(asked.model, asked.dtype)
    return tuple(known.expand(known.with_plain(chosen, asked.application or {}), list(sweeps)))


# -- progress


class Bar(RunWatcher):
    """Progress on a terminal: a bar with the time left."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def stage(self, text: str) -> None:
        self._progress.update(self._task, description=text, refresh=True)

    def trial(self, done: int, total: int, group: Group, method: Method) -> None:
        self._progress.update(
            self._task, description=f"{group.cell.workload}, {method.name}", completed=done, total=total, refresh=True
        )


@contextmanager
def watching() -> Iterator[Bar | LogLines]:
    """A bar on stderr, or lines where stderr is no terminal."""
    console = stderr()
    if not console.is_terminal:
        yield LogLines(console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Drawn between trials alone: a thread that draws would take time from what is measured.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        yield Bar(progress, progress.add_task("starting", total=None))
