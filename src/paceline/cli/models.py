"""``paceline models``: the models that can be loaded by name."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.text import Text

from .. import zoo
from .console import stdout

app = typer.Typer(add_completion=False)


@app.command()
def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """List the embedded models and the sets trained for them.

    In the place of such a name every --model also takes the folder of a Hugging Face model, or the
    name of one on the hub; --application and --drafter streams:NAME take trained sets. stretch:NAME,times=8
    is a model with the same tokens whose layers cost eight times as much.
    """
    entries = zoo.available()
    if as_json:
        for entry in entries:
            typer.echo(json.dumps({**dataclasses.asdict(entry), "path": str(entry.path)}))
        return
    for entry in entries:
        _show(entry)


def _show(entry: zoo.ZooEntry) -> None:
    facts = f"  {entry.role}, {entry.parameters / 1e6:.1f}M parameters, {entry.bytes / 1e6:.0f} MB"
    draft = f", its draft: {entry.draft}" if entry.draft else ""
    target = f", for {entry.target}" if entry.target else ""
    stdout().print(Text.assemble((entry.name, "bold green"), facts, draft, target))
    stdout().print(Text(f"  {entry.description}"))
    stdout().print(Text(f"  {entry.path}", style="dim"))
