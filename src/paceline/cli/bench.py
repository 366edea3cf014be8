"""``paceline bench``: speed-ups on this machine (see `bench_run`), and the cost of single operations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from .. import zoo
from ..assembly import drafter_of
from ..bench import calibrate as calibration
from ..bench import decode as decoding
from ..bench import hops as hopping
from ..bench import machine
from ..bench import parts as stopwatch
from ..bench import step as stepping
from ..bench import workloads as prompts_of
from ..bench.compare import compare as compare_reports
from ..bench.compare import render_terminal
from ..bench.models import materialised
from ..bench.report import load_report, write_text
from ..bench.report.terminal import figures_table
from ..bench.workloads import available
from ..config import LLMConfig
from ..core.errors import ConfigError
from ..core.model_spec import parse_model
from ..core.sampling import SamplingParams
from ..engine.costs import CostTable
from ..llm import LLM
from ..network.loader import resolve_folder
from .bench_run import DTYPE_HELP, MODEL_HELP, THREADS_HELP, bench
from .console import stdout
from .session import DEFAULT_MODEL, counting

app = typer.Typer(add_completion=False)
app.callback(invoke_without_command=True)(bench)

ModelOption = Annotated[str, typer.Option(help=MODEL_HELP)]
DtypeOption = Annotated[str, typer.Option(help=DTYPE_HELP)]
ThreadsOption = Annotated[int | None, typer.Option(help=THREADS_HELP)]
DeviceOption = Annotated[str, typer.Option(help="cpu or cuda.")]
KernelsOption = Annotated[str, typer.Option(help="auto, native (compiled for this processor) or torch.")]
PARTS_TASKS = ("wikisql", "humaneval", "gsm8k")  # what `step --parts` asks
PARTS_REQUESTS = 6  # at least so many, whatever the batch size
PARTS_TOKENS = 64  # of an answer
MOST_PROMPT = 512  # tokens
OutOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the figures as JSON.")]


@app.command()
def workloads(
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of workloads that do not come along.")
    ] = None,
) -> None:
    """List the workloads: those packaged with Paceline, and those read from a folder."""
    table = figures_table(("workload", "title", "read from", "licence", "source"), (), words=5)
    for row in available(data):
        table.add_row(row.name, row.title, row.origin, row.licence, row.source, style=None if row.found else "dim")
    stdout().print(table)


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(metavar="A.json", help="Report of one run, or its folder.")],
    second: Annotated[Path, typer.Argument(metavar="B.json", help="Report of the other.")],
) -> None:
    """Compare two reports: what differs, and what became faster or slower (B over A)."""
    stdout().print(render_terminal(compare_reports(load_report(first), load_report(second))))


@app.command()
def calibrate(
    model: Annotated[str, typer.Option(help="Embedded model, folder or hub name.")] = DEFAULT_MODEL,
    drafter: Annotated[
        str | None,
        typer.Option(help="Measure its draft model too; default: the model's own drafter where the zoo names one."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Passes of each kind; medians count.")] = 15,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
    exact: Annotated[bool, typer.Option("--exact", help="Calibrate the exact mode.")] = False,
    threads: ThreadsOption = None,
) -> None:
    """Measure the cost of passes, for the draft budget "auto", and store it beside the model."""
    _positive("--repeats", repeats)
    spec = parse_model(model)
    if spec.random:
        raise ConfigError(f"--model {model}", "it is gone when the command ends", "name a model that stays")
    chosen = drafter_of(LLMConfig(model=model, drafter=zoo.default_drafter(model) if drafter is None else drafter))
    config = calibration.CalibrateConfig(repeats=repeats)
    llm = LLM(model, dtype=dtype, device=device, exact=exact, threads=threads)
    with counting("timing passes", calibration.rounds(config, chosen)) as progress:
        made, file = calibration.calibrate(llm, chosen, config, progress)
    console = stdout()
    console.print(_cost_table({spec.label: made.table, **made.drafts}))
    console.print(f"written to {file}", markup=False)


@app.command()
def step(
    model: ModelOption = DEFAULT_MODEL,
    rows: Annotated[str, typer.Option(metavar="N,N,..", help="Rows of a pass.")] = "1,2,4,8,16,32,64",
    context: Annotated[str, typer.Option(metavar="N,N,..", help="Committed tokens before the rows.")] = "256,1024",
    repeats: Annotated[int, typer.Option(help="Passes of each kind; medians are shown.")] = 30,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
    exact: Annotated[bool, typer.Option("--exact", help="Measure the exact mode.")] = False,
    kernels: KernelsOption = "auto",
    threads: ThreadsOption = None,
    out: OutOption = None,
    parts: Annotated[
        bool, typer.Option("--parts", help="Instead: time every part of the steps of real answers, by drafter.")
    ] = False,
    drafter: Annotated[
        list[str] | None, typer.Option(metavar="NAME,..", help="With --parts: repeat it. Default: none, ngram.")
    ] = None,
    batch: Annotated[str | None, typer.Option(metavar="N,N,..", help="With --parts: requests at once. [1]")] = None,
    budget: Annotated[str | None, typer.Option(help="With --parts: drafted nodes a step. [the drafter's own]")] = None,
    temperature: Annotated[float | None, typer.Option(help="With --parts. [0]")] = None,
) -> None:
    """Time one target pass by number of rows and context, against the machine's read bandwidth; or a step's parts."""
    asked: dict[str, Any] = {"dtype": dtype, "device": device, "exact": exact, "threads": threads, "kernels": kernels}
    if parts:
        _step_parts(model, drafter or ["none", "ngram"], batch or "1", budget, temperature or 0.0, asked, out)
        return
    if (drafter, batch, budget, temperature) != (None,) * 4:
        raise ConfigError("bench step", "--drafter, --batch, --budget and --temperature go with --parts", "add --parts")
    _step_passes(model, _numbers("--rows", rows), _numbers("--context", context), repeats, asked, out)


def _step_passes(
    model: str, rows: Sequence[int], contexts: Sequence[int], repeats: int, options: Mapping[str, Any], out: Path | None
) -> None:
    """``bench step``: a line a row count and context."""
    _positive("--repeats", repeats)
    _check_out(out)
    with materialised(model) as folder:
        llm = LLM(folder, **options)
        _check_positions(llm, max(rows), max(contexts))
        bandwidth = machine.read_bandwidth(options["device"])
        with counting("timing passes", repeats + 2) as progress:
            costs = stepping.measure(llm.decoder, rows, contexts, repeats, progress)
    facts, dtype = machine.describe(options["device"]), str(llm.decoder.dtype)
    console, label = stdout(), parse_model(model).label
    exact = ", exact" if options["exact"] else ""
    console.print(f"{label}, {dtype.removeprefix('torch.')}, kernels: {llm.kernels}{exact}")
    console.print(facts.line())
    console.print(f"measured read bandwidth {bandwidth / 1e9:.1f} GB/s; share: weights and K/V read, of it")
    console.print(_step_table(costs, bandwidth))
    figures = {
        "command": "bench step",
        "model": label,
        "dtype": dtype,
        "exact": options["exact"],
        "kernels": llm.kernels,
        "machine": facts.as_dict(),
        "read_bandwidth_bytes_per_s": bandwidth,
        "repeats": repeats,
        "rows": [c.as_dict(bandwidth) for c in costs],
    }
    _write(out, figures)


def _check_positions(llm: LLM, rows: int, context: int) -> None:
    """Refuse passes beyond the model's last position."""
    positions = llm.decoder.config.max_position
    if context + rows > positions:
        raise ConfigError(
            f"context {context} with {rows} rows", f"the model has {positions} positions", "choose smaller ones"
        )


