"""``paceline train``: train drafts, streams and adapters; one command a kind, or a recipe file.

A recipe file (``*.toml``) takes the place of the kind: ``paceline train zoo/recipes/streams-sql.toml --data FOLDER``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ..core.errors import CapabilityError, ConfigError
from ..core.options import check, option, suggest
from ..train import answers as answering
from ..train.data import Encoder, SourceSpec
from ..train.files import writing
from ..train.job import TrainingJob, finish, run
from ..train.recipe import locate, read_recipe
from ..train.registry import KINDS, RecipeKind
from ..train.trainer import Phase, TrainConfig
from ..weights.files import fingerprint
from ..weights.source import load_tokenizer, resolve_folder
from . import INTERRUPTED
from .console import ProgressLine, note, stdout, this_command
from .help import Group
from .options import takes

SUFFIX = ".toml"


class RecipeGroup(Group):
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
    help="""Train a draft model, speculative streams or adapters. RECIPE.toml in place of a kind runs a file.

    Examples:
        paceline train zoo/recipes/streams-sql.toml --data folder --out set
        paceline train eagle --target smollm2-135m --data a.jsonl --out head
        paceline train answers --target smollm2-135m --data a --out a.jsonl
    """,
    subcommand_metavar="KIND|RECIPE.toml [ARGS]...",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Files of a run, how it is watched, and the packed rows of a run without a recipe file."""

    out: str = option(help="Checkpoint, log and result; an unfinished run there continues.", metavar="DIR")
    target: str | None = option(None, help="What it is trained for: zoo name, folder or hub name.", metavar="MODEL")
    init: str | None = option(None, help="Checkpoint to start from.", metavar="MODEL")
    cache: str | None = option(
        None, help="Folder for the target's likeliest tokens and states; later runs read it.", metavar="DIR"
    )
    rows: int = option(8, help="packed rows a step")
    length: int = option(512, help="tokens a row")
    prompt_weight: float = option(0.0, help="weight of prompt tokens in the loss")

    def __post_init__(self) -> None:
        check(self)

    def places(self) -> dict[str, Any]:
        """Return paths by fields of `TrainingJob`.

        Raises:
            ConfigError: no target, or no model of a name.
        """
        if self.target is None:
            raise ConfigError("paceline train", "no target is named", "give --target MODEL")
        folders = {name: resolve_folder(at) if (at := getattr(self, name)) else None for name in ("target", "init")}
        return {"out": Path(self.out), "cache": None if self.cache is None else Path(self.cache), **folders}


ROWS = ("rows", "length", "prompt_weight")  # the options of a recipe file


