"""What a hop, a join and a byte between two hosts take: with a worker on another host.

A frame goes as states do, over a group, and the worker sends it back. Half of a round trip is alpha with 64 bytes; what
a large frame takes beyond it is beta, a byte. A join is a sum as ranks make it, with the worker: of one number it takes
the alpha of a collective, and what a large one takes beyond it is that beta (Mirror, appendix C).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from ..core.errors import ConfigError
from ..network.joins import Joins, require_compiled
from .channels import Line
from .host_joins import HostRanks, opened
from .placement import ClusterConfig
from .serving import Service
from .worker import Patience, Worker, WorkerSpec

SMALL, LARGE = 64, 2**22  # bytes
SUMS = (1, 500), (2**18, 20)  # of so many numbers, and how many
NUMBER_BYTES = 4
REPEATS, WARM_UP = 20, 2  # of each; medians count
ANSWER_S = 30.0  # for a frame to come back


@dataclass(frozen=True, slots=True)
class Echo:
    """What is sent and comes back."""

    data: Tensor  # [bytes] uint8


@dataclass(frozen=True, slots=True)
class Sums:
    """That so many sums begin, each of so many numbers; once they are made it comes back."""

    way: str  # of the rank that makes them
    numbers: int
    count: int


class LinkService(Service):
    """Sends back what comes, and makes sums with who asks for them."""

    kinds = Echo, Sums

    def __init__(self) -> None:
        self._joins: Joins | None = None

    def handle(self, message: Echo | Sums) -> Iterable[Echo | Sums]:
        """The same again."""
        if isinstance(message, Sums):
            self._joins = self._joins or opened(message.way)
            _sum(self._joins, message)
        return (message,)


@dataclass(frozen=True, kw_only=True)
class LinkTimes:
    """A link between two hosts."""

    alpha: float  # seconds of a hop with next to nothing
    beta: float  # seconds of a byte more
    join: float  # seconds of a join of two ranks with next to nothing
    join_beta: float  # seconds of a byte more that each gives
    host: str  # at the other end
    hosts: int  # that the cluster has


def service(device: str) -> LinkService:
    """What the worker makes."""
    return LinkService()


def measure_link(cluster: ClusterConfig, insecure: bool) -> LinkTimes:
    """From this host to another one of a cluster.

    Raises:
        ConfigError, CapabilityError: as of `connect` and `Reservation`; a cluster of one host; no compiled code.
        WorkerFailed: nothing comes back.
    """
    from .ray_cluster import Bundle, Reservation, connect, hosts

    host = connect(cluster, insecure)
    count = len(hosts())
    if count < 2:
        asked = f"links of cluster={cluster.address!r}"
        raise ConfigError(asked, "it has one host", "let another one join, or give --alpha-us, --gbit and --join-us")
    require_compiled(f"links of cluster={cluster.address!r}")
    spec = WorkerSpec(name="echo", service=f"{__name__}:service", kinds=LinkService.kinds)
    reservation = Reservation(cluster, 1, Bundle(1, 0), host)
    worker = Worker(spec, Patience(), reservation.launch(0))
    ranks = HostRanks(reservation.members(2), reservation.host)
    joins = ranks.joins()
    try:
        line = worker.start()
        small, large = (_one_way(line, size) for size in (SMALL, LARGE))
        few, many = (_join(line, joins, Sums(ranks.path(1), *size)) for size in SUMS)
        return LinkTimes(
            alpha=small,
            beta=max(0.0, large - small) / (LARGE - SMALL),
            join=few,
            join_beta=max(0.0, many - few) / (NUMBER_BYTES * (SUMS[1][0] - SUMS[0][0])),
            host=worker.host,
            hosts=count,
        )
    finally:
        worker.stop()
        joins.close()


def _one_way(line: Line, size: int) -> float:
    """Seconds of a frame of so many bytes."""
    data = torch.zeros(size, dtype=torch.uint8)

    def there_and_back() -> None:
        line.send(Echo(data), ANSWER_S)
        line.receive(ANSWER_S)

    return _seconds(there_and_back, REPEATS) / 2


def _join(line: Line, joins: Joins, sums: Sums) -> float:
    """Seconds of a sum."""
    line.send(sums, ANSWER_S)
    took = _sum(joins, sums)
    line.receive(ANSWER_S)
    return took


def _sum(joins: Joins, sums: Sums) -> float:
    """Make them; seconds of one."""
    joins.wait(ANSWER_S)
    x = torch.zeros(sums.numbers)
    return _seconds(lambda: joins.sum(x), sums.count)


def _seconds(call: Callable[[], object], count: int) -> float:
    """The median of so many calls, behind some more that warm up."""
    took = []
    for _ in range(WARM_UP + count):
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return median(took[WARM_UP:])