def _step_parts(
    model: str,
    drafters: Sequence[str],
    batch: str,
    budget: str | None,
    temperature: float,
    options: Mapping[str, Any],
    out: Path | None,
) -> None:
    """``bench step --parts``: one table a drafter, a column a batch size."""
    batches = _numbers("--batch", batch)
    _check_out(out)
    params = SamplingParams(temperature=temperature, max_tokens=PARTS_TOKENS, seed=0, ignore_eos=True)
    console, found, label = stdout(), [], parse_model(model).label
    console.print(machine.describe(options["device"]).line())
    for drafter in drafters:
        watch = stopwatch.Stopwatch()
        with stopwatch.compiled_calls(watch):
            plain = drafter == "none"
            llm = LLM(
                model, drafter=None if plain else drafter, budget=None if plain else budget,
                max_sequences=max(batches), **options,
            )  # fmt: skip
        # Tasks in turn, so that every batch size asks something of each.
        asked = [_task_prompts(name, llm, max(*batches, PARTS_REQUESTS)) for name in PARTS_TASKS]
        made = []
        for size in batches:
            mixed = [asked[i % len(asked)][i // len(asked)] for i in range(max(size, PARTS_REQUESTS))]
            groups = [mixed[i : i + size] for i in range(0, len(mixed) - size + 1, size)]
            made.append(stopwatch.measure(llm, watch, groups, params))
        console.print(f"{label}, {llm.kernels}, drafter {drafter}", markup=False, highlight=False)
        console.print(_parts_table(made))
        found += [{"drafter": drafter, **asdict(one)} for one in made]
    facts = machine.describe(options["device"]).as_dict()
    asked_for = {"model": label, "budget": budget, "temperature": temperature, **options}
    _write(out, {"command": "bench step --parts", **asked_for, "machine": facts, "steps": found})


def _task_prompts(name: str, llm: LLM, count: int) -> list[tuple[int, ...]]:
    """Token ids of the first turns of a workload."""
    workload = prompts_of.load(name, limit=count)
    encoded = prompts_of.Encoded(workload, llm.tokenizer, max_model_len=MOST_PROMPT, max_new_tokens=PARTS_TOKENS)
    return [prompt.ids for prompt in encoded.prompts]


def _parts_table(found: Sequence[stopwatch.StepParts]) -> Table:
    """A line a part, host and compiled time of each batch size."""
    head = ["part, ms", *(f"{kind}, batch {one.batch}" for one in found for kind in ("host", "compiled"))]
    rows = []
    for index, part in enumerate(stopwatch.PARTS):
        times = [one.parts[index] for one in found]
        if any(t.host_ms or t.native_ms for t in times):
            cells = [f"{ms:.3f}" if ms else "" for t in times for ms in (t.host_ms, t.native_ms)]
            rows.append([part, *cells])
    whole = [cell for one in found for cell in (f"{one.host_ms:.3f}", f"{one.step_ms - one.host_ms:.3f}")]
    tokens = [cell for one in found for cell in (f"{one.tokens:.2f} tokens", f"{one.steps} steps")]
    return figures_table(head, [*rows, ["whole step", *whole], ["in a step", *tokens]])


@app.command()
def decode(
    model: ModelOption = DEFAULT_MODEL,
    batch: Annotated[str, typer.Option(metavar="N,N,..", help="Requests at once.")] = "1,16",
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each (random) prompt.")] = 64,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each answer; EOS is ignored.")] = 128,
    repeats: Annotated[int, typer.Option(help="Runs of each kind; medians are shown.")] = 5,
    transformers: Annotated[
        bool, typer.Option("--transformers/--no-transformers", help="Run transformers' generate in turns with it.")
    ] = True,
    exact: Annotated[bool, typer.Option("--exact", help="Run Paceline's exact mode beside it.")] = False,
    torch: Annotated[bool, typer.Option("--torch", help="Run Paceline on torch's kernels beside it.")] = False,
    dtype: DtypeOption = "bfloat16",
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    out: OutOption = None,
) -> None:
    """Plain decoding, one request and many at once, interleaved with transformers on the same weights."""
    batches = _numbers("--batch", batch)
    for name, value in (("--prompt-tokens", prompt_tokens), ("--new-tokens", new_tokens), ("--repeats", repeats)):
        _positive(name, value)
    _check_out(out)
    label = parse_model(model).label
    if transformers and label != model:
        raise ConfigError(f"--model {model}", "transformers cannot stretch a model", "add --no-transformers")
    with materialised(model) as folder:
        options: dict[str, Any] = {"dtype": dtype, "device": device, "threads": threads}
        options["max_sequences"] = max(*batches, 1) if len(batches) > 1 else batches[0]
        llm = LLM(folder, **options)
        engines = {"paceline": decoding.paceline_runner(llm)}
        if exact:
            engines["paceline exact"] = decoding.paceline_runner(LLM(folder, exact=True, **options))
        if torch:
            engines["paceline on torch"] = decoding.paceline_runner(LLM(folder, kernels="torch", **options))
        if transformers:
            resolved = str(resolve_folder(folder))
            engines["transformers"] = decoding.transformers_runner(resolved, llm.decoder.dtype, device)
        with counting("decoding", repeats) as progress:
            rates, ratios = decoding.measure(
                engines, batches, prompt_tokens, new_tokens, llm.decoder.config.vocab_size, repeats, progress
            )
    facts = machine.describe(device)
    console = stdout()
    console.print(
        f"{label}, {dtype}: {prompt_tokens} prompt tokens, {new_tokens} new tokens, {repeats} repeats in turns"
    )
    console.print(facts.line())
    console.print(_decode_table(rates, ratios, batches[0]))
    figures = {
        "command": "bench decode",
        "model": label,
        "dtype": dtype,
        "machine": facts.as_dict(),
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "repeats": repeats,
        "rates": [asdict(r) for r in rates],
        "ratios": [{"of": a, "over": c, "batch": b, "ratio": v} for (a, c, b), v in ratios.items()],
    }
    _write(out, figures)


