"""Scores and losses of a model: the right prompts, the right references, the right tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kit.scores import evaluate

from paceline import LLM, SamplingParams

pytestmark = pytest.mark.timeout(120)

MODEL = "paceline-small-draft"  # the smaller of the embedded two
QUESTIONS = ["SELECT the first", "What is two and two?", "Where is the town?", "Who said so?"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(MODEL, dtype="float32", max_model_len=256, max_sequences=3, threads=1)


@pytest.fixture(scope="module")
def answers(llm: LLM) -> list[str]:
    """What the model itself says to the questions, greedily."""
    params = SamplingParams(temperature=0, max_tokens=12)
    return [llm.chat([{"role": "user", "content": q}], params)[0].outputs[0].text for q in QUESTIONS]


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def pairs(prompts: list[str], completions: list[str]) -> list[dict[str, Any]]:
    return [{"prompt": p, "completion": c} for p, c in zip(prompts, completions, strict=True)]


# -- tasks


def test_exact_match_counts_the_answers_that_match(llm: LLM, answers: list[str], tmp_path: Path) -> None:
    """References are the model's own greedy answers but for one: three in four."""
    write(tmp_path / "app_wikisql_test.jsonl", pairs(QUESTIONS, [*answers[:3], "SELECT nothing"]))
    (found,) = evaluate(llm, ["sql"], tmp_path, max_new_tokens=12)
    assert found.scores["exact_match"] == 0.75
    assert 0 <= found.scores["exact_match_low"] <= 0.75 <= found.scores["exact_match_high"] <= 1
    assert found.workload["prompts"] == 4 and found.workload["origin"] == str(tmp_path / "app_wikisql_test.jsonl")
    assert 0 < found.output_tokens <= 4 * 12 and found.max_new_tokens == 12
