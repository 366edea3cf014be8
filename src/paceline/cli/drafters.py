"""``paceline drafters``: the drafters and their options."""

from __future__ import annotations

import typer
from rich.table import Table
from rich.text import Text

from ..draft.registry import describe
from ..weights import zoo
from .console import stdout

app = typer.Typer(add_completion=False)


@app.command()
def drafters() -> None:
    """List the drafters and their options, and for which models the zoo has weights of them.

    One is chosen with --drafter NAME, --drafter NAME:WEIGHTS or --drafter NAME,OPTION=VALUE,...; a trained one without
    weights means the zoo's for the model in use.

    Examples:
        paceline drafters
        paceline generate -p "One, two, three" --drafter suffix
        paceline generate -p "One, two, three" --drafter ngram,depth=4
    """
    console = stdout()
    for row in describe():
        console.print(Text.assemble((row.name, "bold green"), f"  {row.help}", (f"  ({row.origin})", "dim")))
        if row.error:
            console.print(Text(f"  cannot be used: {row.error}", style="red"))
        for model, name in zoo.readable(row.name).items():
            console.print(Text(f"  for {model} the zoo has {name}"))
        if row.options:
            table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
            for one in row.options:
                table.add_row(one.name, Text(one.type, style="cyan"), Text(one.default, style="dim"), one.help)
            console.print(table)
