"""Weights in 4 and 8 bits: what is drafted changes no token, whatever drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
from kits.four_bit_files import quantise
from kits.native import needs_kernels

from paceline import LLM, SamplingParams
from paceline.network.loader import resolve_folder

PROMPTS = ["Question: How many names are there?\nSQL:", "name[The Mill], food[English], area[riverside]"]


@needs_kernels
@pytest.mark.parametrize("dtype", ["q4_0", "q8_0"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_change_no_token(dtype: str, temperature: float) -> None:
    params = SamplingParams(max_tokens=48, temperature=temperature, seed=5, ignore_eos=True)

    def ids(drafter: str, dtype: str = dtype) -> list[list[int]]:
        return [
            o.outputs[0].token_ids
            for o in LLM("paceline-small", dtype=dtype, drafter=drafter).generate(PROMPTS, params)
        ]

    plain = ids("none")
    for drafter in ("ngram", f"hybrid:paceline-small-draft,dtype={dtype}"):
        assert ids(drafter) == plain
    assert ids("none", "bfloat16") != plain  # other numbers


@needs_kernels
@pytest.mark.parametrize("form", ["awq", "gptq_order", "compressed"])
def test_drafts_change_no_token_of_a_checkpoint_in_4_bits(form: str, tmp_path: Path) -> None:
    model = quantise(resolve_folder("paceline-small"), tmp_path, form)
    greedy, sampled = (SamplingParams(max_tokens=48, temperature=t, seed=5, ignore_eos=True) for t in (0.0, 0.8))

    def ids(drafter: str) -> list[list[int]]:
        llm = LLM(str(model), drafter=drafter)
        return [o.outputs[0].token_ids for params in (greedy, sampled) for o in llm.generate(PROMPTS, params)]

    plain = ids("none")
    for drafter in ("ngram", "hybrid:paceline-small-draft"):
        assert ids(drafter) == plain
