"""``paceline export``: a trained head in the layout of another engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..bridges.export import Engine
from ..bridges.export import export as write
from ..weights.source import resolve_folder

app = typer.Typer(add_completion=False)


@app.command()
def export(
    engine: Annotated[Engine, typer.Argument(metavar="ENGINE", help="vllm, sglang or speculators.")],
    head: Annotated[str, typer.Argument(metavar="HEAD", help="Head of EAGLE, EAGLE-2 or EAGLE-3: folder or name.")],
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where it is written; not there yet.")],
    verifier: Annotated[str, typer.Option(help="Name or folder of the target, which speculators' config has.")] = "",
    tokens: Annotated[int, typer.Option(min=1, max=64, help="Tokens drafted a step.")] = 3,
) -> None:
    """Write an EAGLE head as another engine loads it, and print the command that serves it there.

    What the engine cannot express, such as a choice of hot tokens, is refused.

    Examples:
        paceline export vllm paceline-small-eagle head
        paceline export sglang folder/head head --tokens 4
        paceline export speculators folder/head head --verifier folder/model
    """
    typer.echo(write(engine, resolve_folder(head), out, verifier, tokens))
