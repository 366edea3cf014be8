"""Ranks say what one process says: ids in float64 over sampling options, drafters and rounds; bits in bf16."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from grid import CONDITIONS, CONFIG, DRAFTERS, EOS_IDS, OPTIONS, PROMPTS, ROUNDS, Case, Witness, case, check
from kits.ranks import GEMMA, WIDE, ranked
from kits.tiny import assemble, run, tiny_config, tiny_decoder

from paceline.core.sampling import SamplingParams
from paceline.drafters.suffix import SuffixConfig
from paceline.kv.pool import KVPool
from paceline.network.decoder import Decoder
from paceline.network.packing import RowPacker

NAMES = list(OPTIONS)
SOME = ("greedy", "sampled", "truncated", "penalties_all", "logprobs_processed", "prompt_logprobs", "n_three", "mixed")
FEW = ("suffix", "chain_coupled", "streams_frontier", "mirror")  # look-ups and a model in serial, fused, mirror
MORE = ("none", "ngram", "dynamic_coupled", "chain_drawn", "streams_tree", "streams_count", "streams_own_mlp", "hybrid")


@pytest.fixture(scope="module", params=[2, 4])
def target(request: pytest.FixtureRequest) -> Iterator[Decoder]:
    """In float64; of 4 ranks two have each head of K and V."""
    with ranked(request.param, {"eos_ids": EOS_IDS}) as decoder:
        yield decoder


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def play(decoder: Decoder, drafter: str, condition: str, cases: Sequence[Case]) -> Witness:
    """Answer all cases in one engine over ranks, and compare each with its plain answer."""
    witness = Witness()
    options = {"round": ROUNDS.get(drafter, "auto"), **CONDITIONS[condition]}
    engine = assemble(DRAFTERS[drafter](cases), decoder=decoder, **options)
    ranks = decoder.ranks
    assert ranks is not None and ranks.line is not None
    ranks.line.follow(engine.pool)
    witness.watch(engine)
    outputs = run(engine, [(c.prompt, c.params) for c in cases])
    for output, expected in zip(outputs, cases, strict=True):
        check(output, expected, f"{ranks.share.count} ranks, {drafter}, {condition}, {expected.option}")
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


# -- bits


def states(decoder: Decoder) -> list[torch.Tensor]:
    """Logits of a prompt in two chunks and of a row behind it."""
    pool, ids, found = KVPool(*decoder.cache_shape, 64, decoder.dtype, decoder.device), [*range(7, 40, 3)], []
    for first, last in ((0, 3), (3, 10), (10, 11)):
        packer = RowPacker(decoder, decoder.device)
        places = slice(first, last), slice(0, last)
        packer.add(ids[first:last], range(first, last), *places, num_keys=last, prefix=first)
        state = decoder.run_layers(decoder.embed(packer.batch()), 0, decoder.num_layers, pool)
        found.append(decoder.read(state.hidden))
        assert torch.equal(decoder.best(state.hidden), found[-1].max(-1).indices)
    return found


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("shape", [WIDE, pytest.param(GEMMA, marks=pytest.mark.full)], ids=["llama", "gemma"])
def test_exact_ranks_have_the_bits_of_one_process(count: int, shape: dict[str, Any]) -> None:
    with torch.inference_mode(), ranked(count, shape, by_outputs=True, dtype="bfloat16", compiled=True) as decoder:
        whole = tiny_decoder(tiny_config(**shape), dtype=torch.bfloat16, compiled=True)
        assert decoder.stack is not None and decoder.cache_shape[1] == max(1, 2 // count)
        for own, expected in zip(states(decoder), states(whole), strict=True):
            assert torch.equal(own, expected) and expected.std() > 0
        params = SamplingParams(temperature=0.8, seed=1, max_tokens=30, ignore_eos=True)
        jobs = [(prompt, params) for prompt in PROMPTS[:4]]
        engines = [assemble(SuffixConfig(depth=4), decoder=d, dtype=torch.bfloat16) for d in (decoder, whole)]
        assert decoder.ranks is not None and decoder.ranks.line is not None
        decoder.ranks.line.follow(engines[0].pool)
        own, one = ([o.outputs[0].token_ids for o in run(engine, jobs)] for engine in engines)
        assert own == one


@pytest.mark.parametrize("compiled", [False, True])
def test_a_pass_has_two_sums_a_layer_and_no_gathered_logits(compiled: bool) -> None:
    """2 N, the embedding, the choice; of each row two sums of states a layer, and one score and its token."""
    dtype, wide = ("bfloat16", 4) if compiled else ("float64", 8)
    with torch.inference_mode(), ranked(2, WIDE, dtype=dtype, compiled=compiled) as decoder:
        engine = assemble(decoder=decoder, dtype=decoder.dtype)
        assert decoder.ranks is not None and decoder.ranks.line is not None
        line, struct = decoder.ranks.line, decoder.ranks.joins.struct
        line.follow(engine.pool)
        run(engine, [(PROMPTS[3], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))])
        layers, rows = decoder.num_layers, len(PROMPTS[3]) + 19
        assert line.runs == 20  # type: ignore[attr-defined]
        assert struct.collectives == 20 * (2 * layers + 2)
        assert struct.bytes == rows * 128 * wide * (2 * layers) + rows * 128 * wide + 20 * 16
