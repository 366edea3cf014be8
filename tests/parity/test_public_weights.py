"""Public GGUF files, dequantised to float32, against transformers on the same file: no greedy id differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kits.weights import gemma, smollm2

from paceline import LLM, SamplingParams
from paceline.weights.source import load_tokenizer

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time there was a small house near the river, and in it",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen",
    "1, 2, 3, 4, 5,",
    "The three laws of thermodynamics are:\n1.",
    "SELECT name, number FROM players WHERE",
    "In 1969, the first man",
    "Dear Sir or Madam,\n\nI am writing to",
    "The opposite of hot is cold, and the opposite of",
)
TOKENS = 64
BEYOND = 600  # tokens of a prompt that no window of Gemma 3 270M holds


def reference(file: Path) -> Any:
    """Transformers' model of a file, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("find", [smollm2, gemma])
def test_ids_equal_those_of_transformers(find: Any) -> None:
    """Ten short prompts, and one that is longer than a window; plainly and with drafts."""
    file = find()
    model, tokenizer = reference(file), load_tokenizer(file)
    prompts = [list(tokenizer.encode(text)) for text in PROMPTS]
    prompts.append((sum(prompts, []) * 20)[:BEYOND])
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS, eos_token_id=None
            )
        expected.append(out[0, len(prompt) :].tolist())
    del model
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    for drafter in (None, "ngram"):
        llm = LLM(str(file), dtype="float32", drafter=drafter, max_model_len=1024)
        assert [o.outputs[0].token_ids for o in llm.generate(asked, params)] == expected, drafter
