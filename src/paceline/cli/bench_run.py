"""``paceline bench`` itself: methods in turn on the same prompts, then tables and a page."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from typer import Option

from ..bench import methods as known
from ..bench.config import BenchConfig, Watcher
from ..bench.measure import Group
from ..bench.methods import CELL_SETTINGS, Sweep
from ..bench.peers import PEERS
from ..bench.records import Method
from ..bench.report.terminal import render
from ..bench.run import Run
from ..core.errors import ConfigError
from .console import stderr, stdout
from .session import DEFAULT_MODEL

ModelOption = Annotated[
    str, typer.Option(help="Embedded model, folder, hub name, or random:LAYERSxWIDTHxFFxVOCAB (a random Llama).")
]
DtypeOption = Annotated[str, typer.Option(help="auto (the checkpoint's), bfloat16, float32, float64 or int8.")]
ThreadsOption = Annotated[int | None, typer.Option(help="CPU threads; default: torch's choice.")]
Many = list[str] | None
Text = str | None
Count = int | None
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
LINE_EVERY_S = 10.0  # between lines of progress, where there is no terminal


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured where the user does not say."""

    prompts: int
    repeats: int
    max_new_tokens: int | None  # None: each workload's own
    time_limit_s: float | None


FULL = Size(prompts=20, repeats=3, max_new_tokens=None, time_limit_s=None)
QUICK = Size(prompts=8, repeats=2, max_new_tokens=48, time_limit_s=110.0)


def bench(
    context: typer.Context,
    model: ModelOption = DEFAULT_MODEL,
    workload: Annotated[
        Many,
        Option(
            metavar="NAME|PATH",
            help="What to ask; repeat it. `paceline bench workloads` lists the names. Default: all "
            "that come with Paceline.",
        ),
    ] = None,
    data: Annotated[
        Path | None, Option(metavar="DIR", help="Folder of workloads that do not come along, and of full versions.")
    ] = None,
    prompts: Annotated[Count, Option(metavar="N", help=f"Prompts of each workload [default: {FULL.prompts}]")] = None,
    prompt_tokens: Annotated[Count, Option(metavar="N", help="Length of a random model's prompts.")] = None,
    max_new_tokens: Annotated[
        Text, Option(metavar="N,N,..", help="Tokens of an answer [default: the workload's own]")
    ] = None,
    method: Annotated[
        Many,
        Option(
            metavar="[NAME=]DRAFTER[;OPTION=VALUE]..",
            help="A drafter with its settings, such as 'fast=ngram,depth=4;budget=8', or a peer's mode, such as "
            "llama.cpp/plain; repeat it. Plain decoding always runs. Default: every drafter that fits the model.",
        ),
    ] = None,
    peers: Annotated[bool, Option("--peers", help="Add every mode of the peers that `make peers` builds.")] = False,
    peer: Annotated[
        Many, Option(metavar="NAME", help="Add every mode of one peer: transformers, llama.cpp, vllm.")
    ] = None,
    sweep: Annotated[
        Many,
        Option(
            metavar="SETTING=V,V,..",
            help="Run every value: budget=2,8,auto, dtype=float32,bfloat16, ngram.depth=2,8, batch=1,8, context=256; "
            "repeat it.",
        ),
    ] = None,
    batch: Annotated[Text, Option(metavar="N,N,..", help="Prompts at once [default: 1]")] = None,
    context_length: Annotated[
        Text,
        Option("--context", metavar="N,N,..", help="Cut and fill prompts to so many tokens [default: as they are]"),
    ] = None,
    temperature: Annotated[Text, Option(metavar="T,T,..", help="Of sampling; 0 is greedy [default: 0]")] = None,
    top_k: Annotated[
        Text, Option(metavar="N,N,..", help="Likeliest tokens that sampling chooses from [default: 0, all]")
    ] = None,
    application: Annotated[
        Many,
        Option(
            metavar="NAME=FOLDER",
            help="A trained set that methods may name: 'sql=streams;application=sql'; repeat it for several.",
        ),
    ] = None,
    repeats: Annotated[Count, Option(metavar="N", help=f"Times each prompt runs [default: {FULL.repeats}]")] = None,
    seed: Annotated[int, Option(help="Of the choice of prompts and of sampling.")] = 0,
    dtype: DtypeOption = "auto",
    device: Annotated[str, Option(help="cpu or cuda.")] = "cpu",
    threads: ThreadsOption = None,
    ignore_eos: Annotated[
        bool | None,
        Option(
            "--ignore-eos/--stop-at-eos",
            help="Go on to the full length, so that all engines give the same number of tokens [default: where peers "
            "or a random model run]",
        ),
    ] = None,
    check: Annotated[bool, Option(help="Compare every method's token ids with plain decoding's.")] = True,
    quick: Annotated[
        bool,
        Option(
            "--quick",
            help=f"{QUICK.prompts} prompts, {QUICK.repeats} repeats, {QUICK.max_new_tokens} new tokens: done within "
            "three minutes.",
        ),
    ] = False,
    title: Annotated[str, Option(help="Of the report.")] = "",
    out: Annotated[
        Path | None, Option(metavar="DIR", help="Write report.json, report.html and report.md there, and a journal.")
    ] = None,
    resume: Annotated[bool, Option("--resume", help="Go on with the run in --out that was cut off.")] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Start again where --out holds a run.")] = False,
) -> None:
    """Measure what speculation is worth here: per task and method, beside other engines, against the physical floor.

    Without a subcommand, all methods run in turn on the same prompts, and a table with paired speed-ups and their 95 %
    intervals is shown; with --out a page with plots is written. Ctrl-C keeps what there is.
    """
    if context.invoked_subcommand is not None:
        return
    sweeps = _sweeps(sweep or [])
    size = QUICK if quick else FULL
    applications = named_folders("--application", application or [])
    named = list(
        dict.fromkeys([*(peer or []), *(PEERS if peers else ())])
    )  # what is not built will be named in the report
    config = BenchConfig(
        model=model,
        methods=_methods(model, method or [], named, sweeps.values(), dtype, applications),
        applications=applications,
        workloads=tuple(workload or ()),
        data=data,
        prompts=size.prompts if prompts is None else prompts,
        batches=_values("batch", batch, sweeps, 1),
        contexts=_values("context", context_length, sweeps, None),
        temperatures=_values("temperature", temperature, sweeps, 0.0),
        top_ks=_values("top_k", top_k, sweeps, 0),
        max_new_tokens=_values("max_new_tokens", max_new_tokens, sweeps, size.max_new_tokens),
        repeats=size.repeats if repeats is None else repeats,
        seed=seed,
        device=device,
        threads=threads,
        ignore_eos=ignore_eos,
        check=check,
        time_limit_s=size.time_limit_s,
        title=title,
        **_prompt_tokens(model, prompt_tokens),
    )
    _run(config, out, resume, overwrite)


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


