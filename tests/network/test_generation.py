"""``generation_config.json``: which of its fields a model is sampled with, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.core.sampling import SamplingParams
from paceline.weights import generation

CHAT = SamplingParams(temperature=0.7, top_p=0.95)


def said(folder: Path, values: Any, **given: Any) -> SamplingParams:
    (folder / "generation_config.json").write_text(json.dumps(values), encoding="utf-8")
    return generation.sampling(folder, given)


def test_without_a_file_a_chat_is_drawn_mildly(tmp_path: Path) -> None:
    assert generation.sampling(tmp_path, {}) == CHAT
    assert generation.ends(tmp_path) == ()


@pytest.mark.parametrize(
    ("values", "fields"),
    [
        # as the makers of Qwen2.5, Llama 3, Gemma 2, DeepSeek have theirs
        (
            {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.6, "top_k": 20, "top_p": 0.8},
            {"temperature": 0.6, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
        ),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
        ({"do_sample": True, "top_k": 64, "top_p": 0.95}, {"top_k": 64, "top_p": 0.95}),  # the temperature is 1 then
        ({"temperature": 0.3}, {"temperature": 0.3}),  # without do_sample, too: vLLM does not ask for it
        ({"min_p": 0.1}, {"min_p": 0.1}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0}),
        ({"do_sample": False, "repetition_penalty": 1.2}, {"temperature": 0.0, "repetition_penalty": 1.2}),
    ],
)
def test_what_a_file_says_is_taken_and_nothing_else(values: dict[str, Any], fields: dict[str, Any], tmp_path: Path):
    assert said(tmp_path, {"eos_token_id": 2, "max_length": 20, **values}) == SamplingParams(**fields)


def test_given_fields_go_before_the_file_s_one_by_one(tmp_path: Path) -> None:
    values = {"temperature": 0.6, "top_p": 0.8, "top_k": 20}
    assert said(tmp_path, values, top_k=0, max_tokens=99) == SamplingParams(temperature=0.6, top_p=0.8, max_tokens=99)
    assert said(tmp_path, {}, temperature=1.0) == SamplingParams(temperature=1.0, top_p=0.95)
    assert said(tmp_path, {"do_sample": False}, temperature=0.5) == SamplingParams(temperature=0.5)


@pytest.mark.parametrize("content", ["3", "[]", "{", "null"])
def test_a_file_that_is_no_object_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match="generation_config.json"):
        generation.sampling(tmp_path, {})