@app.command()
def hops(
    sizes: Annotated[str, typer.Option(metavar="N,N,..", help="Bytes of a frame.")] = "64,4096,65536",
    repeats: Annotated[int, typer.Option(help="Round trips of each kind; medians are shown.")] = 2000,
    out: OutOption = None,
) -> None:
    """Time what two processes pass to each other: frames over channels, and a worker's answer to a message."""
    _positive("--repeats", repeats)
    counts = _numbers("--sizes", sizes)
    _check_out(out)
    with counting("passing frames", 3) as progress:
        costs = hopping.measure(counts, repeats, progress)
    facts, console = machine.describe(), stdout()
    console.print(facts.line())
    console.print(f"two processes on a core each, shared memory {hopping.compiled()}, {repeats} round trips each")
    head = ["channel", "wait", "bytes", "median us", "10-90 %"]
    rows = [
        [c.channel, c.wait, str(c.size_bytes), f"{c.median_us:.1f}", f"{c.low_us:.1f}-{c.high_us:.1f}"] for c in costs
    ]
    console.print(figures_table(head, rows, words=2))
    console.print("channels: one way; rendezvous: there and back")
    figures = {"command": "bench hops", "machine": facts.as_dict(), "repeats": repeats}
    _write(out, {**figures, "hops": [asdict(cost) for cost in costs]})


