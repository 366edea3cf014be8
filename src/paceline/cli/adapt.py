"""``paceline adapt``: make a drafter for a model."""

from __future__ import annotations

import shlex
import sys
from typing import Any

import typer

from ..adapt.config import AdaptConfig
from ..adapt.run import adapt
from . import INTERRUPTED
from .console import ProgressLine, note, stdout, this_command
from .options import ModelArgument, one_model, takes

app = typer.Typer(add_completion=False)


@app.command(name="adapt")
@takes(config=AdaptConfig, defaults={"model": None})
def command(
    name: ModelArgument = None,
    *,
    config: dict[str, Any],
) -> None:
    """Make a drafter for a model on this machine, within a time, and measure what it is worth.

    Ctrl-C keeps all results, and the same command continues. The folder is a drafter: --drafter DIR.

    Examples:
        paceline adapt smollm2-135m
        paceline adapt smollm2-135m --hours 2
        paceline adapt folder/model.gguf --hours 8 --prompts prompts.jsonl
    """
    model = config["model"] = one_model(name, config["model"])
    settings = AdaptConfig(**config)
    try:
        with ProgressLine() as line:
            verdict = adapt(settings, note, line.show, shlex.join(sys.argv[1:]))
    except KeyboardInterrupt as stop:
        note(f"stopped; results are in {settings.folder}, continue: {this_command()}")
        raise typer.Exit(INTERRUPTED) from stop
    console = stdout()
    console.print(f"{verdict.words}.", markup=False)
    for text in verdict.lines():
        console.print(f"  {text}", markup=False)
    console.print(f"{settings.folder}/report/report.md", markup=False)
    console.print(f"paceline generate --model {model} --drafter {settings.folder} --prompt ..", markup=False)
