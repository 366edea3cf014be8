"""Several servers of a model at one address, by Ray Serve: it starts, places, watches, scales and drains them.

`application` is what Serve runs: one deployment, each replica of which is our ASGI application with an engine in a
process of its own. ``paceline serve --replicas N --cluster auto`` runs it with `run`; `serve deploy` reads it from a
file that names ``paceline.serve.replicas:application`` (docs/serving.md).
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ray import serve
from ray.exceptions import RayError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..api.options import LLMOptions
from ..api.split import ClusterConfig, parse_cluster
from ..core.errors import CapabilityError, ConfigError
from ..runtime.ray_cluster import Bundle, check_fit, connect, even_share
from .app import make_app
from .client import EngineClient
from .config import ServeConfig
from .generation import Server
from .metrics import merged

PAGE = "docs/serving.md"
APPLICATION, DEPLOYMENT = "paceline", "server"
HEADER = b"x-paceline-replica"
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"  # by x-session-id; else evenly
HEALTH_S = 1.0  # between two checks of a replica's health
LOOK_S = 0.2  # between two checks for a signal
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
            whose ``threads`` are the cores of a replica; ``gpus`` of a replica.

    Raises:
        ConfigError: of an option.
    """
    config = ServeConfig(**{"replicas": 1, **arguments.get("serve", {})})
    llm = LLMOptions(**{"threads": 1, **arguments.get("llm", {}), "model": arguments["model"]})
    least, most = config.replicas or 1, config.max_replicas or config.replicas
    target = float(llm.max_sequences)  # an engine with more in flight has some that wait
    scaling = {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": target}
    deployment: Any = serve.deployment(
        serve.ingress()(Replica),
        name=DEPLOYMENT,
        **{"num_replicas": least} if most == least else {"autoscaling_config": scaling},
        max_ongoing_requests=config.max_open,
        request_router_config={"request_router_class": ROUTER},
        ray_actor_options={"num_cpus": llm.threads, "num_gpus": arguments.get("gpus", 0)},
        graceful_shutdown_timeout_s=config.drain_s + MARGIN_S,
        health_check_period_s=HEALTH_S,
        max_constructor_retry_count=1,
    )
    bound: serve.Application = deployment.bind(config, vars(llm), config.name_of(arguments["model"]))
    return bound


def run(config: ServeConfig, options: Mapping[str, Any], port: int) -> None:
    """Serve until a signal comes: SIGHUP replaces one replica after the other, SIGTERM and Ctrl-C end all.

    Args:
        config: of each server.
        options: fields of `LLMOptions`; the cluster among them is where replicas run.
        port: that clients use.

    Raises:
        ConfigError, CapabilityError: the cluster, the port, or room for so many replicas cannot be had, or a replica
            cannot start.
    """
    cluster: ClusterConfig = parse_cluster(options["cluster"])
    connect(cluster, options["insecure_cluster"])
    count = config.replicas or 1
    cores = cluster.cores or options["threads"] or even_share(count)
    gpus = cluster.gpus if cluster.gpus is not None else int(options["device"] != "cpu")
    named = f"--replicas {count} --cluster {options['cluster']}"
    bundle = Bundle(cores, gpus)
    check_fit(f"{named} of {bundle}", [bundle.resources()] * count)
    if serve.status().applications:
        remedy = "end them (`serve shutdown`), or use another cluster"
        raise ConfigError(named, "Ray Serve runs applications on this cluster already", remedy)
    llm = {**options, "threads": cores, "cluster": None, "insecure_cluster": False}
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    arguments = {"model": options["model"], "serve": asdict(config), "llm": llm, "gpus": gpus}
    updates: list[int] = []  # signals that request one
    signal.signal(signal.SIGHUP, lambda number, _: updates.append(number))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": config.host, "port": port, "request_timeout_s": None},
            logging_config={"enable_access_log": False, "log_level": "WARNING"},
        )
        _deploy(named, arguments)
        model = config.name_of(options["model"])
        print(f"paceline serves {model} at http://{config.host}:{port}", file=sys.stderr, flush=True)
        while True:
            while not updates:
                time.sleep(LOOK_S)
            updates.clear()
            _deploy(named, arguments)
            print("paceline has replaced all replicas", file=sys.stderr, flush=True)
    except (RayError, TimeoutError) as error:
        wrong = f"Ray Serve did not start ({str(error).splitlines()[0]})"
        raise CapabilityError(named, wrong, "read its logs in /tmp/ray") from error
    finally:
        if APPLICATION in serve.status().applications:
            serve.delete(APPLICATION)  # replicas end their requests first, which a shutdown alone cuts
        serve.shutdown()


def _deploy(named: str, arguments: Mapping[str, Any]) -> None:
    """Run the application; replicas of an earlier call are replaced one after the other.

    Raises:
        ConfigError: a replica cannot start.
    """
    try:
        serve.run(application(arguments), name=APPLICATION, route_prefix="/")
    except RuntimeError as error:
        status = serve.status().applications.get(APPLICATION)
        messages = [one.message for one in status.deployments.values()] if status else [str(error)]
        lines = [line.strip() for message in messages for line in message.splitlines() if "Error" in line]
        raise ConfigError(named, lines[-1] if lines else str(error), f"look at {PAGE}") from error
