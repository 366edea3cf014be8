"""``paceline serve``: a model over HTTP, for clients of OpenAI's and Anthropic's APIs.

Nothing here imports torch, which takes longer than all else that this process does; the engine's process imports it
meanwhile.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import Any

import typer

from ..api.options import LLMOptions
from ..core.errors import CapabilityError
from ..core.log import LEVEL_VARIABLE, log_to_stderr
from ..serve.client import EngineClient
from ..serve.config import ServeConfig
from .options import DEFAULT_MODEL, DEFAULTS, ModelArgument, one_model, takes

app = typer.Typer(add_completion=False)


@app.command()
@takes(
    serve=ServeConfig,
    llm=LLMOptions,
    defaults={**DEFAULTS, "model": None, "max_prompt_rows": "auto"},
    shown_defaults={"model": DEFAULT_MODEL},
)
def serve(
    name: ModelArgument = None,
    *,
    serve: dict[str, Any],
    llm: dict[str, Any],
) -> None:
    """Serve a model to clients of OpenAI's and Anthropic's APIs.

    The engine runs in a process of its own; where that dies or hangs, it is started again and streams continue. Ctrl-C
    ends the server, SIGTERM lets requests in flight end first.

    Examples:
        paceline serve smollm2-135m
        paceline serve folder/model.gguf --port 8080
        paceline serve --host 0.0.0.0 --api-key-file keys.txt
    """
    missing = [package for package in ("starlette", "uvicorn", "prometheus_client") if find_spec(package) is None]
    if missing:
        remedy = f"run {sys.executable} -m pip install 'paceline[serve]'"
        raise CapabilityError("paceline serve", f"packages are missing: {', '.join(missing)}", remedy)
    model = llm["model"] = one_model(name, llm["model"], DEFAULT_MODEL)
    config = ServeConfig(**{**serve, "allowed_hosts": serve["allowed_hosts"] or None})
    config.keys()
    os.environ.setdefault(LEVEL_VARIABLE, "info")
    log_to_stderr()
    listening = config.listen()
    client = EngineClient(vars(LLMOptions(**llm)))
    client.launch()  # it loads while this process imports what HTTP needs
    from ..serve.server import run

    run(config, client, model, listening)
