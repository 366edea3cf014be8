"""``paceline bench streams`` and its neighbours: what Speculative Streaming is worth, and what it costs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ..core.errors import ConfigError
from .bench_run import INTERRUPTED, named_folders, watching
from .console import stderr, stdout, waiting
from .session import DEFAULT_MODEL

if TYPE_CHECKING:  # torch is loaded when a command runs, not when its help is shown
    from ..bench.records import Report
    from ..bench.run import BenchConfig
    from ..bench.streams_plans import Plan, TrainedSet
    from ..bench.streams_report import Line

Model = Annotated[str, typer.Option(help="Embedded model, folder or hub name: the target.")]
SetOption = Annotated[str, typer.Option("--set", metavar="FOLDER", help="Trained set of streams.")]
Data = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of workloads that do not come along.")]
Tasks = Annotated[str, typer.Option(metavar="NAME,..", help="sql, e2e, gsm8k, dialogsum, or any workload's name.")]
Prompts = Annotated[int, typer.Option(metavar="N", help="Prompts of each task.")]
Repeats = Annotated[int, typer.Option(metavar="N", help="Times each prompt runs.")]
NewTokens = Annotated[int | None, typer.Option(metavar="N", help="Of an answer; default: the task's own.")]
Dtype = Annotated[str, typer.Option(help="auto (the checkpoint's), bfloat16 or float32.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; default: torch's choice.")]
Seed = Annotated[int, typer.Option(help="Of the choice of prompts and of sampling.")]
Out = Annotated[Path, typer.Option(metavar="DIR", help="Tables, figures and raw reports go there.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with runs in --out that were cut off.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Start again where --out holds a run.")]


def streams(
    out: Out,
    folder: Annotated[
        str | None, typer.Option("--set", metavar="FOLDER", help="Trained set; sweeps over --sets need none.")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Instead of the ablation: gamma, k, threshold, temperature, batch, int8; with --sets layers or "
            "pruning-layer; or all. Repeat it for several.",
        ),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(metavar="LAYERS=FOLDER", help="Sets with streams through so many layers; repeat it."),
    ] = None,
    k: Annotated[int, typer.Option("--k", metavar="N", min=1, help="Children of a node, of the ablation's tree.")] = 3,
    nodes: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Most nodes of the ablation's tree, best first; default: the full tree."),
    ] = None,
    model: Model = DEFAULT_MODEL,
    tasks: Tasks = "sql,e2e",
    data: Data = None,
    prompts: Prompts = 4,
    repeats: Repeats = 2,
    max_new_tokens: NewTokens = None,
    dtype: Dtype = "auto",
    threads: Threads = None,
    seed: Seed = 0,
    resume: Resume = False,
    overwrite: Overwrite = False,
) -> None:
    """Measure a set of speculative streams: each component's worth, or a sweep over one setting.

    All settings answer the same prompts in one interleaved run beside plain decoding. Tables, figures and the raw
    report of every run are written to --out.
    """
    from ..bench.figures import require_matplotlib
    from ..bench.streams_plans import workload_of

    require_matplotlib()
    plans = _plans(folder, sweep or [], named_folders("--sets", sets or []), k, nodes)
    values = {
        "model": model,
        "workloads": tuple(workload_of(task) for task in _names("--tasks", tasks)),
        "data": data,
        "prompts": prompts,
        "repeats": repeats,
        "max_new_tokens": (max_new_tokens,),
        "threads": threads,
        "seed": seed,
    }
    plans = [_in_dtype(plan, dtype) for plan in plans]
    configs = [plan.bench_config(values) for plan in plans]  # all of them before the first run begins
    same = True
    for plan, config in zip(plans, configs, strict=True):
        report = _run(config, out / plan.name, resume, overwrite)
        _show(plan, report, out)
        same = same and _same_ids(report)
    if not same:
        raise typer.Exit(1)


def similarity(
    folder: SetOption,
    out: Out,
    model: Model = DEFAULT_MODEL,
    tasks: Tasks = "sql,e2e,gsm8k",
    data: Data = None,
    prompts: Prompts = 12,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="Of an answer.")] = 64,
    dtype: Dtype = "auto",
    threads: Threads = None,
    seed: Seed = 0,
) -> None:
    """Cosine similarity of stream states to the true later states, layer by layer."""
    from ..bench import streams_similarity as bench
    from ..bench.figures import require_matplotlib
    from ..bench.streams_plans import TrainedSet
    from ..bench.streams_report import write_text

    require_matplotlib()
    options = {"dtype": dtype, "threads": threads}
    trained = TrainedSet.read(folder)
    limits = {"prompts": prompts, "max_new_tokens": max_new_tokens, "seed": seed}
    with waiting("comparing states"):
        found = bench.measure(model, trained, _names("--tasks", tasks), data, options=options, **limits)
    values = {"command": _command(), "model": model, "set": folder, **limits, **found.as_dict()}
    stdout().print(_similarity_table(found.layers, found.streams, found.main))
    _written([_json(out / "similarity.json", values, write_text), bench.plot(found, out / "similarity.svg")])


def overhead(
    folder: SetOption,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the figures as JSON.")] = None,
) -> None:
    """Parameters that a set adds, by formula and by count, beside Medusa heads for the same target."""
    from ..bench import streams_overhead as bench
    from ..bench.streams_report import write_text
    from ..target.loader import resolve_folder
    from ..target.streams import StreamSet

    trained = StreamSet.load(resolve_folder(folder))
    found = [bench.of_set(trained, trained.config.target or folder), *bench.of_published()]
    stdout().print(_table(bench.HEAD, [bench.cells(one) for one in found]))
    if out is not None:
        _written([_json(out, {"command": _command(), "overhead": [f.as_dict() for f in found]}, write_text)])
    if not all(one.agrees for one in found):
        stderr().print("the counts are not those of the formulas", style="red", markup=False)
        raise typer.Exit(1)


def applications(
    out: Out,
    adapter: Annotated[
        list[str],
        typer.Option(metavar="TASK=FOLDER", help="Adapter without streams for a task (sql, e2e, ..); repeat it."),
    ],
    streams: Annotated[
        list[str],
        typer.Option(metavar="TASK=FOLDER", help="Shared set with streams for the same task; repeat it."),
    ],
    model: Model = DEFAULT_MODEL,
    data: Data = None,
    prompts: Prompts = 10,
    repeats: Repeats = 3,
    scored: Annotated[int, typer.Option(metavar="N", help="Prompts of each task that are scored.")] = 200,
    max_new_tokens: NewTokens = None,
    threads: Threads = None,
    seed: Seed = 0,
    resume: Resume = False,
    overwrite: Overwrite = False,
) -> None:
    """Shared streams beside plain fine-tuning with the same adapters: speed, task score, extra parameters."""
    from ..bench import applications as bench
    from ..bench.streams_report import write_text

    pairs = _pairs(named_folders("--adapter", adapter), named_folders("--streams", streams))
    values = {
        "model": model,
        "data": data,
        "prompts": prompts,
        "repeats": repeats,
        "max_new_tokens": (max_new_tokens,),
        "threads": threads,
        "seed": seed,
    }
    configs = [pair.bench_config(values) for pair in pairs]
    lines, reports = [], []
    for pair, config in zip(pairs, configs, strict=True):
        with waiting(f"scoring answers to {pair.task}"):
            scores = bench.scores_of(pair, model, data, scored, seed, {"threads": threads})
        reports.append(_run(config, out / pair.task, resume, overwrite))
        lines += bench.lines_of(pair, reports[-1], scores, bench.extra_parameters(pair))
    stdout().print(_table(bench.HEAD, [bench.cells(line) for line in lines]))
    made = {"command": _command(), "scored": scored, "lines": [line.as_dict() for line in lines]}
    page = write_text(out / "applications.md", bench.markdown(lines, reports, scored))
    _written([_json(out / "applications.json", made, write_text), page])
    if not all(map(_same_ids, reports)):
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Add these commands."""
    for command in (streams, similarity, overhead, applications):
        app.command()(command)


