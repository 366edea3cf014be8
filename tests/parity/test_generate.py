"""The whole engine against transformers: greedy float32 ids of every family, 12 prompts of 1 to 300 tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import MAKERS, VOCAB, build, greedy

from paceline import LLM, SamplingParams

LENGTHS = (1, 2, 3, 8, 17, 24, 40, 64, 65, 128, 199, 300)
TOKENS = 40


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.mark.parametrize("family", MAKERS)
def test_ids_equal_those_of_transformers(family: str, tmp_path: Path):
    """All prompts at once, in chunks, plainly and drafted: not one id may differ."""
    reference = build(family, tmp_path, seed=2)
    expected = [greedy(reference, prompt, TOKENS) for prompt in prompts()]
    assert len({tuple(e) for e in expected}) == len(LENGTHS), "the answers must depend on the prompt"
    varied = [len(set(e)) for e in expected]
    assert sum(varied) / len(varied) >= 10, f"the answers hardly vary: {varied}"
    asked = [{"prompt_token_ids": prompt} for prompt in prompts()]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    for options in ({"max_batch_rows": 96}, {"drafter": "ngram", "max_sequences": 7}):
        outputs = LLM(str(tmp_path), dtype="float32", **options).generate(asked, params)
        assert [o.outputs[0].token_ids for o in outputs] == expected, options