def _prompt_tokens(model: str, given: int | None) -> dict[str, int]:
    if given is None:
        return {}
    if not model.startswith("random:"):
        raise ConfigError(
            f"--prompt-tokens {given}", "only a random model's prompts have a length of choice", "use --context"
        )
    return {"prompt_tokens": given}


def _sweeps(texts: list[str]) -> dict[str, Sweep]:
    """By setting."""
    sweeps: dict[str, Sweep] = {}
    for sweep in map(known.parse_sweep, texts):
        if sweeps.setdefault(sweep.setting, sweep) is not sweep:
            first = sweeps[sweep.setting]
            raise ConfigError(f"--sweep {first.text}", f"{sweep.setting} is swept twice", "sweep it once")
    return sweeps


def _values(setting: str, text: str | None, sweeps: dict[str, Sweep], default: Any) -> tuple[Any, ...]:
    """The values of a setting that makes cells, from its own flag or from its sweep."""
    flag, swept = "--" + setting.replace("_", "-"), sweeps.get(setting)
    if text is None:
        return swept.values if swept else (default,)
    if swept:
        raise ConfigError(f"{flag} {text} with --sweep {swept.text}", "both say the same thing", "give one of them")
    try:
        return tuple(CELL_SETTINGS[setting](part.strip()) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"{flag} {text}", "not numbers with commas between", f"write {flag} 1 or {flag} 1,8"
        ) from error


def named_folders(flag: str, pairs: list[str]) -> dict[str, str]:
    """Folders by name, from ``NAME=FOLDER``.

    Raises:
        ConfigError: text of another form, or a name twice.
    """
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, folder = (part.strip() for part in pair.partition("="))
        if not (name and equals and folder) or name in found:
            wrong = "the name is there twice" if name in found else "not a name and a folder"
            raise ConfigError(f"{flag} {pair}", wrong, f"write it like {flag} sql=path/to/folder, each name once")
        found[name] = folder
    return found


def _methods(
    model: str, texts: list[str], peers: list[str], sweeps: Iterable[Sweep], dtype: str, applications: dict[str, str]
) -> tuple[Method, ...]:
    chosen = known.parse_methods(texts, dtype) if texts else known.default_methods(model, dtype)
    added = [m for m in known.peer_methods(peers, dtype) if m.name not in {c.name for c in chosen}]
    return tuple(known.expand(known.with_plain([*chosen, *added], applications), list(sweeps)))


# -- progress


class Bar(Watcher):
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


class Lines(Watcher):
    """Progress in a log: a line for each stage, and one now and then."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._last = clock()
        self._first: tuple[float, int] | None = None  # time and trials done when the first trial began

    def stage(self, text: str) -> None:
        self._say(text)

    def trial(self, done: int, total: int, group: Group, method: Method) -> None:
        now = self._clock()
        self._first = self._first or (now, done)
        if now - self._last < LINE_EVERY_S:
            return
        began, already = self._first
        left = (now - began) / max(done - already, 1) * (total - done)
        self._say(f"{done} of {total} trials, {group.cell.workload}, {method.name}, about {_duration(left)} left")

    def _say(self, text: str) -> None:
        self._last = self._clock()
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


@contextmanager
def watching() -> Iterator[Bar | Lines]:
    """A bar on stderr, or lines where stderr is no terminal."""
    console = stderr()
    if not console.is_terminal:
        yield Lines(console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Drawn between trials alone: a thread that draws would take time from what is measured.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        yield Bar(progress, progress.add_task("starting", total=None))
