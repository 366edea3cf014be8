"""Weights in 4 and 8 bits: what is drafted changes no token, whatever drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
from kits.four_bit_files import quantise
from kits.gguf_files import as_folder, write
from kits.native import needs_kernels

from paceline import LLM, SamplingParams
from paceline.core.outputs import RequestOutput
from paceline.weights.gguf import read_gguf
from paceline.weights.gguf_tokenizer import load_gguf_tokenizer
from paceline.weights.source import resolve_folder

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


@needs_kernels
@pytest.mark.parametrize("target", ["file", "folder"])
def test_a_file_and_a_folder_draft_for_each_other(target: str, tmp_path: Path) -> None:
    """The same weights in blocks and as plain numbers: most drafts are right, and none changes a token."""
    file = write(tmp_path / "m.gguf", "q8_0")
    places = {"file": file, "folder": as_folder(file, tmp_path / "folder")}
    load_gguf_tokenizer(read_gguf(file)).save_pretrained(places["folder"])
    drafter = places["folder" if target == "file" else "file"]
    prompts = [{"prompt_token_ids": ids} for ids in ([5, 17, 200, 33], [319, 8, 8])]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)

    def outputs(drafter: str, budget: int | None) -> list[RequestOutput]:
        return LLM(str(places[target]), drafter=drafter, budget=budget).generate(prompts, params)

    drafted = outputs(f"draft_model:{drafter},depth=4", 4)
    assert [o.outputs[0].token_ids for o in drafted] == [o.outputs[0].token_ids for o in outputs("none", None)]
    assert min(o.outputs[0].origins.count("drafted") for o in drafted) > 20