# -- options


def _names(flag: str, text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or len({*names}) < len(names):
        raise ConfigError(f"{flag} {text!r}", "no name, or one twice", "write it like sql,e2e")
    return names


def _plans(folder: str | None, sweeps: Sequence[str], sets: Mapping[str, str], k: int, nodes: int | None) -> list[Plan]:
    from ..bench.streams_plans import SET_SWEEPS, SWEEPS, TrainedSet, ablation, read_sets, sweep_plan

    trained = TrainedSet.read(folder) if folder is not None else None
    several = read_sets(sets)
    if not sweeps:
        if trained is None:
            raise ConfigError("bench streams", "no trained set is named", "add --set FOLDER")
        if several:
            raise ConfigError("--sets", "the ablation is of one set", "add --sweep layers or --sweep pruning-layer")
        return [ablation(trained, k, nodes)]
    if (k, nodes) != (3, None):
        raise ConfigError("--k or --nodes", "they shape the ablation's tree, a sweep has its own", "leave them out")
    names = _every(sweeps, trained, several, SWEEPS, SET_SWEEPS) if "all" in sweeps else list(dict.fromkeys(sweeps))
    return [sweep_plan(name, trained, several) for name in names]


def _every(
    sweeps: Sequence[str],
    trained: TrainedSet | None,
    sets: Sequence[TrainedSet],
    of_one: Mapping[str, Any],
    of_sets: Mapping[str, Any],
) -> list[str]:
    """Every sweep that the sets given allow."""
    if len(sweeps) > 1:
        raise ConfigError("--sweep all", "others are named beside it", "name it alone")
    return [*(of_one if trained is not None else ()), *(of_sets if sets else ())]


def _in_dtype(plan: Plan, dtype: str) -> Plan:
    """The plan with its methods in a dtype, but for those that name their own."""
    from dataclasses import replace

    entries = tuple(
        replace(
            entry, method=replace(entry.method, dtype=dtype if entry.method.dtype == "auto" else entry.method.dtype)
        )
        for entry in plan.entries
    )
    return replace(plan, entries=entries)


def _pairs(adapters: Mapping[str, str], streams: Mapping[str, str]) -> list[Any]:
    from ..bench.applications import Pair

    alone = sorted({*adapters} ^ {*streams})
    if alone:
        raise ConfigError(
            f"application {alone[0]}", "only one of its two sets is named", "give --adapter and --streams"
        )
    return [Pair.read(task, adapters[task], streams[task]) for task in adapters]


# -- running and showing


def _command() -> list[str]:
    return ["paceline", *(a for a in sys.argv[1:] if a not in ("--resume", "--overwrite"))]


def _run(config: BenchConfig, folder: Path, resume: bool, overwrite: bool) -> Report:
    from ..bench.journal import NAME
    from ..bench.run import Run

    begun = (folder / NAME).is_file()  # of several runs some may not have begun
    flags = {"resume": resume and begun, "overwrite": overwrite}
    with watching() as watcher:
        outcome = Run(config, out=folder, command=_command(), watcher=watcher, **flags).execute()
    if outcome.interrupted:
        stderr().print("interrupted: the same command with --resume goes on", style="yellow", markup=False)
        raise typer.Exit(INTERRUPTED)
    return outcome.report


def _same_ids(report: Report) -> bool:
    return all(found.passed for found in report.exactness)


def _show(plan: Plan, report: Report, out: Path) -> None:
    from ..bench import streams_report as made

    lines = made.lines_of(plan, report)
    console = stdout()
    console.print(plan.title, style="bold", markup=False)
    console.print(_lines_table(plan, made.whole(lines), made.COLUMNS))
    for verdict in made.verdicts(lines) if plan.name == "ablation" else ():
        console.print(verdict, markup=False, highlight=False)
    _written(made.write(plan, report, out))


def _lines_table(plan: Plan, lines: Sequence[Line], columns: Sequence[tuple[str, Callable[[Line], str]]]) -> Table:
    swept = bool(plan.x_label)
    head = ["setting", *([plan.x_label] if swept else []), *(name for name, _ in columns)]
    rows = [[line.series, f"{line.x}"] if swept else [line.method] for line in lines]
    return _table(head, [[*row, *(show(line) for _, show in columns)] for row, line in zip(rows, lines, strict=True)])


def _similarity_table(layers: Sequence[int], streams: Sequence[list[float]], main: Sequence[list[float]]) -> Table:
    gamma = len(streams[0])
    names = [*(f"stream {j + 1}" for j in range(gamma)), *(f"main, {j + 1} before" for j in range(gamma))]
    values = zip(layers, streams, main, strict=True)
    return _table(
        ["layers passed", *names], [[str(n), *(f"{v:.3f}" for v in (*own, *still))] for n, own, still in values]
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, header_style="bold")
    for place, name in enumerate(head):
        table.add_column(name, justify="right" if place else "left", overflow="fold")
    for row in rows:
        table.add_row(*(cell.replace("[", r"\[") for cell in row))
    return table


def _json(path: Path, values: Mapping[str, Any], write: Callable[[Path, str], Path]) -> Path:
    return write(path, json.dumps(values, indent=1) + "\n")


def _written(files: Sequence[Path]) -> None:
    for file in files:
        stdout().print(str(file), markup=False, highlight=False)
