"""K/V in int8: what is drafted, shared, preempted or cut changes no token of plain decoding with the same K/V."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from kits.native import needs_kernels
from kits.tiny import tiny_decoder

from paceline import LLM, SamplingParams
from paceline.core.errors import CapabilityError, ConfigError
from paceline.kv.pool import KVPool
from paceline.model.attention.base import Segment
from paceline.model.base import Batch
from paceline.model.padding import SCALE_ROOM, packed_shape

pytestmark = needs_kernels
PROMPTS = ["Question: How many names are there?\nSQL:", "name[The Mill], food[English], area[riverside]", "Once"]


@cache
def ids(llm: LLM, **options: Any) -> list[list[int]]:
    params = SamplingParams(**{"max_tokens": 32, "seed": 5, "ignore_eos": True, **options})
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM("paceline-small", kv_cache_dtype="int8", exact=True)


DRAFTERS = ("suffix", "draft_model:paceline-small-draft", "hybrid:suffix+eagle", "medusa", "streams")


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_change_no_token(plain: LLM, drafter: str) -> None:
    drafting = LLM("paceline-small", drafter=drafter, kv_cache_dtype="int8", exact=True, share=plain, budget=6)
    for temperature in (0.0, 0.8):
        assert ids(drafting, temperature=temperature) == ids(plain, temperature=temperature)


def test_numbers_are_others_and_near(plain: LLM) -> None:
    """Log-probabilities move by the rounding of keys and values, and by no more."""
    usual = LLM("paceline-small", exact=True, share=plain)
    [a], [b] = (llm.generate(PROMPTS[:1], SamplingParams(max_tokens=1, prompt_logprobs=1)) for llm in (plain, usual))
    assert a.prompt_logprobs is not None and b.prompt_logprobs is not None
    pairs = zip(a.prompt_logprobs[1:], b.prompt_logprobs[1:], a.prompt_token_ids[1:], strict=True)
    moved = [abs(x[t].logprob - y[t].logprob) for x, y, t in pairs]  # type: ignore[index]
    assert 0 < max(moved) < 0.3


@pytest.mark.parametrize("options", [{"max_batch_rows": 16}, {"kv_memory": "1500KB", "max_model_len": 128}])
def test_cut_prompts_and_preemption_change_no_token(plain: LLM, options: dict[str, Any]) -> None:
    cut = LLM("paceline-small", kv_cache_dtype="int8", exact=True, drafter="suffix", share=plain, budget=6, **options)
    assert ids(cut) == ids(plain)
    assert ids(cut, ignore_eos=True) == ids(plain)  # again, behind prefixes that were kept


def test_stages_hold_it_too(plain: LLM) -> None:
    piped = LLM("paceline-small", kv_cache_dtype="int8", exact=True, drafter="suffix", budget=6, pipeline=2)
    assert ids(piped) == ids(plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_has_the_same_bits_alone_and_among_others(dtype: torch.dtype) -> None:
    """A network with a sliding window, past its end: in one pass, and a row at a time."""
    decoder = tiny_decoder(dtype=dtype, compiled=True)
    count = 64
    tokens, places = torch.arange(count) % 40, torch.arange(count)

    def run(pool: KVPool, begin: int, end: int) -> torch.Tensor:
        rows, keys = slice(begin, end), slice(0, end)
        plan = decoder.plan([Segment(0, end - begin, keys, end, begin, None, None)], places[rows])
        batch = Batch(tokens[rows], places[rows], rows, plan)
        return decoder.run_layers(decoder.embed(batch), 0, decoder.num_layers, pool).hidden.clone()

    together, alone, usual = (
        KVPool(*shape, count, kind, decoder.device)
        for shape, kind in [(packed_shape(decoder.cache_shape), torch.int8)] * 2 + [(decoder.cache_shape, dtype)]
    )
    with torch.inference_mode():
        whole = run(together, 0, count)
        one_by_one = torch.cat([run(alone, i, i + 1) for i in range(count)])
        exact = run(usual, 0, count)
    assert torch.equal(whole, one_by_one)
    assert 0 < (whole - exact).norm() / exact.norm() < 0.05


def test_a_row_holds_its_numbers_and_their_scale() -> None:
    """Each row of the first layer's K and V is within half a step of what a cache of activations holds."""
    decoder = LLM("paceline-small", dtype="float32").decoder
    shape, places, whole = decoder.cache_shape, torch.arange(8), slice(0, 8)
    pools = [KVPool(*s, 64, d, decoder.device) for s, d in ((shape, decoder.dtype), (packed_shape(shape), torch.int8))]
    plan = decoder.plan([Segment(0, 8, whole, 8, 0, None, None)], places)
    for pool in pools:
        with torch.inference_mode():
            decoder.run_layers(decoder.embed(Batch(places + 5, places, whole, plan)), 0, 1, pool)
    for usual, packed in zip((pools[0].k, pools[0].v), (pools[1].k, pools[1].v), strict=True):
        rows, kept = usual[0][:, :8], packed[0][:, :8]
        scale = kept[..., -SCALE_ROOM:].contiguous().view(torch.float32)[..., :1]
        assert ((kept[..., :-SCALE_ROOM] * scale - rows).abs() <= scale * 0.501).all()
        assert (kept[..., :-SCALE_ROOM].abs().amax(-1) == 127).all()


def test_what_cannot_read_it_says_so() -> None:
    with pytest.raises(CapabilityError, match="compiled layers"):
        LLM("paceline-small", kv_cache_dtype="int8", kernels="torch")
    with pytest.raises(CapabilityError, match="magicdec"):
        LLM("paceline-small", kv_cache_dtype="int8", drafter="magicdec")
    with pytest.raises(ConfigError, match="auto, int8"):
        LLM("paceline-small", kv_cache_dtype="fp8")