def _command(name: str, kind: RecipeKind) -> None:
    """Register the command of a kind, with its options as flags."""

    @app.command(name=name, help=kind.about)
    @takes(where=RunConfig, options=kind.Options, config=TrainConfig, without=() if kind.cached else ("cache",))
    def command(
        data: Annotated[
            list[str],
            typer.Option(
                metavar="FILE[=WEIGHT]",
                help="JSONL or text, .gz too; default weight: its size. Repeat it for several.",
            ),
        ],
        held_out: Annotated[
            list[str] | None, typer.Option(metavar="FILE", help="Held-out data for the evaluations.")
        ] = None,
        *,
        where: dict[str, Any],
        options: dict[str, Any],
        config: dict[str, Any],
    ) -> None:
        settings = RunConfig(**_given(where))
        job = TrainingJob(
            kind=name,
            options=_given(options),
            config=TrainConfig(**_given(config)),
            phases=[Phase(rows=settings.rows, length=settings.length)],
            sources=[_source(text) for text in data],
            held_out=[_source(text) for text in held_out or []],
            prompt_weight=settings.prompt_weight,
            **settings.places(),
        )
        _train(job, settings)


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that were set; the others keep their defaults."""
    return {name: value for name, value in values.items() if value is not None}


for _name, _kind in KINDS.items():
    _command(_name, _kind)


@app.command(name="file", hidden=True)
@takes(where=RunConfig, without=ROWS)
def file(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE.toml")],
    data: Annotated[str, typer.Option(metavar="FOLDER", help="Holds the files that the recipe's manifest names.")],
    *,
    where: dict[str, Any],
) -> None:
    """Run a recipe file."""
    settings, recipe_found = RunConfig(**where), locate(read_recipe(Path(recipe)), Path(data))
    _train(TrainingJob.of(recipe_found, **settings.places()), settings)


def _source(text: str) -> SourceSpec:
    """Parse ``FILE`` or ``FILE=WEIGHT``."""
    name, _, weight = text.rpartition("=")
    if not name:
        return SourceSpec(file=text, weight=float(Path(text).stat().st_size) if Path(text).is_file() else 1.0)
    try:
        return SourceSpec(file=name, weight=float(weight))
    except ValueError as error:
        raise ConfigError(f"--data {text}", "the weight is not a number", "write FILE or FILE=0.5") from error


class StepLine(ProgressLine):
    """The progress of a training run.

    Args:
        steps: how many there are.
    """

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def step(self, step: int, figures: Mapping[str, float]) -> None:
        """Show loss and speed."""
        self.show(f"step {step} of {self.steps}: loss {figures['loss']:.3f}, {figures['tokens_per_s']:.0f} tokens/s")

    def evaluated(self, step: int, figures: Mapping[str, float]) -> None:
        """Print what was measured on held-out data."""
        note(f"step {step}: " + ", ".join(f"{name} {value:.3f}" for name, value in figures.items()))


def _train(job: TrainingJob, settings: RunConfig) -> None:
    with (line := StepLine(job.config.steps)):
        trainer = run(job, [line], note)
    if trainer.finished:
        result = finish(job, trainer)
        note(f"{trainer.step} steps, {trainer.tokens:,} tokens; the last part took {trainer.seconds:.0f} s")
        stdout().print(str(result), markup=False)
    else:
        reached = f"stopped after step {trainer.step} of {job.config.steps}, checkpoint in {job.out}"
        note(f"{reached}; continue: {this_command()}")
    if trainer.interrupted:
        raise typer.Exit(INTERRUPTED)


@app.command()
@takes(config=answering.AnswerConfig)
def answers(
    target: Annotated[str, typer.Option(metavar="MODEL", help="The model that answers.")],
    data: Annotated[list[str], typer.Option(metavar="FILE", help="Prompts to answer; repeat it for several.")],
    out: Annotated[str, typer.Option(metavar="FILE.jsonl", help="Where answers go; existing ones are kept.")],
    batch: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 64,
    *,
    config: dict[str, Any],
) -> None:
    """Generate the target's answers to the data's prompts: the best training data for drafts."""
    from ..adapt.answering import answerer
    from ..api.llm import LLM

    settings = answering.AnswerConfig(**config)
    folder = resolve_folder(target)
    tokenizer = load_tokenizer(folder)
    if tokenizer.eos_token_id is None:
        raise CapabilityError(f"--target {target}", "its tokenizer has no end-of-text token", "name another target")
    encoder, path = Encoder(tokenizer, settings.piece), Path(out)
    if path.suffix != ".jsonl":
        raise ConfigError(f"--out {out}", "answers are JSON lines", "name a file that ends in .jsonl")
    with writing(f"--out {out}", "name another file"):
        path.parent.mkdir(parents=True, exist_ok=True)
    llm = LLM(target, max_sequences=batch, max_model_len=settings.piece + 8)
    answer, mark = answerer(llm, settings.piece, settings.temperature), fingerprint(folder)
    for name in data:
        part = path if len(data) == 1 else path.with_name(f"{path.stem}.{Path(name).name.split('.')[0]}{path.suffix}")
        try:
            count = answering.write(part, SourceSpec(file=name), encoder, settings, answer, mark, batch * 8, note)
        except KeyboardInterrupt as stop:
            note(f"stopped; the answers in {part} are kept, continue: {this_command()}")
            raise typer.Exit(INTERRUPTED) from stop
        note(f"{count:,} answers in {part}")
