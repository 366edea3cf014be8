"""Run the server: in this process until it is told to end."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from concurrent.futures import Future
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from .app import make_app
from .client import EngineClient
from .config import ServeConfig
from .connections import Connection
from .generation import Server

CLOSE_S = 2  # for connections, when no request is in flight any more


class _Uvicorn(uvicorn.Server):
    """On a signal lets requests in flight end first, and on a second one not."""

    def __init__(self, config: uvicorn.Config, server: Server) -> None:
        super().__init__(config)
        self._served = server
        self._draining: Future[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end."""
        if self._served.draining or sig == signal.SIGINT:
            super().handle_exit(sig, frame)
            return
        self._served.draining = True
        self._draining = asyncio.run_coroutine_threadsafe(self._drain(), asyncio.get_running_loop())

    async def _drain(self) -> None:
        try:
            await asyncio.wait_for(self._served.client.drained(), self._served.config.drain_s)
        except TimeoutError:
            self._served.client.end_all("the server ends, and this request took longer than it waits")
        await asyncio.sleep(0.05)  # the last bytes of the last answers are written
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say where."""
        await super().startup(sockets)
        for one in sockets or ():
            host, port = one.getsockname()[:2]
            print(f"paceline serves {self._served.model} at http://{host}:{port}", file=sys.stderr, flush=True)


def run(config: ServeConfig, client: EngineClient, model: str, listening: socket.socket) -> None:
    """Serve until a signal comes, or until the engine is found never to start.

    Args:
        config: the options.
        client: of the engine.
        model: its name for clients.
        listening: the socket that listens.

    Raises:
        ConfigError: keys that cannot be used, or an engine that cannot be started.
    """
    server = Server(config, client, config.served_model_name or model)
    app: Any = make_app(server, config)
    options = uvicorn.Config(
        app,
        http=partial(Connection, header_s=config.header_s),  # type: ignore[arg-type]
        loop="uvloop",
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=CLOSE_S,
    )
    runner = _Uvicorn(options, server)
    client.on_failure = partial(setattr, runner, "should_exit", True)
    runner.run(sockets=[listening])
    if client.failed is not None:
        raise client.failed
