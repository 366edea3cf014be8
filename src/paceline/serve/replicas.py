"""Several servers of a model at one address, by Ray Serve: it starts, places, watches, scales and drains them.

`application` is what Serve runs: one deployment, each replica of which is our ASGI application with an engine in a
process of its own. `serve run` and `serve deploy` read it from a file that names
``paceline.serve.replicas:application`` (docs/serving.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..api.options import LLMOptions
from .app import make_app
from .client import EngineClient
from .config import ServeConfig
from .generation import Server
from .metrics import merged

APPLICATION, DEPLOYMENT = "paceline", "server"
HEADER = b"x-paceline-replica"
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"  # by x-session-id; else evenly
HEALTH_S = 1.0  # between two checks of a replica's health
MARGIN_S = 10.0  # for the end of a replica whose requests have ended


class Replica:
    """A server in a process of Ray Serve's; it takes requests once its engine is ready.

    Args:
        config: of the server.
        options: fields of `LLMOptions`.
        model: its name for clients.

    Raises:
        ConfigError: keys, a template or an engine that cannot be had on this host.
    """

    async def __init__(self, config: ServeConfig, options: Mapping[str, Any], model: str) -> None:  # type: ignore[misc]
        self._client = EngineClient(options)
        self._server = Server(config, self._client, model, replica=serve.get_replica_context().replica_tag)
        self._server.all_metrics = self._all_metrics
        self._client.start()
        await self._client.described.wait()
        self.check_health()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return what Serve runs; its responses name the replica."""
        app, header = make_app(self._server, self._server.config), (HEADER, str(self._server.replica).encode())

        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            async def named(message: Message) -> None:
                if message["type"] == "http.response.start":
                    message = {**message, "headers": [*message.get("headers", ()), header]}
                await send(message)

            await app(scope, receive, named)

        return call

    def check_health(self) -> None:
        """Raise what keeps the engine from being started again; Serve then replaces this replica."""
        if self._client.failed is not None:
            raise self._client.failed

    async def metrics(self) -> str:
        """Return this replica's metrics."""
        return await self._server.metrics()

    async def _all_metrics(self) -> str:
        handle = serve.get_deployment_handle(DEPLOYMENT, APPLICATION)
        return merged(await handle.broadcast("metrics").results_async())


def application(arguments: Mapping[str, Any]) -> serve.Application:
    """Return the application that Ray Serve runs.

    Args:
        arguments: ``model``; ``serve``, fields of `ServeConfig`; ``llm``, fields of `LLMOptions` without a cluster,
            whose ``threads`` are the cores of a replica; ``gpus`` of a replica; ``deployment``, Serve's options of it.

    Raises:
        ConfigError: of an option.
    """
    config = ServeConfig(**{"host": "0.0.0.0", **arguments.get("serve", {})})  # Serve's proxies are open to the network
    llm = LLMOptions(**{"threads": 1, **arguments.get("llm", {}), "model": arguments["model"]})
    options = {
        "max_ongoing_requests": config.max_open,
        "request_router_config": {"request_router_class": ROUTER},
        "ray_actor_options": {"num_cpus": llm.threads, "num_gpus": arguments.get("gpus", 0)},
        "graceful_shutdown_timeout_s": config.drain_s + MARGIN_S,
        "health_check_period_s": HEALTH_S,
        "max_constructor_retry_count": 1,
        **arguments.get("deployment", {}),
        "name": DEPLOYMENT,
    }
    deployment: Any = serve.deployment(serve.ingress()(Replica), **options)
    bound: serve.Application = deployment.bind(config, vars(llm), config.name_of(arguments["model"]))
    return bound
