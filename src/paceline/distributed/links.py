"""What a hop and a byte between two hosts take: frames to a worker on another host, which sends them back.

A frame goes as states do, over a group. Half of a round trip is alpha with 64 bytes; what a large frame takes beyond it
is beta, a byte (Mirror, appendix C).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from ..core.errors import ConfigError
from .channels import Line
from .placement import ClusterConfig
from .serving import Service
from .worker import Patience, Worker, WorkerSpec

SMALL, LARGE = 64, 2**22  # bytes
REPEATS = 20  # of each; medians count
ANSWER_S = 30.0  # for a frame to come back


@dataclass(frozen=True, slots=True)
class Echo:
    """What is sent and comes back."""

    data: Tensor  # [bytes] uint8


class EchoService(Service):
    """Sends back what comes."""

    kinds = (Echo,)

    def handle(self, message: Echo) -> Iterable[Echo]:
        """The same again."""
        return (message,)


@dataclass(frozen=True, kw_only=True)
class LinkTimes:
    """A link between two hosts."""

    alpha: float  # seconds of a hop with next to nothing
    beta: float  # seconds of a byte more
    host: str  # at the other end
    hosts: int  # that the cluster has


def service(device: str) -> EchoService:
    """What the worker makes."""
    return EchoService()


def measure_link(cluster: ClusterConfig, insecure: bool) -> LinkTimes:
    """From this host to another one of a cluster.

    Raises:
        ConfigError, CapabilityError: as of `connect` and `Reservation`; or a cluster of one host.
        WorkerFailed: nothing comes back.
    """
    from .ray_cluster import Bundle, Reservation, connect, hosts

    host = connect(cluster, insecure)
    count = len(hosts())
    if count < 2:
        asked = f"links of cluster={cluster.address!r}"
        raise ConfigError(asked, "it has one host", "let another one join, or give --alpha-us and --gbit")
    spec = WorkerSpec(name="echo", service=f"{__name__}:service", kinds=EchoService.kinds)
    worker = Worker(spec, Patience(), Reservation(cluster, 1, Bundle(1, 0), host).launch(0))
    try:
        line = worker.start()
        small, large = (_one_way(line, size) for size in (SMALL, LARGE))
        return LinkTimes(alpha=small, beta=max(0.0, large - small) / (LARGE - SMALL), host=worker.host, hosts=count)
    finally:
        worker.stop()


def _one_way(line: Line, size: int) -> float:
    """Seconds of a frame of so many bytes."""
    took, data = [], torch.zeros(size, dtype=torch.uint8)
    for _ in range(REPEATS + 2):
        began = time.perf_counter()
        line.send(Echo(data), ANSWER_S)
        line.receive(ANSWER_S)
        took.append((time.perf_counter() - began) / 2)
    return median(took[2:])
