"""Workers on a Ray cluster: Ray places, starts and watches them; messages go over lines (`wire`), not through Ray.

A `Reservation` is a placement group with a bundle for each worker and one for this process, on its own host. A worker
is an actor (`actors`); where one failed another one is started in the same bundle, wherever Ray has that by then.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import finalize

from ..api.split import ClusterConfig
from ..core.errors import CapabilityError, ConfigError
from .handshake import BEGIN
from .remote import HOST_LEFT, Handle, Launch, WorkerSpec

try:
    import ray
    from ray.util import placement_group, placement_group_table, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from .actors import WorkerActor
except ImportError as error:
    raise CapabilityError("cluster=...", "Ray is not installed", "run pip install 'paceline[cluster]'") from error

log = logging.getLogger(__name__)

PROBE_S = 5.0  # for the cluster's head to answer
RESERVE_S = 60.0  # for bundles that fit to be free
PLACED_S = 15.0  # for a host that leaves to be replaced by another one
PIN = 0.001  # of a host's own resource: a place on that host
PAGE = "docs/cluster.md"
_ACTOR: Any = ray.remote(WorkerActor)


@dataclass(frozen=True, slots=True)
class Bundle:
    """Describe what one process gets of a host."""

    cores: int
    gpus: int

    def __str__(self) -> str:
        return f"{self.cores} cores" + (f" and {self.gpus} GPUs" if self.gpus else "")

    def resources(self, host: str = "") -> dict[str, float]:
        """Return Ray's resources; on one host, where it is named."""
        amounts = {"CPU": float(self.cores), "GPU": float(self.gpus), f"node:{host}": PIN if host else 0.0}
        return {name: amount for name, amount in amounts.items() if amount}


# -- joining


def connect(cluster: ClusterConfig, insecure: bool) -> str:
    """Join a cluster, unless this process has; return the address of this host in it.

    Args:
        cluster: which.
        insecure: it may work without a token.

    Raises:
        ConfigError: no cluster is there, or one of another version of Ray or Python; a token that it does not take.
        CapabilityError: it needs no token, or this process has none, unless that is requested.
    """
    subject = f"cluster={cluster.address!r}"
    if not insecure and os.environ.get("RAY_AUTH_MODE") != "token":
        wrong = "this process gives no token: RAY_AUTH_MODE is not token"
        raise CapabilityError(subject, wrong, f"set it as on the hosts ({PAGE}), or add insecure_cluster")
    address = os.environ.get("RAY_ADDRESS", "auto") if cluster.address == "auto" else cluster.address
    if address != "auto":
        _check_head(subject, address, insecure)
    if not ray.is_initialized():
        _join(subject, address)
    if address == "auto":
        _check_head(subject, ray.get_runtime_context().gcs_address, insecure)
    host: str = ray.util.get_node_ip_address()
    return host


def _check_head(subject: str, address: str, insecure: bool) -> None:
    """Check that a cluster's head is there, accepts this process's token, and refuses clients without one."""
    _probe(subject, address, _token())
    if not insecure and _probe(subject, address, ""):
        wrong = "it has no token: whoever reaches it runs code on all its hosts"
        raise CapabilityError(subject, wrong, f"start it with RAY_AUTH_MODE=token ({PAGE}), or add insecure_cluster")


def _join(subject: str, address: str) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    try:
        ray.init(address=address, **quiet)
        ray._private.worker._worker_logs_enabled = False  # it prints faults to stdout, where answers go
    except ray.exceptions.AuthenticationError as error:
        raise ConfigError(subject, "this process has no token", f"set RAY_AUTH_TOKEN_PATH ({PAGE})") from error
    except RuntimeError as error:
        if "ersion" not in str(error):
            raise ConfigError(subject, " ".join(str(error).split()), f"look at `ray status` ({PAGE})") from error
        wrong = f"it has another Ray or Python than this process ({' '.join(str(error).split())})"
        raise ConfigError(subject, wrong, "install the same versions on all hosts (constraints.txt)") from error
    except (ConnectionError, ValueError, SystemExit) as error:
        wrong = f"this host has not joined one ({' '.join(str(error).split())})"
        raise ConfigError(subject, wrong, f"run `ray start` on this host first ({PAGE})") from error


def _probe(subject: str, address: str, token: str) -> bool:
    """Return whether a cluster's head answers a client with a token, or with none.

    Raises:
        ConfigError: nobody answers, the token is wrong, or it is another version of Ray.
    """
    import grpc

    metadata = [("authorization", f"Bearer {token}")] if token else None
    try:
        with grpc.insecure_channel(address) as channel:
            alive = channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")
            reply: bytes = alive(b"", timeout=PROBE_S, metadata=metadata)
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.UNAUTHENTICATED:
            if not token:
                return False
            remedy = f"give all hosts the same one ({PAGE})"
            raise ConfigError(subject, "it does not take this process's token", remedy) from error
        wrong = f"nobody answers at {address} ({error.code().name.lower()})"
        remedy = "start its head (`ray start --head`), check host, port and firewall"
        raise ConfigError(subject, wrong, remedy) from error
    version = re.search(rb"\d+\.\d+\.\d+\S*", reply)
    if version is not None and version[0].decode(errors="replace").strip() != ray.__version__:
        wrong = f"it runs Ray {version[0].decode(errors='replace')}, and this process has {ray.__version__}"
        raise ConfigError(subject, wrong, "install the same version on all hosts (constraints.txt)")
    return True


