"""``paceline stage``: serve a stage of a target to a coordinator on another host."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from ..assembly import open_source
from ..config import LLMConfig
from ..core.errors import ConfigError
from ..core.options import shown
from ..distributed.hosts import Host, run
from ..distributed.placement import Placement
from ..distributed.tcp import Listener
from ..network.files import fingerprint
from ..network.loader import parse_device
from ..rounds.pipeline.split import HOST
from ..stage_worker import chosen
from .console import note
from .options import DEFAULT_MODEL, takes

app = typer.Typer(add_completion=False)
DEFAULT_LISTEN = "127.0.0.1:7710"


@app.command()
@takes(placement=Placement, without=("host",))
def stage(
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="An address of this host and a free port of it, or port 0.")
    ] = DEFAULT_LISTEN,
    model: Annotated[str, typer.Option(help="The coordinator's model: the same checkpoint.")] = DEFAULT_MODEL,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Fetch nothing from the hub.")] = False,
    *,
    placement: dict[str, Any],
) -> None:
    """Serve a stage of a model's pipeline.

    The other host names this one: paceline generate --pipeline HOST:PORT,HOST:PORT. It says which layers; they are
    loaded when it connects, and one coordinator is served at a time, one after the other. Whoever reaches the port may
    connect: use a network whose hosts trust each other. Ctrl-C ends it.
    """
    where = Placement(**{**placement, "cores": placement["cores"] or ()})
    parse_device(where.device)
    source = open_source(LLMConfig(model=model, revision=revision, offline=offline), model, "auto")
    fingerprint(source.folder)  # says now what is wrong with the files
    host, port = _address(listen)
    listener = Listener(host, port)
    note(f"a stage of {model} listens at {listener.host}:{listener.port}")
    run(Host(listener, partial(chosen, model, revision, offline), where, note))


def _address(text: str) -> tuple[str, int]:
    match = HOST.fullmatch(text.strip())
    if match is None or int(match[2]) >= 2**16:
        raise ConfigError(f"--listen {shown(text)}", "it is not HOST:PORT", "write an address, such as 10.0.0.2:7710")
    return match[1], int(match[2])