def _cost_table(tables: Mapping[str, CostTable]) -> Table:
    """Milliseconds by rows of one sequence, and by sequences of one row; a column a model."""
    rows = []
    for kind, what in (("chain", "rows of one sequence"), ("plain", "sequences of one row")):
        costs = [dict(getattr(table, kind)) for table in tables.values()]
        for count in sorted({count for cost in costs for count in cost}):
            rows.append([f"{count} {what}", *(f"{cost[count]:.2f}" if count in cost else "" for cost in costs)])
    return figures_table(["a pass of", *(f"{name}, ms" for name in tables)], rows)


def _step_table(costs: Sequence[stepping.StepCost], bandwidth: float) -> Table:
    """One line a row count and context."""
    one = {c.context: c.step_ms for c in costs if c.rows == 1}
    head = "context | rows | step ms | 10-90 % | of 1 row | weights GB/s | share | linear ms | linear share"
    line = (
        "{context} | {rows} | {step_ms:.2f} | {low_ms:.2f}-{high_ms:.2f} | {of_one} | {weights_gb_per_s:.1f} | "
        "{share_of_bandwidth:.0%} | {linear_ms:.2f} | {linear_share_of_bandwidth:.0%}"
    )
    ratios = [f"{c.step_ms / one[c.context]:.2f}" if c.context in one else "" for c in costs]
    rows = [line.format(**c.as_dict(bandwidth), of_one=r).split(" | ") for c, r in zip(costs, ratios, strict=True)]
    return figures_table(head.split(" | "), rows, words=0)


def _decode_table(
    rates: Sequence[decoding.DecodeRate], ratios: Mapping[tuple[str, str, int], float], first_batch: int
) -> Table:
    """One line an engine and batch size."""
    head = ["engine", "batch", "tokens/s", "low-high", "over transformers", f"over batch {first_batch}"]
    first = {r.engine: r.tokens_per_s for r in rates if r.batch == first_batch}
    rows = []
    for rate in rates:
        ratio, more = ratios.get((rate.engine, "transformers", rate.batch)), rate.tokens_per_s / first[rate.engine]
        speeds = [f"{rate.tokens_per_s:.1f}", f"{rate.low:.1f}-{rate.high:.1f}"]
        rows.append([rate.engine, str(rate.batch), *speeds, f"{ratio:.2f}" if ratio else "", f"{more:.2f}"])
    return figures_table(head, rows)


def _numbers(flag: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"{flag} {text}", "not whole numbers above 0, with commas between", f"write {flag} 1,8")
    return [int(part) for part in parts]


def _positive(flag: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{flag} {value}", "nothing would be measured", "give 1 or more")


def _check_out(out: Path | None) -> None:
    """Refuse a file that cannot be written before the measuring, which takes minutes."""
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise ConfigError(f"--out {out}", "no file can be there", "name a file in a folder that exists")


def _write(out: Path | None, figures: dict[str, Any]) -> None:
    if out is not None:
        write_text(out, json.dumps(figures, indent=1) + "\n", "--out")
