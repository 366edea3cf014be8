"""``paceline train``: train drafts, streams and adapters as recipe files state, and write a target's answers.

``paceline train zoo/recipes/streams-sql.toml --target MODEL --data FOLDER --out DIR``
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ..core.errors import CapabilityError, ConfigError
from ..train import answers as answering
from ..train.data import Encoder, SourceSpec
from ..train.files import writing
from ..train.job import TrainingJob, finish, run
from ..train.recipe import locate, read_recipe
from ..weights.files import fingerprint
from ..weights.source import load_tokenizer, resolve_folder
from . import INTERRUPTED
from .console import ProgressLine, note, stdout, this_command
from .help import Group
from .options import takes


class RecipeGroup(Group):
    """A group whose first argument is a recipe file, or one of its commands."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0].endswith(".toml"):
            return "recipe", self.get_command(ctx, "recipe"), args
        if args and args[0] not in self.commands:
            remedy = "name a recipe file (*.toml, zoo/recipes has some), or the command answers"
            raise ConfigError(f"paceline train {args[0]}", "it is neither a recipe file nor a command", remedy)
        return super().resolve_command(ctx, args)


app = typer.Typer(
    add_completion=False,
    cls=RecipeGroup,
    no_args_is_help=True,
    help="""Train a drafter, speculative streams or adapters, as a recipe file states.

    Examples:
        paceline train eagle.toml --target smollm2-135m --data . --out head
        paceline train spire.toml --target paceline-small --data . --out spire
        paceline train answers --target smollm2-135m --data a --out a.jsonl
    """,
    subcommand_metavar="RECIPE.toml|answers [ARGS]...",
)
Target = Annotated[str, typer.Option(metavar="MODEL", help="The target: zoo name, folder or hub name.")]


@app.command(hidden=True)
def recipe(
    file: Annotated[Path, typer.Argument(metavar="RECIPE.toml")],
    target: Target,
    data: Annotated[Path, typer.Option(metavar="FOLDER", help="Holds the files that the recipe names.")],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Checkpoint, log and result; an unfinished run there continues.")
    ],
    init: Annotated[str | None, typer.Option(metavar="MODEL", help="Checkpoint to start from.")] = None,
    cache: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the target's likeliest tokens and states; later runs read it."),
    ] = None,
) -> None:
    """Run a recipe file. Ctrl-C keeps a checkpoint, and the same command continues."""
    job = TrainingJob(
        **vars(locate(read_recipe(file), data)),
        target=resolve_folder(target),
        init=None if init is None else resolve_folder(init),
        out=out,
        cache=cache,
    )
    with ProgressLine() as line:

        def show(step: int, figures: Mapping[str, float]) -> None:
            speed = f"{figures['tokens_per_s']:.0f} tokens/s"
            line.show(f"step {step} of {job.config.steps}: loss {figures['loss']:.3f}, {speed}")

        trainer = run(job, show, note)
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
    target: Target,
    data: Annotated[Path, typer.Option(metavar="FILE", help="Prompts to answer.")],
    out: Annotated[Path, typer.Option(metavar="FILE.jsonl", help="Where answers go; existing ones are kept.")],
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
    encoder = Encoder(tokenizer, settings.piece)
    if out.suffix != ".jsonl":
        raise ConfigError(f"--out {out}", "answers are JSON lines", "name a file that ends in .jsonl")
    with writing(f"--out {out}", "name another file"):
        out.parent.mkdir(parents=True, exist_ok=True)
    llm = LLM(target, max_sequences=batch, max_model_len=settings.piece + 8)
    answer, mark = answerer(llm, settings.piece, settings.temperature), fingerprint(folder)
    prompts = answering.choose(source := SourceSpec(file=str(data)), encoder, settings)
    facts = answering.making(source, settings, mark)
    try:
        count = answering.write(out, prompts, facts, tokenizer, answer, settings.seed, batch * 8, note)
    except KeyboardInterrupt as stop:
        note(f"stopped; the answers in {out} are kept, continue: {this_command()}")
        raise typer.Exit(INTERRUPTED) from stop
    note(f"{count:,} answers in {out}")
