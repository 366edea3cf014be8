"""Workers on a Ray cluster: Ray places, starts and watches them; messages go over lines (`wire`), not through Ray.

`ClusterHosts` is a placement group with a bundle for each worker and one for this process, on its own host. A worker is
an actor (`actors`); where one failed another one is started in the same bundle, wherever Ray has that by then.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import finalize

from ..api.config import LLMConfig
from ..api.split import ClusterConfig, parse_cluster, parse_split
from ..core.errors import CapabilityError, ConfigError
from ..engine.rounds import parse_round
from .handshake import BEGIN
from .placement import Placement
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
RESERVE_S = 30.0  # for bundles to be free
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


def connect(cluster: ClusterConfig) -> str:
    """Join a cluster, unless this process has; return the address of this host in it.

    Raises:
        CapabilityError: this process gives no token.
        ConfigError: no cluster is there, or one that does not take this process.
    """
    if os.environ.get("RAY_AUTH_MODE") != "token":
        wrong = "this process gives no token: whoever reaches a cluster without one runs code on its hosts"
        raise CapabilityError(f"cluster={cluster.address!r}", wrong, f"set RAY_AUTH_MODE=token here and there ({PAGE})")
    address = os.environ.get("RAY_ADDRESS", "auto") if cluster.address == "auto" else cluster.address
    try:
        if not ray.is_initialized():
            if address != "auto":  # Ray itself takes minutes to find that nobody answers
                host, _, port = address.rpartition(":")
                socket.create_connection((host.strip("[]"), int(port)), PROBE_S).close()
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
            ray._private.worker._worker_logs_enabled = False  # it prints faults to stdout, where answers go
    except (Exception, SystemExit) as error:
        wrong = f"this process cannot join it ({' '.join(str(error).split())[:300]})"
        remedy = f"run `ray start` on this host, with the same token, Ray and Python on all hosts ({PAGE})"
        raise ConfigError(f"cluster={cluster.address!r}", wrong, remedy) from error
    here: str = ray.util.get_node_ip_address()
    return here


# -- bundles


def hosts() -> dict[str, Mapping[str, float]]:
    """Return what each host of the cluster has, by Ray's number of it."""
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def even_share(count: int) -> int:
    """Return the cores for each of so many processes, if all hosts get as many of them."""
    cluster_hosts = hosts()
    each = math.ceil(count / len(cluster_hosts))
    return max(1, int(min(has.get("CPU", 0) for has in cluster_hosts.values()) // each))


def _has(has: Mapping[str, float]) -> str:
    return str(Bundle(int(has.get("CPU", 0)), int(has.get("GPU", 0))))


class ClusterHosts:
    """Room for this process and all workers of a configuration that names a cluster.

    It is given back with this object.

    Raises:
        ConfigError: a cluster that cannot be joined, or has no room.
    """

    def __init__(self, config: LLMConfig) -> None:
        assert config.cluster is not None
        cluster, round_ = parse_cluster(config.cluster), parse_round(config.round)
        self._stages = 0 if config.pipeline is None else parse_split(config.pipeline).stages - 1
        workers = self._stages + int(round_ is not None and round_.place is not None)
        self.address = connect(cluster)  # of this host
        gpus = cluster.gpus if cluster.gpus is not None else int(config.device != "cpu")
        self.bundle = Bundle(cluster.cores or config.threads or even_share(workers + 1), gpus)  # of each worker
        bundles = [Bundle(self.bundle.cores, 0).resources(self.address), *[self.bundle.resources()] * workers]
        self._group = placement_group(bundles, strategy=cluster.place.upper())
        finalize(self, _give_back, self._group)
        if not self._group.wait(RESERVE_S):
            subject = f"cluster={cluster.address!r} for {workers} workers of {self.bundle}"
            there, free = ", ".join(map(_has, hosts().values())), _has(ray.available_resources())
            wrong = f"it has no room for {len(bundles)} processes with this one; its hosts have {there} ({free} free)"
            raise ConfigError(subject, wrong, "give fewer cores or stages, or let more hosts join")

    def launch(self, stage: int | None) -> Launch:
        """Return how a stage's worker is started; None: the drafter's, whose bundle follows those of the stages."""
        return partial(_Actor, self, self._stages if stage is None else stage)

    def placement(self, device: str, threads: int | None) -> Placement:
        """Return where a worker is in its bundle: with a thread for each core, unless another number is named."""
        return Placement(threads=threads or self.bundle.cores, device=device)

    def room(self) -> str:
        """Return what is wrong with the bundles' places; empty: nothing. A host that left may have had one of them."""
        if placement_group_table(self._group)["state"] == "CREATED":
            return ""
        there = ", ".join(map(_has, hosts().values()))
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
    """A worker of a cluster; see `Handle`.

    Args:
        hosts, index: in which of its bundles.
        spec, beat_s: as of `Launch`.
    """

    def __init__(self, hosts: ClusterHosts, index: int, spec: WorkerSpec, beat_s: float) -> None:
        super().__init__(spec, beat_s, hosts.address)
        self._hosts, self._placed = hosts, False
        self._actor = hosts.actor(index)
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
        return self._hosts.room() or None

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
    return "died: its process has ended"
