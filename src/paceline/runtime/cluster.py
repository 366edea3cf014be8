"""From the options of an `LLM` to room on a Ray cluster: a bundle for each stage, and for a drafter."""

from __future__ import annotations

from dataclasses import dataclass

from ..api.config import LLMConfig
from ..api.split import parse_split
from ..engine.rounds import parse_round
from .placement import Placement, parse_cluster
from .ray_cluster import Bundle, Reservation, connect, even_share
from .remote import Launch


@dataclass(frozen=True, slots=True)
class Places:
    """Where the workers of a model run."""

    reservation: Reservation
    stages: int  # that have bundles: all but the coordinator's

    def stage(self, index: int) -> Launch:
        """How a stage's worker is started."""
        return self.reservation.launch(index)

    @property
    def drafter(self) -> Launch:
        """How the drafter's is; its bundle follows those of the stages."""
        return self.reservation.launch(self.stages)

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
    workers = stages + int(round_ is not None and round_.place is not None)
    host = connect(cluster, config.insecure_cluster)
    cores = cluster.cores or config.threads or even_share(workers + 1)
    gpus = cluster.gpus if cluster.gpus is not None else int(config.device != "cpu")
    return Places(Reservation(cluster, workers, Bundle(cores, gpus), host), stages)
