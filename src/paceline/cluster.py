"""From the options of an `LLM` to room on a Ray cluster: a bundle for each stage, rank or track, and for a drafter."""

from __future__ import annotations

from dataclasses import dataclass

from .config import LLMConfig
from .distributed.host_joins import HostRanks
from .distributed.placement import Placement, parse_cluster
from .distributed.ray_cluster import Bundle, Reservation, connect, even_share
from .distributed.worker import Launch
from .drafters import registry
from .rounds import parse_round
from .rounds.pipeline.split import parse_split


@dataclass(frozen=True, slots=True)
class Places:
    """Where the workers of a model run."""

    reservation: Reservation
    stages: int  # that have bundles: all but the coordinator's
    drafters: int  # with a process of their own, 0 or 1; their bundles are behind those of stages,
    others: int  # then come those of other ranks than 0,
    tracks: int  # and those of other tracks of a draft

    def stage(self, index: int) -> Launch:
        """How a stage's worker is started."""
        return self.reservation.launch(index)

    @property
    def drafter(self) -> Launch:
        """How the drafter's is; behind the stages."""
        return self.reservation.launch(self.stages)

    def rank(self, rank: int) -> Launch:
        """How a rank's worker is started, from 1 on."""
        return self.reservation.launch(self.stages + self.drafters + rank - 1)

    def track(self, track: int) -> Launch:
        """How that of a draft's track is, from 1 on."""
        return self.rank(self.others + track)

    def ranks(self, count: int) -> HostRanks:
        """What so many ranks join by."""
        return HostRanks(self.reservation.members(count), self.reservation.host)

    def placement(self, device: str, threads: int | None) -> Placement:
        """Of a worker in its bundle: as many threads as cores, unless another number is asked for."""
        return Placement(threads=threads or self.reservation.bundle.cores, device=device)


def reserve(config: LLMConfig) -> Places:
    """Room for all workers of a configuration that names a cluster.

    Raises:
        ConfigError, CapabilityError: as of `connect` and `Reservation`.
    """
    assert config.cluster is not None
    cluster = parse_cluster(config.cluster)
    round_ = parse_round(config.round)
    stages = 0 if config.pipeline is None else parse_split(config.pipeline).stages - 1
    drafters = int(round_ is not None and round_.place is not None)
    others = config.tensor_parallel - 1 if config.pipeline is None else 0  # a stage's ranks are on its host
    tracks = 0 if drafters else getattr(registry.parse(config.drafter), "processes", 1) - 1
    workers = stages + drafters + others + tracks
    host = connect(cluster, config.insecure_cluster)
    cores = cluster.cores or config.threads or even_share(workers + 1)
    gpus = cluster.gpus if cluster.gpus is not None else int(config.device != "cpu")
    return Places(Reservation(cluster, workers, Bundle(cores, gpus), host), stages, drafters, others, tracks)
