"""Scores and losses of a model: the right prompts, the right references, the right tokens."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from kit.scores import TASK_WORKLOADS, domain_losses, evaluate
from kit.task_scores import TASKS, score_task

from paceline import LLM, SamplingParams
from paceline.bench.workloads import WORKLOADS
from paceline.core.errors import ConfigError

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


@pytest.fixture(scope="module")
def reference(llm: LLM) -> Any:
    """From ids to logits [tokens, V]: the same checkpoint in transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(llm.folder, dtype=torch.float32).eval()

    def logits(ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0]

    return logits


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def pairs(prompts: list[str], completions: list[str]) -> list[dict[str, Any]]:
    return [{"prompt": p, "completion": c} for p, c in zip(prompts, completions, strict=True)]


# -- tasks


def test_every_task_has_scores_and_a_workload() -> None:
    assert set(TASK_WORKLOADS) == set(TASKS)
    assert set(TASK_WORKLOADS.values()) <= set(WORKLOADS)


def test_exact_match_counts_the_answers_that_match(llm: LLM, answers: list[str], tmp_path: Path) -> None:
    """References are the model's own greedy answers but for one: three in four."""
    write(tmp_path / "app_wikisql_test.jsonl", pairs(QUESTIONS, [*answers[:3], "SELECT nothing"]))
    (found,) = evaluate(llm, ["sql"], tmp_path, max_new_tokens=12)
    assert found.scores["exact_match"] == 0.75
    assert 0 <= found.scores["exact_match_low"] <= 0.75 <= found.scores["exact_match_high"] <= 1
    assert found.workload["prompts"] == 4 and found.workload["origin"] == str(tmp_path / "app_wikisql_test.jsonl")
    assert 0 < found.output_tokens <= 4 * 12 and found.max_new_tokens == 12


def test_prompts_go_through_the_chat_template(llm: LLM, tmp_path: Path) -> None:
    write(tmp_path / "app_wikisql_test.jsonl", pairs(QUESTIONS[:1], ["x"]))
    (found,) = evaluate(llm, ["sql"], tmp_path, max_new_tokens=1, intervals=False)
    turn = [{"role": "user", "content": QUESTIONS[0]}]
    text = llm.tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    assert found.prompt_tokens == len(llm.tokenizer.encode(text, add_special_tokens=False))
    assert set(found.scores) == {"exact_match"}


def test_equal_prompts_become_one_with_several_references(llm: LLM, answers: list[str], tmp_path: Path) -> None:
    """E2E's form: the best reference of each prompt counts, wherever it stands."""
    records = pairs([QUESTIONS[0]] * 3 + [QUESTIONS[1]], ["wide of it", f" {answers[0]}", "and so is this", "nowhere"])
    write(tmp_path / "app_e2e_nlg_test.jsonl", records)
    (found,) = evaluate(llm, ["e2e"], tmp_path, max_new_tokens=12)
    assert found.workload["prompts"] == 2
    assert found.scores["rouge1"] == (1 + score_task("e2e", answers[1:2], ["nowhere"])["rouge1"]) / 2


def test_gsm8k_takes_turns_and_references(llm: LLM, answers: list[str], tmp_path: Path) -> None:
    records = [
        {"id": f"p{i}", "category": "gsm8k", "turns": [q], "reference": ["#### -77"]} for i, q in enumerate(QUESTIONS)
    ]
    write(tmp_path / "bench_gsm8k_test.jsonl", records)
    (found,) = evaluate(llm, ["gsm8k"], tmp_path, max_new_tokens=12)
    assert found.scores["accuracy"] == 0.0 and found.workload["prompts"] == 4


def test_the_batch_does_not_change_scores(llm: LLM, tmp_path: Path) -> None:
    """Limit and seed choose prompts; tasks come back in the order asked."""
    first = evaluate(llm, ["gsm8k", "sql"], limit=3, seed=1, max_new_tokens=8)
    again = evaluate(llm, ["sql"], limit=3, seed=1, max_new_tokens=8)
    assert [found.task for found in first] == ["gsm8k", "sql"]
    assert first[1].scores == again[0].scores and first[1].workload == again[0].workload
    assert (
        evaluate(llm, ["sql"], limit=3, seed=2, max_new_tokens=8)[0].workload["fingerprint"]
        != again[0].workload["fingerprint"]
    )


