"""Run the server in this process until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from concurrent.futures import Future
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from .app import make_app
from .client import EngineClient
from .config import ServeConfig
from .generation import Server

log = logging.getLogger(__name__)
CLOSE_S = 2  # for connections, when no request is in flight any more


class _Uvicorn(uvicorn.Server):
    """On a signal lets requests in flight end first, and on a second one not."""

    def __init__(self, config: uvicorn.Config, server: Server) -> None:
        super().__init__(config)
        self._served = server
        self._draining: Future[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end."""
        again, self._served.draining = self._served.draining, True
        loop = asyncio.get_running_loop()
        if again or sig == signal.SIGINT:
            loop.call_soon_threadsafe(self._served.client.end_all, "the server is shutting down")
            super().handle_exit(sig, frame)
            return
        self._draining = asyncio.run_coroutine_threadsafe(self._drain(), loop)

    async def _drain(self) -> None:
        try:
            await asyncio.wait_for(self._served.client.drained(), self._served.config.drain_s)
        except TimeoutError:
            self._served.client.end_all("the server is shutting down, and this request took longer than it waits")
        await asyncio.sleep(0.05)  # the last bytes of the last answers are written
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and print the address once the model is loaded."""
        await super().startup(sockets)
        assert sockets is not None
        self._saying = asyncio.ensure_future(self._say_ready(*sockets[0].getsockname()[:2]))

    async def _say_ready(self, host: str, port: int) -> None:
        client = self._served.client
        await client.described.wait()
        if (described := client.description) is None:
            return
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        lines = {"model": ", ".join([self._served.model, *described.applications])}
        lines |= {"drafter": described.speculation["drafter"], "playground": f"{url}/", "base_url": f"{url}/v1"}
        head = f"ready in {time.monotonic() - client.launched_at:.1f} s"
        print("\n".join([head, *(f"  {name:10}  {text}" for name, text in lines.items())]), file=sys.stderr, flush=True)


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
    server = Server(config, client, config.name_of(model))
    app: Any = make_app(server, config)
    options = uvicorn.Config(
        app,
        http="httptools",
        loop="uvloop",
        ws="none",
        lifespan="on",
        log_level=max(logging.WARNING, logging.getLogger("paceline").level),
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=CLOSE_S,
    )
    runner = _Uvicorn(options, server)
    client.on_failure = partial(setattr, runner, "should_exit", True)
    log.info("loading %s", model)
    runner.run(sockets=[listening])
    if client.failed is not None:
        raise client.failed
