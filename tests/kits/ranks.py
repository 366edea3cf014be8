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
from paceline.model.attention import make_backend
from paceline.model.decoder import Decoder
from paceline.model.families import DecoderConfig
from paceline.model.joins import Collectives, RankMemory
from paceline.model.parallel import ROWWISE, Ranks, Share, weight_of
from paceline.runtime.handshake import Facts
from paceline.runtime.rank_service import RankService
from paceline.runtime.rank_workers import RankWorkers
from paceline.runtime.remote import Remote, WorkerSpec
from paceline.runtime.workers import TIMEOUTS

WIDE = {"vocab_size": 250, "d_model": 128, "d_ff": 256, "num_heads": 8, "num_kv_heads": 2, "head_dim": 16}
GEMMA = WIDE | {"qk_norm": True, "post_norms": True, "activation": "gelu_tanh", "embedding_scale": 8.0}


def made(
    ranks: Ranks | None,
    config: DecoderConfig,
    dtype: str,
    compiled: bool,
    exact: bool = False,
    layers: tuple[int, int] | None = None,
) -> Decoder:
    """A rank's share of the tiny target, or some of its layers, with the weights that these have in it."""
    kind: torch.dtype = getattr(torch, dtype)
    attention, (start, stop) = make_backend(kind), layers or (0, config.num_layers)
    whole, ends = tiny_weights(Decoder(config, attention, dtype=kind)), stop == config.num_layers
    own = config.part(start, stop, ends)
    decoder = Decoder(own, attention, dtype=kind, native=compiled, exact=exact, ranks=ranks)
    for name, parameter in decoder.named_parameters():
        head, _, rest = name.partition(".")
        if head == "layers":
            index, _, rest = rest.partition(".")
            name = f"layers.{int(index) + start}.{rest}"
        elif not ends:
            parameter.data.zero_()
            continue
        parameter.data.copy_(whole[name].data if ranks is None else part(ranks.share, name, whole[name].data))
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
    device: str,
    rank: int,
    count: int,
    memory: str,
    shape: Mapping[str, Any],
    by_outputs: bool,
    **how: Any,
) -> RankService:
    """What a worker makes."""
    torch.set_num_threads(1)
    config = tiny_config(**shape)
    ranks = Ranks(Share(config, rank, count, by_outputs), Collectives.opened(memory, rank, count))
    decoder = made(ranks, config, **how, exact=by_outputs)
    return RankService(decoder, decoder.cache_shape, decoder.dtype, Facts(weights="tiny"))


@contextmanager
def ranked(
    count: int,
    shape: Mapping[str, Any] | None = None,
    by_outputs: bool = False,
    dtype: str = "float64",
    compiled: bool = False,
) -> Iterator[Decoder]:
    """The tiny target in so many ranks, of which this is the first; one: without ranks.

    Args:
        shape: of `tiny_config`.
    """
    config = tiny_config(**(shape or {}))
    how = {"dtype": dtype, "compiled": compiled}
    if count == 1:
        yield made(None, config, dtype, compiled, by_outputs)
        return
    memory = RankMemory(count)
    given = {"count": count, "shape": shape or {}, "by_outputs": by_outputs, **how}
    here = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    workers = []
    with patch.dict(os.environ, PYTHONPATH=here):
        for rank in range(1, count):
            options = {"rank": rank, "memory": memory.path, **given}
            spec = WorkerSpec(name=f"rank {rank}", service="kits.ranks:service", options=options)
            workers.append(Remote(spec, TIMEOUTS))
            workers[-1].poll()
        joins = memory.joins()
        try:
            share = Share(config, 0, count, by_outputs)
            line = RankWorkers(workers, joins)
            yield made(Ranks(share, joins, line), config, dtype, compiled, by_outputs)
        finally:
            for worker in workers:
                worker.stop()
            memory.close()
