"""``paceline bench``: speed-ups on this machine, reports, and the cost of passes."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from rich.markdown import Markdown

from ..api.assembly.memory import kv_layout
from ..api.config import LLMConfig
from ..api.llm import LLM
from ..bench import machine, methods
from ..bench.config import BenchConfig, StepConfig
from ..bench.passes import PassSize, time_passes
from ..bench.report import FILES, figures_page, figures_table
from ..bench.run import Run
from ..bench.summary import Summary
from ..core.errors import ConfigError
from ..kv.pool import KVPool
from . import INTERRUPTED
from .console import ProgressLine, stderr, stdout
from .help import Group
from .options import DEFAULT_MODEL, DEFAULTS, takes

app = typer.Typer(add_completion=False, cls=Group)
QUICK = {"prompts": 8, "repeats": 2, "max_new_tokens": 48, "time_limit_s": 110.0}  # where the user does not choose
STEP_HEAD = ("context", "rows", "step ms", "10-90 %", "of 1 row", "weights GB/s", "share")


@app.callback(invoke_without_command=True)
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
    dtype: Annotated[
        str, typer.Option(help="auto (the checkpoint's), bfloat16, float32, float64, int8, q8_0 or q4_0.")
    ] = "auto",
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help=f"{QUICK['prompts']} prompts, {QUICK['repeats']} repeats, 48 new tokens: done within three minutes.",
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write report.json and the page report.md there.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Measure again where --out holds a report.")] = False,
    *,
    config: dict[str, Any],
) -> None:
    """Measure the speed-up on this machine: per task and method, against the memory bandwidth.

    Without a subcommand, all methods run interleaved on the same prompts, and a table with paired speed-ups and their
    95 % intervals is shown; with --out a page with plots is written. Ctrl-C keeps the trials so far.

    Examples:
        paceline bench --quick
        paceline bench --model smollm2-135m --method suffix --method ngram
        paceline bench --workload gsm8k --data folder --out report
    """
    if context.invoked_subcommand is not None:
        return
    if quick:
        sources = {name: context.get_parameter_source(name) for name in QUICK}  # None: there is no such flag
        config |= {n: QUICK[n] for n, source in sources.items() if source is None or source.name == "DEFAULT"}
    chosen = methods.parse_methods(method, dtype) if method else methods.default_methods(config["model"], dtype)
    setup = BenchConfig(methods=tuple(methods.with_plain(chosen)), **{**config, "workloads": config["workloads"] or ()})
    console = stdout()
    command = ["paceline", *(a for a in sys.argv[1:] if a != "--overwrite")]
    with ProgressLine() as line:
        report = Run(setup, out=out, overwrite=overwrite, command=command, progress=line.show).execute()
    if report.trials:
        console.print(Markdown(figures_page(Summary(report))))
    for name in FILES if out else ():
        console.print(f"{out}/{name}", markup=False, highlight=False)
    if report.interrupted:
        stderr().print("interrupted: this is what was measured so far", style="yellow", markup=False)
        raise typer.Exit(INTERRUPTED)
    if any(not e.passed and report.is_own(e.method) for e in report.exactness):
        raise typer.Exit(1)


@app.command()
@takes(
    pass_options=StepConfig,
    llm=LLMConfig,
    only={"rows", "context", "repeats", "model", "dtype", "kv_cache_dtype", "device", "exact", "kernels", "threads"}
    | {"tensor_parallel"},
    defaults=DEFAULTS,
)
def step(
    *,
    pass_options: dict[str, Any],
    llm: dict[str, Any],
) -> None:
    """Time one target pass by number of rows and context, against the machine's read bandwidth."""
    passes, device, label = StepConfig(**pass_options), llm["device"], llm["model"]
    loaded = LLM(**llm)
    most = loaded.decoder.config.max_position
    if max(passes.context) + max(passes.rows) > most:
        subject = f"context {max(passes.context)} with {max(passes.rows)} rows"
        raise ConfigError(subject, f"the model has {most} positions", "choose smaller ones")
    decoder, bandwidth = loaded.decoder, machine.read_bandwidth(device)
    layout = kv_layout(loaded.config, decoder.local, decoder.dtype)
    sizes: list[PassSize] = [(1, context, rows, None) for context in passes.context for rows in passes.rows]
    with ProgressLine() as line:
        times = time_passes(decoder, sizes, passes.repeats, line.counting("timing passes", passes.repeats + 1), layout)
    computed, mode, console = str(decoder.dtype), ", exact" if decoder.exact else "", stdout()
    mode += f", {ranks} ranks, of which one is counted" if (ranks := llm["tensor_parallel"]) > 1 else ""
    cache_note = "" if llm["kv_cache_dtype"] == "auto" else f", K/V in {llm['kv_cache_dtype']}"
    console.print(f"{label}, {computed.removeprefix('torch.')}{cache_note}, kernels: {loaded.kernels}{mode}")
    console.print(machine.line(device))
    console.print(f"measured read bandwidth {bandwidth / 1e9:.1f} GB/s; share: weights and K/V read, of it")
    table = figures_table(STEP_HEAD, (), words=0)
    shape, dtype = layout or (decoder.cache_shape, decoder.dtype)
    for (_, context, rows, _), ms in times.items():
        low, middle, high = map(float, np.quantile(ms, [0.1, 0.5, 0.9]))
        of_one = f"{middle / median(times[1, context, 1, None]):.2f}" if 1 in passes.rows else ""
        read = decoder.pass_bytes + (context + rows) * KVPool.bytes_per_token(*shape, dtype)
        speeds = (f"{decoder.pass_bytes / middle / 1e6:.1f}", f"{1000 * read / middle / bandwidth:.0%}")
        table.add_row(str(context), str(rows), f"{middle:.2f}", f"{low:.2f}-{high:.2f}", of_one, *speeds)
    console.print(table)
