"""``paceline serve``: a model over HTTP, for clients of OpenAI's API.

Nothing here imports torch, which takes longer than all else that this process does; the engine's process imports it
meanwhile.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..distributed.placement import Placement
from ..distributed.requests import KINDS
from ..distributed.worker import Patience, WorkerSpec
from ..options import LLMOptions
from ..serve.client import EngineClient
from ..serve.config import ServeConfig
from .options import DEFAULT_MODEL, DRAFTER_SHOWN, takes

SILENT_S = 2.5  # without one of the beats, of which six come in this time; a pass, however long, does not hold them up
HEALTHY_S = 1.0  # an engine that was well for so long is started again at once
app = typer.Typer(add_completion=False)


@app.command()
@takes(
    serve=ServeConfig,
    llm=LLMOptions,
    without=("model",),
    shown={"drafter": DRAFTER_SHOWN},
    defaults={"max_prompt_rows": "auto"},
)
def serve(
    model: Annotated[str, typer.Argument(help="Embedded model, folder or hub name.")] = DEFAULT_MODEL,
    *,
    serve: dict[str, Any],
    llm: dict[str, Any],
) -> None:
    """Serve a model to clients of OpenAI's API.

    The engine runs in a process of its own; where that dies or hangs, it is started again and streams go on. Ctrl-C
    ends the server, SIGTERM lets requests in flight end first.
    """
    config = ServeConfig(**{**serve, "allowed_hosts": serve["allowed_hosts"] or None})
    config.keys()
    listening = config.listen()
    options = vars(LLMOptions(**llm, model=model)).copy()
    spec = WorkerSpec(
        name="engine",
        service="paceline.engine_worker:service",
        options={"options": {name: value for name, value in options.items() if name != "device"}},
        kinds=KINDS,
        placement=Placement(device=options["device"]),
        channel="socket",
    )
    patience = Patience(start_s=config.start_s, stuck_s=config.stuck_s, silent_s=SILENT_S, healthy_s=HEALTHY_S)
    client = EngineClient(spec, patience, None if config.no_spare else "paceline.engine_worker:prepare")
    client.launch()  # it loads while this process imports what HTTP needs
    from ..serve.server import run

    run(config, client, model, listening)
