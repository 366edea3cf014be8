"""Ranks say what one process says: ids in float64 over sampling options, drafters and rounds; bits in bf16."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from grid import CONDITIONS, CONFIG, DRAFTERS, EOS_IDS, OPTIONS, PROMPTS, ROUNDS, Case, Witness, case, check
from grid import target as one_process
from kits.native import read_in_passes
from kits.ranks import GEMMA, WIDE, ranked
from kits.tiny import assemble, run, streams, tiny_adapters, tiny_application, tiny_config, tiny_decoder, tiny_streams

from paceline import LLM
from paceline.core.errors import CapabilityError
from paceline.core.sampling import SamplingParams
from paceline.draft.suffix import SuffixConfig
from paceline.model.adapters import AdapterConfig
from paceline.model.decoder import Decoder

NAMES = list(OPTIONS)
SOME = ("greedy", "sampled", "truncated", "penalties_all", "logprobs_processed", "prompt_logprobs", "n_three", "mixed")
FEW = ("suffix", "chain_coupled", "eagle", "streams_frontier", "mirror")  # in serial, fused, mirror
MORE = ("none", "ngram", "dynamic_coupled", "chain_drawn", "streams_tree", "streams_count", "hybrid")


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.full)])
def target(request: pytest.FixtureRequest) -> Iterator[Decoder]:
    """In float64; of 4 ranks two have each head of K and V."""
    with ranked(request.param, {"eos_ids": EOS_IDS}) as decoder:
        yield decoder


def play(decoder: Decoder, drafter: str, condition: str, cases: Sequence[Case]) -> Witness:
    """Answer all cases in one engine over ranks, and compare each with its plain answer."""
    witness = Witness()
    options = {"round": ROUNDS.get(drafter, "auto"), **CONDITIONS[condition]}
    engine = assemble(DRAFTERS[drafter](cases), decoder=decoder, **options)
    line_of(decoder).follow(engine.pool)
    witness.watch(engine)
    outputs = run(engine, [(c.prompt, c.params) for c in cases])
    for output, expected in zip(outputs, cases, strict=True):
        check(output, expected, f"{drafter}, {condition}, {expected.option}")
        witness.saw_output(output)
    assert engine.round.failure is None  # type: ignore[attr-defined]
    return witness


@pytest.mark.parametrize("drafter", FEW)
def test_ranks_say_what_one_process_says(target: Decoder, drafter: str) -> None:
    cases = [case(option, index % len(PROMPTS), CONFIG) for index, option in enumerate(SOME)]
    witness = play(target, drafter, "tight pool", cases)
    assert len(witness.accepted) > 1 and "preemption" in witness.marks


@pytest.mark.full
@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("drafter", [*FEW, *MORE])
def test_every_option(target: Decoder, drafter: str, condition: str) -> None:
    for size in range(0, len(NAMES), 8):
        cases = [case(o, (i + size) % len(PROMPTS), CONFIG) for i, o in enumerate(NAMES[size : size + 8])]
        play(target, drafter, condition, cases)


def test_applications_answer_as_in_one_process(target: Decoder) -> None:
    """Their adapters are cut like the weights beside which they are; one has streams that main rows see."""
    shared = tiny_streams(CONFIG, mode="shared", adapter=AdapterConfig(rank=4, layers=(0, 1, 2)))
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    jobs, names = [(prompt, params) for prompt in PROMPTS[1:5]], ["plain", "shared", None, "shared"]
    said = []
    for decoder in (target, one_process(CONFIG)):
        sets = {"plain": tiny_adapters(CONFIG, seed=5), "shared": shared}
        made = [tiny_application(name, decoder, trained) for name, trained in sets.items()]
        engine = assemble(streams(target={"config": CONFIG}, k=6, nodes=12), decoder=decoder, applications=made)
        if decoder is target:
            line_of(target).follow(engine.pool)
        said.append([o.outputs[0].token_ids for o in run(engine, jobs, names)])
        assert engine.round.failure is None  # type: ignore[attr-defined]
    bare = run(assemble(decoder=one_process(CONFIG)), jobs)
    assert said[0] == said[1] and all(a != o.outputs[0].token_ids for a, o in zip(said[0][:2], bare, strict=False))


def line_of(decoder: Decoder) -> Any:
    assert decoder.ranks is not None and decoder.ranks.line is not None
    return decoder.ranks.line


@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.full), 4])
@pytest.mark.parametrize("shape", [WIDE, pytest.param(GEMMA, marks=pytest.mark.full)], ids=["llama", "gemma"])
def test_exact_ranks_have_the_bits_of_one_process(count: int, shape: dict[str, Any]) -> None:
    config, bf16 = tiny_config(**shape), torch.bfloat16
    with torch.inference_mode(), ranked(count, shape, by_outputs=True, dtype="bfloat16", compiled=True) as decoder:
        whole = tiny_decoder(config, dtype=bf16, compiled=True)
        assert decoder.stack is not None and decoder.cache_shape[1] == max(1, 2 // count)
        for own, expected in zip(*(read_in_passes(d, (3, 10, 11)) for d in (decoder, whole)), strict=True):
            assert torch.equal(own, expected) and expected.std() > 0
        params = SamplingParams(temperature=0.8, seed=1, max_tokens=30, ignore_eos=True)
        jobs = [(prompt, params) for prompt in PROMPTS[:4]]
        for make in (
            lambda: SuffixConfig(depth=4),
            lambda: streams(target={"config": config, "dtype": bf16}, k=9, nodes=24),
        ):
            engines = [assemble(make(), decoder=d, dtype=bf16) for d in (decoder, whole)]
            line_of(decoder).follow(engines[0].pool)
            own, one = ([o.outputs[0].token_ids for o in run(engine, jobs)] for engine in engines)
            assert own == one and engines[0].round.failure is None  # type: ignore[attr-defined]


def test_a_pass_has_two_sums_a_layer_and_no_gathered_logits(target: Decoder) -> None:
    """2 N, the embedding, the choice; of each row two sums of states a layer, and one score and its token."""
    count_joins(target)


def test_compiled_layers_join_as_often() -> None:
    with ranked(2, WIDE, dtype="bfloat16", compiled=True) as decoder:
        assert decoder.stack is not None
        count_joins(decoder)


@torch.inference_mode()
def count_joins(decoder: Decoder) -> None:
    engine = assemble(decoder=decoder, dtype=decoder.dtype)
    assert decoder.ranks is not None
    line, struct, wide = line_of(decoder), decoder.ranks.joins.struct, max(4, decoder.dtype.itemsize)
    line.follow(engine.pool)
    run(engine, [([5, 6], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))])  # the others are there now
    before = line.runs, struct.collectives, struct.bytes
    run(engine, [(PROMPTS[3], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))])
    joins, rows = 2 * decoder.num_layers + 1, len(PROMPTS[3]) + 19
    runs, collectives, given = (
        a - b for a, b in zip((line.runs, struct.collectives, struct.bytes), before, strict=True)
    )
    assert (runs, collectives) == (20, 20 * (joins + 1))
    assert given == rows * decoder.config.d_model * wide * joins + 20 * 16


def test_a_model_in_int8_says_the_same_in_two_ranks() -> None:
    prompts = ["Once upon a time", "def f(x):", "The king said"]
    params = [SamplingParams(temperature=0, max_tokens=20), SamplingParams(temperature=0.9, seed=3, max_tokens=20)]
    options: dict[str, Any] = {"dtype": "int8", "drafter": "eagle", "budget": 4, "threads": 1, "max_model_len": 128}
    said = []
    for ranks in (1, 2):
        llm = LLM("paceline-small", tensor_parallel=ranks, **options)
        outputs = [llm.generate(prompts, each) for each in params]
        said.append([o.outputs[0].token_ids for part in outputs for o in part])
        assert any(o.stats.accepted for part in outputs for o in part) and llm.engine.round.failure is None
    assert said[0] == said[1] and len({id for ids in said[0] for id in ids}) > 20
    with pytest.raises(CapabilityError, match="turns the target's keys"):
        LLM("paceline-small", tensor_parallel=2, **(options | {"drafter": "magicdec", "dtype": "bfloat16"}))