# -- losses


def test_loss_of_a_text_is_that_of_one_causal_pass(llm: LLM, reference: Any, tmp_path: Path) -> None:
    text = "It was a dark night, and the rain fell on the roofs of the town until the morning came."
    file = tmp_path / "night.txt"
    file.write_text(text, encoding="utf-8")
    (found,) = domain_losses(llm, [file])
    ids = [
        llm.tokenizer.bos_token_id,
        *llm.tokenizer.encode(text, add_special_tokens=False),
        llm.tokenizer.eos_token_id,
    ]
    wanted = torch.nn.functional.cross_entropy(reference(ids)[:-1], torch.tensor(ids[1:]))
    assert found.loss == pytest.approx(wanted.item(), abs=1e-4)
    assert (found.domain, found.tokens, found.documents) == ("night", len(ids) - 1, 1)


def test_only_answers_of_dialogues_count(llm: LLM, reference: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "talk.jsonl", pairs(["Say hello."], [" Hello there, friend."]))
    (found,) = domain_losses(llm, [file])
    turn = [{"role": "user", "content": "Say hello."}]
    head = llm.tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    prompt = llm.tokenizer.encode(head, add_special_tokens=False)
    answer = [*llm.tokenizer.encode("Hello there, friend.", add_special_tokens=False), llm.tokenizer.eos_token_id]
    logits = reference([*prompt, *answer])[len(prompt) - 1 : -1]
    assert found.tokens == len(answer)
    assert found.loss == pytest.approx(torch.nn.functional.cross_entropy(logits, torch.tensor(answer)).item(), abs=1e-4)


def test_long_texts_are_cut_into_pieces(llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "long.txt"
    file.write_text("one two three four five six. " * 60, encoding="utf-8")
    (short,) = domain_losses(llm, [file], context=32)
    (long,) = domain_losses(llm, [file])
    assert short.documents > long.documents > 1 and short.context == 32 and long.context == 255
    assert short.tokens < long.tokens  # the first token of a piece is not predicted
    assert 0 < long.loss < short.loss < math.log(llm.decoder.config.vocab_size)  # repetition is learned in context
    (capped,) = domain_losses(llm, [file], context=32, max_tokens=64)
    assert capped.documents == 2


# -- bad input


def test_bad_input_is_refused_before_any_answer(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "generate", lambda *_, **__: pytest.fail("a prompt was answered"))
    write(tmp_path / "app_wikisql_test.jsonl", [{"prompt": "a"}])
    good = tmp_path / "good.txt"
    good.write_text("some words", encoding="utf-8")
    for call, message in [
        (lambda: evaluate(llm, ["sql", "poems"]), "poems"),
        (lambda: evaluate(llm, []), "no task"),
        (lambda: evaluate(llm, ["sql", "gsm8k"], tmp_path / "nowhere"), "no such folder"),
        (lambda: evaluate(llm, ["gsm8k"], tmp_path), "it has no bench_gsm8k_test.jsonl"),
        (lambda: evaluate(llm, ["e2e"]), "app_e2e_nlg_test.jsonl"),
        (lambda: evaluate(llm, ["sql"], tmp_path), "has no reference"),
        (lambda: evaluate(llm, ["sql"], limit=0), "1 or more"),
        (lambda: evaluate(llm, ["sql"], max_new_tokens=0), "nothing would be generated"),
        (lambda: domain_losses(llm, [good, tmp_path / "nowhere.txt"]), "no such file"),
        (lambda: domain_losses(llm, [good], context=256), "room for 255"),
        (lambda: domain_losses(llm, [good], context=1), "2 tokens or more"),
        (lambda: domain_losses(llm, [good], max_tokens=1), "nothing would be predicted"),
    ]:
        with pytest.raises(ConfigError, match=message):
            call()
    monkeypatch.setattr(llm, "tokenizer", None)
    for call in (lambda: evaluate(llm, ["sql"]), lambda: domain_losses(llm, [good])):
        with pytest.raises(ConfigError, match="no tokenizer"):
            call()
