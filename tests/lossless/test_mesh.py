"""Stages of ranks say what one process says: ids in float64 over sampling options and drafts; bits in bf16."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from grid import EOS_IDS, OPTIONS, PROMPTS, Case, Witness, case, check
from kits.native import needs_kernels
from kits.ranks import WIDE, ranked
from kits.stage import Stand, pool_of
from kits.tiny import TOY_TEXTS, assemble, draft_model, run, tiny_config, tiny_decoder

from paceline.core.sampling import SamplingParams
from paceline.draft.ngram import NgramConfig
from paceline.draft.registry import DrafterContext
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

SHAPE: dict[str, Any] = {"eos_ids": EOS_IDS, "num_layers": 4}
CONFIG = tiny_config(**SHAPE)
NAMES = list(OPTIONS)
SOME = ("greedy", "sampled", "truncated", "penalties_all", "logprobs_processed", "prompt_logprobs", "n_three", "mixed")
TIGHT = {"kv_tokens": 192, "block_size": 4, "max_batch_rows": 40}
CONTEXT = DrafterContext(load_model=None, dtype=torch.float64, device=torch.device("cpu"))
DRAFTS: dict[str, tuple[Any, str]] = {  # drafter and round
    "none": (lambda: None, "pipeline"),
    "model": (lambda: draft_model(noise=0.05, target={"config": CONFIG}), "pipeline,width=4,children=2"),
    "ngram": (lambda: NgramConfig(depth=5).build(CONTEXT), "pipeline,width=4,children=4"),
}
FULL = [(s, r) for s in (1, 2, 4) for r in (1, 2, 4)]


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


@pytest.fixture(
    scope="module",
    params=[(2, 2), *(pytest.param(one, marks=pytest.mark.full) for one in FULL if one != (2, 2))],
    ids=lambda one: f"{one[0]}x{one[1]}",
)
def mesh(request: pytest.FixtureRequest) -> Iterator[list[Decoder]]:
    with meshed(*request.param, SHAPE) as decoders:
        yield decoders


def play(mesh: Sequence[Decoder], drafts: str, cases: Sequence[Case], **limits: Any) -> Witness:
    """Answer all cases in one engine over a mesh, and compare each with its plain answer."""
    make, round_ = DRAFTS[drafts]
    witness, engine = Witness(), engine_over(mesh, make(), round_, **limits)
    witness.watch(engine)
    outputs = run(engine, [(c.prompt, c.params) for c in cases])
    for output, expected in zip(outputs, cases, strict=True):
        check(output, expected, f"{drafts}, {expected.option}")
        witness.saw_output(output)
    round_of: Any = engine.round
    assert round_of.failure is None and round_of.stage_line.faults == []
    round_of.stage_line.stop()
    return witness


def test_a_mesh_says_what_one_process_says(mesh: list[Decoder]) -> None:
    witness = play(mesh, "model", [case(o, i % len(PROMPTS), CONFIG) for i, o in enumerate(SOME)], **TIGHT)
    assert (len(witness.accepted) > 1 or len(mesh) == 1) and "preemption" in witness.marks  # one has nothing ahead


@pytest.mark.full
@pytest.mark.parametrize("drafts", DRAFTS)
def test_every_option(mesh: list[Decoder], drafts: str) -> None:
    for size in range(0, len(NAMES), 8):
        play(mesh, drafts, [case(o, (i + size) % len(PROMPTS), CONFIG) for i, o in enumerate(NAMES[size : size + 8])])


@needs_kernels
@pytest.mark.full
@pytest.mark.parametrize(("stages", "ranks"), [(2, 2), (4, 2), (2, 4), (4, 4)])
def test_an_exact_mesh_has_the_bits_of_one_process(stages: int, ranks: int) -> None:
    shape = WIDE | {"num_layers": 4}
    config, bf16 = tiny_config(**shape), torch.bfloat16
    params = [
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3, prompt_logprobs=1),
        SamplingParams(temperature=0.8, seed=1, max_tokens=24, ignore_eos=True, logprobs=2),
    ]
    jobs = [(prompt, each) for prompt in PROMPTS[1:4] for each in params]
    whole = run(assemble(decoder=tiny_decoder(config, dtype=bf16, compiled=True), dtype=bf16), jobs)
    with meshed(stages, ranks, shape, by_outputs=True, dtype="bfloat16", compiled=True) as decoders:
        drafter = draft_model(noise=0.02, target={"config": config, "dtype": bf16})
        engine = engine_over(decoders, drafter, "pipeline,width=4,children=2")
        for own, one in zip(run(engine, jobs), whole, strict=True):
            assert own.outputs[0].token_ids == one.outputs[0].token_ids
            assert own.outputs[0].logprobs == one.outputs[0].logprobs and own.prompt_logprobs == one.prompt_logprobs
        engine.round.stage_line.stop()  # type: ignore[attr-defined]
