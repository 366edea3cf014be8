"""The contract of every weight format: drafts change no token, nor does company, and drafts are accepted."""

from __future__ import annotations

from pathlib import Path

import pytest
from kits.four_bit_files import FORMS
from kits.four_bit_files import write as write_four_bits
from kits.gguf_files import HALVES, write
from kits.native import needs_kernels
from kits.tiny import ids

from paceline import LLM, SamplingParams

PROMPTS = [{"prompt_token_ids": ids} for ids in ([5, 17, 200, 33], [9, 8, 8, 300, 9, 8], [41, 42, 43, 44] * 9)]
RULES = [SamplingParams(temperature=t, seed=3, max_tokens=40, ignore_eos=True) for t in (0.0, 0.8)]
DTYPES = ("float32", "bfloat16", "int8", "q4_0", "q8_0")
FILES = ("q4_0", "q8_0", *HALVES)


def check(model: str, **options: str) -> None:
    """Plain alone, plain in a batch, look-ups, and the model as its own draft: one answer; and it varies."""
    limits = {"threads": 1, "max_model_len": 128, "max_sequences": 4}
    plain = LLM(model, **limits, **options)
    alone = [[ids(plain.generate(prompt, rules))[0] for prompt in PROMPTS] for rules in RULES]
    assert len({*alone[1][0]}) > 8
    for drafter in (None, "ngram", f"draft_model:{model},depth=3"):
        llm = LLM(model, share=plain, drafter=drafter, budget=drafter and 4, **limits, **options)
        for rules, wanted in zip(RULES, alone, strict=True):
            outputs = llm.generate(PROMPTS, rules)
            assert ids(outputs) == wanted
            if drafter and "draft_model" in drafter:
                assert sum(o.stats.accepted for o in outputs) > 40
        assert drafter is None or llm.engine.round.failure is None


@needs_kernels
@pytest.mark.parametrize("dtype", [*DTYPES, pytest.param("float16", marks=pytest.mark.full)])
def test_dtypes(dtype: str) -> None:
    check("paceline-small", dtype=dtype)


@needs_kernels
@pytest.mark.parametrize("types", FILES)
def test_gguf_files(types: str, tmp_path: Path) -> None:
    check(str(write(tmp_path / "m.gguf", types)))


@needs_kernels
@pytest.mark.parametrize("form", FORMS)
def test_checkpoints_in_four_bits(form: str, tmp_path: Path) -> None:
    check(str(write_four_bits(tmp_path, form)))
