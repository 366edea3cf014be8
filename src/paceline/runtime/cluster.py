"""Hosts of a Ray cluster: a bundle for each stage of a model, and for its drafter."""

from __future__ import annotations

from ..api.config import LLMConfig
from ..api.split import parse_cluster, parse_split
from ..engine.rounds import parse_round
from .placement import Placement
from .ray_cluster import Bundle, Reservation, connect, even_share
from .remote import Launch


class ClusterHosts:
    """Room for all workers of a configuration that names a cluster; ranks run with their stage.

    Raises:
        ConfigError, CapabilityError: as of `connect` and `Reservation`.
    """

    def __init__(self, config: LLMConfig) -> None:
        assert config.cluster is not None
        cluster = parse_cluster(config.cluster)
        round_ = parse_round(config.round)
        self._stages = 0 if config.pipeline is None else parse_split(config.pipeline).stages - 1
        workers = self._stages + int(round_ is not None and round_.place is not None)
        self.address = connect(cluster)  # of this host
        cores = cluster.cores or config.threads or even_share(workers + 1)
        gpus = cluster.gpus if cluster.gpus is not None else int(config.device != "cpu")
        self._reservation = Reservation(cluster, workers, Bundle(cores, gpus), self.address)

    def launch(self, stage: int | None) -> Launch:
        """Return how a stage's worker is started; None: the drafter's, whose bundle follows those of the stages."""
        return self._reservation.launch(self._stages if stage is None else stage)

    def placement(self, device: str, threads: int | None) -> Placement:
        """Return where a worker is in its bundle: with a thread for each core, unless another number is named."""
        return Placement(threads=threads or self._reservation.bundle.cores, device=device)
