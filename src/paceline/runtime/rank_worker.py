"""Ranks of a target in processes: from the options of an `LLM` to workers and their line.

Each process reads its share of the checkpoint and nothing else. Rank 0's is the engine's process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import finalize

import torch

from ..api.assembly.memory import kv_layout
from ..api.assembly.models import compiled_layers, exact_layers, load_decoder, share_of
from ..api.config import LLMConfig
from ..api.split import parse_cluster
from ..core.errors import ConfigError
from ..model.joins import Collectives, RankMemory
from ..model.parallel import Ranks
from ..weights.files import fingerprint
from ..weights.source import Source
from .handshake import Facts
from .placement import Placement, cores
from .rank_service import RankService
from .rank_workers import RankWorkers
from .remote import Remote, WorkerSpec
from .workers import TIMEOUTS, end_all

OPTIONS = ("model", "dtype", "kv_cache_dtype", "exact", "kernels", "revision", "offline")


def start_ranks(config: LLMConfig, source: Source) -> Ranks:
    """Start the other ranks' processes, which load their shares while this one loads its own; return rank 0.

    They end with the line that is returned. Each has as many threads, so that together they use once the cores that
    this process has, where the options name no other number for each.

    Args:
        config, source: the options, and what is shared.

    Raises:
        ConfigError: ranks that cannot share the target.
        CapabilityError: no compiled code, or a system without such memory.
    """
    share = share_of(config, source, 0)
    bundle = None if config.cluster is None else parse_cluster(config.cluster).cores
    where = Placement(threads=config.threads or max(1, (bundle or len(cores())) // share.count))
    memory = RankMemory(share.count)
    workers = []
    for rank in range(1, share.count):
        spec = WorkerSpec(
            name=f"rank {rank}",
            service=f"{__name__}:rank_service",
            options={
                "options": options_of(config, source),
                "rank": rank,
                "count": share.count,
                "memory": memory.path,
            },
            expected=facts_of(source),
            placement=where,
        )
        workers.append(Remote(spec, TIMEOUTS))
    joins = memory.joins()
    line = RankWorkers(workers, joins)
    finalize(line, _stop, workers, memory, joins)
    for worker in workers:
        with suppress(ConfigError):  # raised again where it is waited for
            worker.poll()
    torch.set_num_threads(where.threads or 1)
    return Ranks(share, joins, line)


def _stop(workers: Sequence[Remote], memory: RankMemory, joins: Collectives) -> None:
    end_all(workers)
    memory.close()
    joins.close()


def options_of(config: LLMConfig, source: Source) -> dict[str, Any]:
    """Return the options that a rank's or a stage's process needs; its layers are compiled where they are here."""
    options = {name: getattr(config, name) for name in OPTIONS}
    return options | {"kernels": "native" if compiled_layers(config, source.shape, source.dtype) else "torch"}


def rank_service(device: str, options: Mapping[str, Any], rank: int, count: int, memory: str) -> RankService:
    """Make the service of a rank, in its own process.

    Args:
        device: where it computes.
        options: those of `LLMConfig` that it must know.
        rank, count: which of how many.
        memory: where what the ranks share is found.

    Raises:
        ConfigError: a checkpoint that cannot be used, too little memory.
    """
    config = LLMConfig(**{**options, "device": device, "tensor_parallel": count})
    source = config.resolve()
    ranks = Ranks(share_of(config, source, rank), Collectives.opened(memory, rank, count))
    decoder = load_decoder(config, source, exact_layers(config, source), ranks=ranks)
    layout, kind = kv_layout(config, decoder.local, source.dtype)
    return RankService(decoder, layout, kind, facts_of(source))


def facts_of(source: Source) -> Facts:
    """Return the facts of the checkpoint."""
    weights = f"{fingerprint(source.folder)} ({source.shape.num_layers} layers)"  # more may add zero
    return Facts(weights=weights, dtype=str(source.dtype).removeprefix("torch."))
