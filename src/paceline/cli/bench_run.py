"""``paceline bench`` itself: methods interleaved on the same prompts, then tables and a page."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from click.core import ParameterSource
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..bench import config as settings
from ..bench import methods
from ..bench.config import BenchConfig, log_lines
from ..bench.report import FILES
from ..bench.report.terminal import render
from ..bench.run import Run
from ..bench.summary import Summary
from .console import stderr, stdout
from .options import takes
from .session import DEFAULT_MODEL

DTYPE_HELP = "auto (the checkpoint's), bfloat16, float32, float64, int8, q8_0 or q4_0."
QUICK = {"prompts": 8, "repeats": 2, "max_new_tokens": (48,), "time_limit_s": 110.0}  # where the user does not say
INTERRUPTED = 130  # 128 + SIGINT, as shells report it


@takes(config=BenchConfig, defaults={"model": DEFAULT_MODEL})
def bench(
    context: typer.Context,
    method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]DRAFTER[;OPTION=VALUE]..",
            help="A drafter with its settings, such as 'fast=ngram,depth=4;budget=8'; repeat it. Plain decoding always "
            "runs. Default: every drafter that fits the model.",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help=DTYPE_HELP)] = "auto",
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help=f"{QUICK['prompts']} prompts, {QUICK['repeats']} repeats, 48 new tokens: done within three minutes.",
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write report.json, report.html and report.md there.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Measure again where --out holds a report.")] = False,
    *,
    config: dict[str, Any],
) -> None:
    """Measure the speed-up on this machine: per task and method, against the memory bandwidth.

    Without a subcommand, all methods run interleaved on the same prompts, and a table with paired speed-ups and their
    95 % intervals is shown; with --out a page with plots is written. Ctrl-C keeps the trials so far.
    """
    if context.invoked_subcommand is not None:
        return
    if quick:
        config |= {n: v for n, v in QUICK.items() if context.get_parameter_source(n) in (None, ParameterSource.DEFAULT)}
    chosen = methods.parse_methods(method, dtype) if method else methods.default_methods(config["model"], dtype)
    asked = BenchConfig(methods=tuple(methods.with_plain(chosen)), **{**config, "workloads": config["workloads"] or ()})
    console = stdout()
    command = ["paceline", *(a for a in sys.argv[1:] if a != "--overwrite")]
    with watching() as progress:
        report = Run(asked, out=out, overwrite=overwrite, command=command, progress=progress).execute()
    if report.trials:
        console.print(render(Summary(report)))
    for name in FILES if out else ():
        console.print(f"{out}/{name}", markup=False, highlight=False)
    if report.interrupted:
        stderr().print("interrupted: this is what was measured so far", style="yellow", markup=False)
        raise typer.Exit(INTERRUPTED)
    if any(not e.passed and report.is_own(e.method) for e in report.exactness):
        raise typer.Exit(1)


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
