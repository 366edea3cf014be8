"""What Ray Serve runs: `Replica`, a whole server, and `Router`, which says for each request which of them it goes to.

HAProxy asks the router (``/internal/route``) and sends the request to the replica's own port: neither a request nor a
chunk goes through a handle.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..core.errors import CapabilityError
from .app import make_app
from .client import engine_client
from .config import ServeConfig
from .generation import Server
from .http import CONNECTION, APIError, failure
from .last_words import LastWords
from .metrics import merged
from .routing import Loads, Routes, RoutingKey, wanted
from .switches import PINNED

HEADER = b"x-paceline-replica"
SESSION = "x-session-id"
STREAM = b"text/event-stream"
APPLICATION, DEPLOYMENT = "paceline", "server"
LOST = APIError(503, "the replica that answered was lost: ask again", code="replica_lost")


class Replica:
    """A server in a process of Serve's.

    Args:
        config: fields of `ServeConfig`.
        options: fields of `LLMOptions`.
        model: its name for clients.

    Raises:
        CapabilityError: Serve runs without what `switches` pins.
        ConfigError: keys, a template or an engine that cannot be had on this host.
    """

    def __init__(self, config: Mapping[str, Any], options: Mapping[str, Any], model: str) -> None:
        check_switches()
        own = ServeConfig(**config)
        self._client = engine_client(own, options)
        self._client.launch()
        self._server = Server(own, self._client, model, replica=serve.get_replica_context().replica_tag)
        self._server.all_metrics = self._all_metrics
        self._last = LastWords()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return ServedReplica(make_app(self._server, self._server.config), self._server, self._last)

    async def _run_asgi_lifespan_startup(self) -> None:
        """Serve's own, whose error says of an engine that cannot be had no more than that."""
        try:
            await super()._run_asgi_lifespan_startup()  # type: ignore[misc]
        except RuntimeError as error:
            raise self._client.failed or error from None

    def check_health(self) -> None:
        """Called by Serve; the engine's client starts another engine itself, until it finds that none can be had."""
        if self._client.failed is not None:
            raise self._client.failed

    def record_replica_metadata(self) -> dict[str, Any]:
        """Called by Serve: the name by which HAProxy knows this replica."""
        return {"id": serve.get_replica_context().replica_id.to_full_id_str()}

    def record_routing_stats(self) -> dict[str, Any]:
        """Called by Serve: what `Loads` reads."""
        return {"open": self._client.num_open, "ready": self._client.ready, "at": time.time()}

    async def metrics(self) -> str:
        """This replica's, for whichever replica is asked for all of them."""
        return await self._server.metrics()

    async def _all_metrics(self) -> str:
        handle = serve.get_deployment_handle(DEPLOYMENT, APPLICATION)
        return merged(await handle.broadcast("metrics").results_async())


class ServedReplica:
    """The application as Serve's HTTP runs it: it is started when its engine is ready, answers carry the replica's
    name, and chunks of streams take the way of ASGI.

    Args:
        app: the server's.
        server: what it serves.
        last: ends streams where this process is killed.
    """

    def __init__(self, app: ASGIApp, server: Server, last: LastWords) -> None:
        self._app, self._server, self._last = app, server, last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or start."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, self._when_ready(send))
            return
        chunks = Chunks(send, (HEADER, str(self._server.replica).encode()), partial(self._begun, scope))
        scope["extensions"] = {CONNECTION: {"write": chunks.write}}
        try:
            await self._app(scope, receive, chunks.send)
        finally:
            if (number := chunks.close()) is not None:
                self._last.end(number)

    def _begun(self, scope: Scope) -> int | None:
        return self._last.begin(tuple(scope["client"]), failure(scope["path"], LOST)) if scope["client"] else None

    def _when_ready(self, send: Send) -> Send:
        async def told(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                client = self._server.client
                await client.described.wait()
                if client.failed is not None:
                    message = {"type": "lifespan.startup.failed", "message": str(client.failed)}
            await send(message)

        return told


class Chunks:
    """Sends parts of a body that are written without waiting, in order with all else of a response.

    Args:
        send: ASGI's.
        header: one more of the response.
        begun: called when the head of a stream is sent; it numbers the stream.
    """

    def __init__(self, send: Send, header: tuple[bytes, bytes], begun: Callable[[], int | None]) -> None:
        self._send, self._header, self._begun = send, header, begun
        self._number: int | None = None
        self._parts: list[bytes] = []
        self._sending: asyncio.Task[None] | None = None

    def write(self, data: bytes) -> None:
        """A part of the body."""
        self._parts.append(data)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.ensure_future(self._flush())

    async def send(self, message: Message) -> None:
        """A message of ASGI, behind all that was written."""
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ())]
            await self._send({**message, "headers": [*headers, self._header]})
            if any(name == b"content-type" and value.startswith(STREAM) for name, value in headers):
                self._number = self._begun()
            return
        if self._sending is not None:
            await self._sending
        await self._send(message)

    def close(self) -> int | None:
        """Nothing more is sent; the stream's number, if it is one."""
        if self._sending is not None:
            self._sending.cancel()
        return self._number

    async def _flush(self) -> None:
        while self._parts:
            body, self._parts = b"".join(self._parts), []
            await self._send({"type": "http.response.body", "body": body, "more_body": True})


class Router:
    """Answers HAProxy's question for each request.

    Args:
        replicas: a handle of `Replica`'s deployment; it is asked for choices and gets no request.
    """

    def __init__(self, replicas: DeploymentHandle[Any]) -> None:
        check_switches()
        self._replicas = replicas

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return Starlette(routes=[Route("/internal/route", self.route, methods=["POST"])])

    async def route(self, request: Request) -> JSONResponse:
        """The replica that a request goes to."""
        asked = wanted(await request.body(), request.headers.get(SESSION))
        async with self._replicas.choose_replica(asked, _reserve=False) as chosen:
            return JSONResponse({"replica_id": chosen.replica_metadata["id"]})


class ByPrefix(RequestRouter):
    """Serve's router class for `Router`'s handle: `Routes` decides."""

    def initialize_state(self, **_: Any) -> None:
        """Called by Serve."""
        self._routes, self._loads = Routes(), Loads()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas, the best first."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        asked = next((one for one in pending_request.args if isinstance(one, RoutingKey)), RoutingKey(None, ""))
        by_name = {str(one.replica_id.unique_id): one for one in candidate_replicas}
        loads = self._loads.now({name: one.routing_stats for name, one in by_name.items()})
        name = self._routes.choose(asked, loads)
        self._loads.sent(name)
        return [[by_name[name]]]

    async def _select_from_candidate_replicas(
        self, candidates: list[RunningReplica], backoff_index: int
    ) -> RunningReplica | None:
        """The one that `choose_replicas` names. Serve's own asks it first how much it has in flight, and takes another
        where it does not say so within 0.1 s: on a busy host a session would move. HAProxy finds who is gone."""
        return self.curr_replicas.get(candidates[0].replica_id)


def check_switches() -> None:
    """Raises CapabilityError where this process of Serve's runs without what `switches` pins."""
    wrong = {name: os.environ.get(name) for name, value in PINNED.items() if os.environ.get(name) != value}
    if wrong:
        said = ", ".join(f"{name}={value}" for name, value in wrong.items())
        remedy = "set " + " ".join(f"{name}={PINNED[name]}" for name in wrong) + " where `ray start` runs"
        raise CapabilityError("--replicas", f"Serve runs with {said}, so chunks would go through handles", remedy)