def _token() -> str:
    """Return this process's token, where Ray looks for it; empty: none."""
    if variable := os.environ.get("RAY_AUTH_TOKEN"):
        return variable.strip()
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or os.path.expanduser("~/.ray/auth_token")
    with suppress(OSError, UnicodeDecodeError), open(path, encoding="utf-8") as file:
        return file.read().strip()
    return ""


# -- bundles


def hosts() -> dict[str, Mapping[str, float]]:
    """Return what each host of the cluster has, by Ray's number of it."""
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def even_share(count: int) -> int:
    """Return the cores for each of so many processes, if all hosts get as many of them."""
    cluster_hosts = hosts()
    each = math.ceil(count / len(cluster_hosts))
    return max(1, int(min(has.get("CPU", 0) for has in cluster_hosts.values()) // each))


def check_fit(subject: str, bundles: Sequence[Mapping[str, float]]) -> None:
    """Refuse bundles that this cluster never has room for.

    Raises:
        ConfigError: they do not fit, with what there is.
    """
    free = [dict(has) for has in hosts().values()]
    pinned_first = sorted(bundles, key=lambda bundle: not any(name.startswith("node:") for name in bundle))
    for needed in pinned_first:
        room = [has for has in free if all(has.get(name, 0.0) >= amount for name, amount in needed.items())]
        if not room:
            there = ", ".join(_has(has) for has in hosts().values())
            wrong = f"it has no room for all of {len(bundles)} processes, this one included; its hosts have {there}"
            raise ConfigError(subject, wrong, "give fewer cores or stages, or let more hosts join")
        fullest = min(room, key=lambda has: has.get("CPU", 0.0))
        for name, amount in needed.items():
            fullest[name] -= amount


def _has(has: Mapping[str, float]) -> str:
    return str(Bundle(int(has.get("CPU", 0)), int(has.get("GPU", 0))))


class Reservation:
    """Room for a model's workers, one after the other, and for the client; given back with this object.

    Args:
        cluster: which, and how workers are placed.
        workers: how many.
        bundle: what each gets; this process gets as many cores.
        host: as of `connect`.

    Raises:
        ConfigError: there never is that much, or not now.
    """

    def __init__(self, cluster: ClusterConfig, workers: int, bundle: Bundle, host: str) -> None:
        subject = f"cluster={cluster.address!r} for {workers} workers of {bundle}"
        bundles = [Bundle(bundle.cores, 0).resources(host), *[bundle.resources()] * workers]
        check_fit(subject, bundles)
        self.bundle, self.host = bundle, host
        self._group = placement_group(bundles, strategy=cluster.place.upper())
        finalize(self, _give_back, self._group)
        if not self._group.wait(RESERVE_S):
            free = _has(ray.available_resources())
            wrong = f"others use it: {free} are free in all, for {RESERVE_S:g} s"
            raise ConfigError(subject, wrong, "wait for them, give fewer cores, or let more hosts join")

    def launch(self, index: int) -> Launch:
        """Return how the worker of one of the bundles is started."""
        return partial(_Actor, self, index)

    def room(self) -> str:
        """Return what is wrong with the bundles' places; empty: nothing. A host that left may have had one of them."""
        if placement_group_table(self._group)["state"] == "CREATED":
            return ""
        there = ", ".join(_has(has) for has in hosts().values())
        return f"has no host: none is left with {self.bundle} that nobody uses; those that are there have {there}"

    def actor(self, index: int) -> Any:
        """Return a new actor in one of the bundles."""
        where = PlacementGroupSchedulingStrategy(self._group, index + 1)
        sizes = {"num_cpus": self.bundle.cores, "num_gpus": self.bundle.gpus}
        return _ACTOR.options(**sizes, scheduling_strategy=where).remote()


def _give_back(group: Any) -> None:
    if ray.is_initialized():
        remove_placement_group(group)


# -- a worker


class _Actor(Handle):
    """A worker of a reservation; see `Handle`.

    Args:
        reservation, index: in which of its bundles.
        spec, beat_s: as of `Launch`.
    """

    def __init__(self, reservation: Reservation, index: int, spec: WorkerSpec, beat_s: float) -> None:
        super().__init__(spec, beat_s, reservation.host)
        self._reservation, self._placed = reservation, False
        self._actor = reservation.actor(index)
        began = self._actor.run.remote(BEGIN.dump_json(self.begin), spec.placement.environment())
        self._done: Future[int] = began.future()
        self._next_look = time.monotonic() + PLACED_S  # when to check whether it has a place

    def beat(self) -> float | None:
        beat = super().beat()
        self._placed |= beat is not None
        return beat

    def poll(self) -> int | str | None:
        if self._done.done():
            error = self._done.exception()
            return self._done.result() if error is None else _words(error)
        now = time.monotonic()
        if self._placed or now < self._next_look:
            return None
        self._next_look = now + PLACED_S
        return self._reservation.room() or None

    def end(self) -> None:
        super().end()
        if ray.is_initialized():
            ray.kill(self._actor)


def _words(error: BaseException) -> str:
    """Return how an actor ended."""
    text = str(error)
    if not isinstance(error, ray.exceptions.RayActorError):
        return f"failed: {text.strip().splitlines()[-1]}"
    if "node has died" in text or "node is dead" in text:
        return HOST_LEFT
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        return "cannot be reached"
    reason = re.search(r"(?:died|dead) because (.*)", text)
    if "ray.kill" in text:
        return "was ended"
    return f"died: {'its process has ended' if reason is None or 'worker process' in reason[1] else reason[1]}"
