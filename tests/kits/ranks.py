"""The tiny target in ranks, each but the first in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kits.tiny import tiny_config, tiny_weights
from paceline.attention import make_backend
from paceline.distributed.handshake import Facts
from paceline.distributed.rank_service import KINDS, RankService
from paceline.distributed.rank_workers import PATIENCE, RankWorkers
from paceline.distributed.worker import Worker, WorkerSpec
from paceline.network.decoder import Decoder
from paceline.network.joins import Joins, RankMemory
from paceline.network.parallel import ROWWISE, Ranks, Share, weight_of

WIDE = {"vocab_size": 250, "d_model": 128, "d_ff": 256, "num_heads": 8, "num_kv_heads": 2, "head_dim": 16}
GEMMA = WIDE | {"qk_norm": True, "post_norms": True, "activation": "gelu_tanh", "embedding_scale": 8.0}


def made(ranks: Ranks, dtype: str, compiled: bool) -> Decoder:
    """A rank's share of the tiny target, with the weights that they have in it."""
    kind: torch.dtype = getattr(torch, dtype)
    attention = make_backend("reference" if kind == torch.float64 else "sdpa", kind)
    config = ranks.share.config
    whole = tiny_weights(Decoder(config, attention, dtype=kind))
    decoder = Decoder(config, attention, dtype=kind, native=compiled, exact=ranks.share.by_outputs, ranks=ranks)
    for name, parameter in decoder.named_parameters():
        parameter.data.copy_(part(ranks.share, name, whole[name].data))
    return decoder.finish()


def part(share: Share, name: str, whole: Tensor) -> Tensor:
    """What a rank has of a parameter."""
    weight, bias = weight_of(name)
    if weight not in share.plan:
        return whole
    if bias and share.plan[weight] == ROWWISE:
        return whole if share.rank == 0 else torch.zeros_like(whole)
    rows = torch.cat([whole[first:last] for first, last in share.outputs(weight)])
    return rows if bias else rows[:, share.inputs(weight)]


def service(
    device: str, rank: int, count: int, memory: str, shape: Mapping[str, Any], by_outputs: bool, **how: Any
) -> RankService:
    """What a worker makes."""
    torch.set_num_threads(1)
    share = Share(tiny_config(**shape), rank, count, by_outputs)
    decoder = made(Ranks(share, Joins.opened(memory, rank, count)), **how)
    return RankService(decoder, decoder.cache_shape, decoder.dtype, Facts(weights="tiny"))


@contextmanager
def ranked(
    count: int,
    shape: Mapping[str, Any] | None = None,
    by_outputs: bool = False,
    dtype: str = "float64",
    compiled: bool = False,
) -> Iterator[Decoder]:
    """The tiny target in so many ranks, of which this is the first; ``shape``: of `tiny_config`."""
    shape, memory = shape or {}, RankMemory(count)
    how: dict[str, Any] = {"dtype": dtype, "compiled": compiled}
    given = {"count": count, "memory": memory.path, "shape": shape, "by_outputs": by_outputs, **how}
    here = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    workers = []
    with patch.dict(os.environ, PYTHONPATH=here):
        for rank in range(1, count):
            options = {"rank": rank, **given}
            spec = WorkerSpec(name=f"rank {rank}", service="kits.ranks:service", options=options, kinds=KINDS)
            workers.append(Worker(spec, PATIENCE))
            workers[-1].poll()
        joins = memory.joins()
        try:
            share = Share(tiny_config(**shape), 0, count, by_outputs)
            yield made(Ranks(share, joins, RankWorkers(workers, joins)), **how)
        finally:
            for worker in workers:
                worker.stop()
            memory.close()
