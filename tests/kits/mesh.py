"""The tiny target in stages of ranks: stages in threads, ranks but the first of each in processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from kits.ranks import ranked
from kits.stage import Stand, pool_of
from kits.tiny import TOY_TEXTS, tiny_config
from paceline.engine.base import RoundParts
from paceline.engine.budget import FixedBudget
from paceline.engine.engine import Engine, EngineLimits
from paceline.engine.rounds import parse_round
from paceline.engine.scheduler import SchedulerConfig
from paceline.kv.store import KVStore
from paceline.model.decoder import Decoder
from paceline.model.stages import Stage, even_cuts
from paceline.papers.specpipe.config import PipelineConfig
from paceline.runtime.handshake import Facts
from paceline.runtime.stage_service import StageService
from paceline.runtime.stage_workers import StageWorkers


@contextmanager
def meshed(stages: int, ranks: int, shape: Mapping[str, Any], **how: Any) -> Iterator[list[Decoder]]:
    """The first rank's decoder of each stage; ``shape``: of `tiny_config`, ``how``: of `ranked`."""
    bounds = even_cuts(tiny_config(**shape).num_layers, stages)
    with ExitStack() as stack:
        parts = zip(bounds[:-1], bounds[1:], strict=True)
        yield [stack.enter_context(ranked(ranks, shape, layers=part, **how)) for part in parts]


def engine_over(decoders: Sequence[Decoder], drafter: Any, round: str, **limits: Any) -> Engine:  # noqa: A002
    """An engine whose pipeline round runs over stages in threads and, last, one here; ``round``: its options."""
    last, layers = decoders[-1], sum(decoder.num_layers for decoder in decoders)
    pool = pool_of(last, limits.pop("kv_tokens", 4096), limits.pop("block_size", 16))
    slots = pool.tensors.all_k.shape[2]

    def service(decoder: Decoder) -> StageService:
        store = KVStore(*decoder.cache_shape, slots, decoder.dtype, decoder.device)
        return StageService(Stage(decoder, 0, decoder.num_layers, store), Facts())

    stands: list[Any] = [Stand(f"stage {i}", partial(service, own)) for i, own in enumerate(decoders[:-1])]
    config = parse_round(f"{round},stages={len(decoders)}")
    assert isinstance(config, PipelineConfig)
    stage_line = StageWorkers(stands, Stage(last, 0, last.num_layers, pool.tensors), layers)
    if drafter is not None:
        drafter.bind(last.info("tiny"), 64, pool.num_tokens, last.device)
    round_ = config.over(RoundParts(target=last, pool=pool, drafter=drafter), stage_line)
    shape = last.config
    known = EngineLimits(vocab_size=shape.vocab_size, max_model_len=shape.max_position, eos_ids=shape.eos_ids)
    budget = FixedBudget(8 if drafter is not None else 0, why="" if drafter is not None else "no drafter")
    return Engine(round_, pool, known, SchedulerConfig(**limits), budget, TOY_TEXTS, {})
