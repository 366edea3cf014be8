"""``paceline train``: train drafts, streams and adapters as recipe files state.

``paceline train zoo/recipes/streams-sql.toml --target MODEL --data FOLDER --out DIR``
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from ..train.job import TrainingJob, finish, run
from ..train.recipe import locate, read_recipe
from ..weights.source import resolve_folder
from . import INTERRUPTED
from .console import ProgressLine, note, stdout, this_command

app = typer.Typer(add_completion=False)


@app.command()
def train(
    file: Annotated[Path, typer.Argument(metavar="RECIPE.toml", help="Recipe file; zoo/recipes has some.")],
    target: Annotated[str, typer.Option(metavar="MODEL", help="The target: zoo name, folder or hub name.")],
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
    """Train a drafter, speculative streams or adapters, as a recipe file states.

    Ctrl-C keeps a checkpoint, and the same command continues.

    Examples:
        paceline train eagle.toml --target smollm2-135m --data . --out head
        paceline train spire.toml --target paceline-small --data . --out spire
        paceline train medusa.toml --target m --data . --cache states --out heads
    """
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
