"""``paceline train``: train drafts, streams, adapters and models; one command a kind, or a recipe file.

A recipe file (``*.toml``) takes the place of the kind: ``paceline train zoo/recipes/streams-sql.toml --data FOLDER``.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..core.errors import CapabilityError, ConfigError
from ..core.options import check, option, suggest
from ..network.loader import load_tokenizer, resolve_folder
from ..network.streams import fingerprint
from ..training import answers as answering
from ..training.data import Encoder, SourceSpec
from ..training.job import TrainingJob, finish, run
from ..training.recipe import locate, read_recipe
from ..training.registry import KINDS, RecipeKind
from ..training.trainer import Phase, TrainConfig, require_accelerate
from . import INTERRUPTED
from .console import note, stderr, stdout
from .options import takes
from .train_progress import Bar, event_file

SUFFIX = ".toml"


class RecipeGroup(TyperGroup):
    """A name that ends in .toml is a recipe file."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0].endswith(SUFFIX):
            return "file", self.get_command(ctx, "file"), args
        if args and args[0] not in self.commands:
            remedy = suggest(args[0], [*KINDS, "answers"], "kind") + ", or a recipe file (*.toml)"
            raise ConfigError(f"recipe {args[0]!r}", "there is no such recipe", remedy)
        return super().resolve_command(ctx, args)


app = typer.Typer(
    add_completion=False,
    cls=RecipeGroup,
    no_args_is_help=True,
    help="Train a model, a draft model, speculative streams or adapters. RECIPE.toml in place of a kind runs a file.",
    subcommand_metavar="KIND|RECIPE.toml [ARGS]...",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowConfig:
    """Packed rows of a run that no recipe file describes."""

    rows: int = option(8, help="packed rows a step, over all processes")
    length: int = option(512, help="tokens a row")
    final_length: int | None = option(None, help="tokens a row in the last part of the run, as many tokens a step")
    final_share: float = option(0.25, help="how much of the run that part is, above 0 and below 1", above=0, below=1)
    prompt_weight: float = option(0.0, help="weight of prompt tokens in the loss")
    cache: str | None = option(
        None, help="folder for the target's likeliest tokens: scored once, read by later runs (with --top)"
    )

    def __post_init__(self) -> None:
        check(self)

    def phases(self) -> list[Phase]:
        """One phase, or two."""
        first = Phase(rows=self.rows, length=self.length)
        if self.final_length is None:
            return [first]
        rows = max(1, self.rows * self.length // self.final_length)
        return [
            dataclasses.replace(first, until=1 - self.final_share),
            Phase(until=1.0, rows=rows, length=self.final_length),
        ]


Target = Annotated[
    str | None, typer.Option(metavar="MODEL", help="What it is trained for: zoo name, folder or hub name.")
]
Data = Annotated[
    list[str],
    typer.Option(
        metavar="FILE[=WEIGHT]", help="JSONL or text, .gz too; default weight: its size. Repeat it for several."
    ),
]
Held = Annotated[list[str] | None, typer.Option(metavar="FILE", help="Held-out data for the evaluations.")]
Out = Annotated[str, typer.Option(metavar="DIR", help="Checkpoint, log and result; an unfinished run there goes on.")]
Init = Annotated[str | None, typer.Option(metavar="MODEL", help="Checkpoint to start from.")]
Cache = Annotated[
    str | None, typer.Option(metavar="DIR", help="Holds the target's likeliest tokens (top), and states.")
]
Stop = Annotated[int | None, typer.Option(metavar="STEPS", help="Stop here, with a checkpoint, and go on later.")]
EventFile = Annotated[bool, typer.Option(help="Write a TensorBoard log beside log.jsonl.")]


def _command(name: str, kind: RecipeKind) -> None:
    """Register the command of a kind, with its options as flags."""

    @app.command(name=name, help=kind.about)
    @takes(options=kind.Options, config=TrainConfig, layout=RowConfig, without=() if kind.cached else ("cache",))
    def command(
        data: Data,
        out: Out,
        target: Target = None,
        held_out: Held = None,
        init: Init = None,
        stop_after: Stop = None,
        tensorboard: EventFile = True,
        *,
        options: dict[str, Any],
        config: dict[str, Any],
        layout: dict[str, Any],
    ) -> None:
        rows = RowConfig(**_given(layout))
        job = TrainingJob(
            kind=name,
            options=_given(options),
            config=TrainConfig(**_given(config)),
            phases=rows.phases(),
            sources=[_source(text) for text in data],
            held_out=[_source(text) for text in held_out or []],
            prompt_weight=rows.prompt_weight,
            **_places(out, target, init, rows.cache),
        )
        _train(job, stop_after, tensorboard)


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """What was left out keeps its default."""
    return {name: value for name, value in values.items() if value is not None}


def _places(out: str, target: str | None, init: str | None, cache: str | None) -> dict[str, Any]:
    """Where a run's parts are, by fields of `TrainingJob`."""
    return {
        "out": Path(out),
        "target": None if target is None else resolve_folder(target),
        "init": None if init is None else resolve_folder(init),
        "cache": None if cache is None else Path(cache),
    }


for _name, _kind in KINDS.items():
    _command(_name, _kind)


@app.command(name="file", hidden=True)
def file(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE.toml")],
    data: Annotated[str, typer.Option(metavar="FOLDER", help="Holds the files that the recipe's manifest names.")],
    out: Out,
    target: Target = None,
    init: Init = None,
    stop_after: Stop = None,
    tensorboard: EventFile = True,
    cache: Cache = None,
) -> None:
    """Run a recipe file."""
    made = locate(read_recipe(Path(recipe)), Path(data))
    _train(TrainingJob.of(made, **_places(out, target, init, cache)), stop_after, tensorboard)


def _source(text: str) -> SourceSpec:
    """``FILE`` or ``FILE=WEIGHT``."""
    name, _, weight = text.rpartition("=")
    if not name:
        return SourceSpec(file=text, weight=_size(text))
    try:
        return SourceSpec(file=name, weight=float(weight))
    except ValueError as error:
        raise ConfigError(f"--data {text}", "the weight is no number", "write FILE or FILE=0.5") from error


def _size(text: str) -> float:
    path = Path(text)
    return float(path.stat().st_size) if path.is_file() else 1.0


def _train(job: TrainingJob, stop_after: int | None, tensorboard: bool) -> None:
    require_accelerate()
    first = int(os.environ.get("RANK", "0")) == 0  # of several processes, one speaks
    bar = Bar(stderr(), job.config.steps)
    watchers: list[Any] = [bar, *(event_file(job.out) if tensorboard else [])] if first else []
    try:
        trainer, outcome = run(job, watchers, stop_after, note if first else lambda text: None)
    finally:
        for watcher in watchers:
            watcher.close()
    if outcome.finished:
        result = finish(job, trainer, outcome)
        if first:
            note(f"{outcome.step} steps, {outcome.tokens:,} tokens; the last part took {outcome.seconds:.0f} s")
            stdout().print(str(result), markup=False)
    elif first:
        again = re.sub(r" --stop-after[ =]\S+", "", shlex.join(["paceline", *sys.argv[1:]]))
        note(f"stopped after step {outcome.step} of {job.config.steps}, with a checkpoint in {job.out}; go on: {again}")
    if trainer.interrupted:
        raise typer.Exit(INTERRUPTED)


@app.command()
@takes(config=answering.AnswerConfig)
def answers(
    target: Annotated[str, typer.Option(metavar="MODEL", help="The model that answers.")],
    data: Annotated[list[str], typer.Option(metavar="FILE", help="Prompts to answer; repeat it for several.")],
    out: Annotated[str, typer.Option(metavar="FILE.jsonl", help="Where the answers go; what is there is kept.")],
    batch: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 64,
    *,
    config: dict[str, Any],
) -> None:
    """Generate the target's answers to the data's prompts: the best training data for drafts."""
    from ..core.sampling import SamplingParams
    from ..llm import LLM

    asked = answering.AnswerConfig(**config)
    length, temperature = asked.piece, asked.temperature
    folder = resolve_folder(target)
    tokenizer = load_tokenizer(folder)
    if tokenizer.eos_token_id is None:
        raise CapabilityError(f"--target {target}", "its tokenizer has no end-of-text token", "name another target")
    encoder = Encoder(tokenizer, length)
    path = _answer_file(out)
    llm = LLM(target, max_sequences=batch, max_model_len=length + 8)

    def answer(prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[list[int]]:
        params = [
            SamplingParams(
                max_tokens=max(1, length - len(ids)), temperature=temperature, seed=own if temperature else None
            )
            for ids, own in zip(prompts, seeds, strict=True)
        ]
        outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params)
        return [list(output.outputs[0].token_ids) for output in outputs]

    mark = fingerprint(folder)
    for name in data:
        part = path if len(data) == 1 else path.with_name(f"{path.stem}.{Path(name).name.split('.')[0]}{path.suffix}")
        try:
            count = answering.write(part, SourceSpec(file=name), encoder, asked, answer, mark, batch * 8, note)
        except KeyboardInterrupt as stop:
            again = shlex.join(["paceline", *sys.argv[1:]])
            note(f"stopped; the answers in {part} are kept, go on: {again}")
            raise typer.Exit(INTERRUPTED) from stop
        note(f"{count:,} answers in {part}")


def _answer_file(out: str) -> Path:
    """Where answers go; its folder is there afterwards."""
    path = Path(out)
    if path.suffix != ".jsonl":
        raise ConfigError(f"--out {out}", "answers are JSON lines", "name a file that ends in .jsonl")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}", f"its folder cannot be made ({error})", "name another file") from error
    return path
