"""Structured output and predicted output over HTTP, by OpenAI's own client."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import httpx2 as httpx
import jsonschema
import openai
import pytest
from kits.grammars import SCHEMA
from kits.server import LiveServer
from pydantic import BaseModel

from paceline import LLM, SamplingParams
from paceline.core.grammar import Grammar

ASK: list[Any] = [{"role": "user", "content": "Who lives in Paris?"}]
MODEL = "paceline-small"
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_schema_holds_whole_and_streamed_and_ids_are_the_offline_ones(
    client: openai.OpenAI, offline: LLM, temperature: float
) -> None:
    same: dict[str, Any] = {"model": MODEL, "messages": ASK, "seed": 4, "temperature": temperature}
    found = client.chat.completions.create(
        **same, response_format=FORMAT, extra_body={"return_token_ids": True, "max_tokens": 80}
    )
    [choice] = found.choices
    assert choice.finish_reason == "stop" and choice.message.content is not None
    jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    stats = found.model_extra["stats"] if found.model_extra else {}
    assert stats["sources"]["grammar"]["accepted"] >= 3
    stream = client.chat.completions.create(**same, response_format=FORMAT, stream=True, max_tokens=80)
    assert "".join(c.choices[0].delta.content or "" for c in stream) == choice.message.content
    alone = client.chat.completions.create(
        **same, response_format=FORMAT, extra_body={"speculation": False, "max_tokens": 80}
    )
    assert alone.choices[0].message.content == choice.message.content
    params = SamplingParams(
        seed=4, temperature=temperature, max_tokens=80, grammar=Grammar("json_schema", json.dumps(SCHEMA))
    )
    [expected] = offline.chat(ASK, params)
    assert choice.model_extra is not None
    assert choice.model_extra["token_ids"] == expected.outputs[0].token_ids


def test_the_client_reads_its_own_type(client: openai.OpenAI) -> None:
    class Answer(BaseModel):
        city: Literal["Paris", "Berlin"]
        sure: bool

    found = client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Answer, max_tokens=60)
    assert isinstance(found.choices[0].message.parsed, Answer)


KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "json": ({"json": {"enum": ["a", "b"]}}, '"[ab]"'),
    "regex": ({"regex": "[0-9]{3}-[a-c]"}, "[0-9]{3}-[a-c]"),
    "choice": ({"choice": ["left", "right"]}, "left|right"),
    "grammar": ({"grammar": 'start: "x" "y"+'}, "xy+"),
    "json_object": ({"json_object": True}, r"(?s)\{.*"),
    "structural_tag": (
        {
            "structural_tag": {
                "structures": [{"begin": "<f>", "schema": {"enum": [1]}, "end": "</f>"}],
                "triggers": ["<f"],
            }
        },
        "(?s).*",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_structured_outputs_as_vllm_has_them(client: openai.OpenAI, kind: str) -> None:
    wanted, pattern = KINDS[kind]
    found = client.completions.create(
        model=MODEL, prompt="It is", max_tokens=24, seed=2, extra_body={"structured_outputs": wanted}
    )
    assert re.fullmatch(pattern, found.choices[0].text), found.choices[0].text


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "two of vLLM's": ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "two grammars"),
    "a keyword": ({"structured_outputs": {"json": {"type": "object", "uniqueItems": True}}}, "uniqueItems"),
    "a pattern": ({"structured_outputs": {"regex": "[a-"}}, "unclosed"),
    "too long": ({"structured_outputs": {"regex": "a" * 70_000}}, "characters"),
    "ignore_eos": ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
    "a template's argument": ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs='tools'"),
    "no variable": ({"chat_template_kwargs": {"enable_thinking": False}}, "='enable_thinking': it is not a variable"),
    "more than a client may ask": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "a search": ({"web_search_options": {}}, "'web_search_options' is not supported"),
    "functions": ({"functions": [{"name": "f"}]}, "unknown field: functions"),
    "an image": ({"prediction": {"type": "content", "content": [{"type": "image", "text": "a"}]}}, "prediction"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_met_is_a_400_in_words(server: LiveServer, case: str) -> None:
    fields, words = WRONG[case]
    found = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": ASK, "max_tokens": 4, **fields})
    assert found.status_code == 400 and words in found.json()["error"]["message"], found.text


def test_a_prediction_is_drafted_from_and_counted(client: openai.OpenAI) -> None:
    same: dict[str, Any] = {"model": MODEL, "messages": ASK, "max_tokens": 48, "temperature": 0}
    plain = client.chat.completions.create(**same)
    text = plain.choices[0].message.content or ""
    parts: Any = {"type": "content", "content": [{"type": "text", "text": text}]}
    for prediction in ({"type": "content", "content": text}, parts):
        found = client.chat.completions.create(**same, prediction=prediction)
        assert found.choices[0].message.content == text and found.usage is not None
        details = found.usage.completion_tokens_details
        assert details is not None and (details.accepted_prediction_tokens or 0) > 10
        assert details.rejected_prediction_tokens is not None


def test_fields_that_change_nothing_are_taken(client: openai.OpenAI) -> None:
    same: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    said: list[Any] = [*ASK, {"role": "assistant", "content": "Ann.", "reasoning_content": "Hm."}, *ASK]
    plain = client.chat.completions.create(**same, messages=[*ASK, {"role": "assistant", "content": "Ann."}, *ASK])
    found = client.chat.completions.create(
        **same, messages=said, reasoning_effort="low", verbosity="low", modalities=["text"], web_search_options=None
    )  # fmt: skip
    assert found.choices[0].message.content == plain.choices[0].message.content
    assert client.completions.create(**same, prompt="It", best_of=1, suffix=None).choices[0].text


def test_a_chat_is_drawn_as_in_the_terminal_where_nothing_says_how(client: openai.OpenAI, offline: LLM) -> None:
    [expected] = offline.chat(ASK, offline.default_sampling_params(seed=3, max_tokens=40))
    found = client.chat.completions.create(
        model=MODEL, messages=ASK, seed=3, max_tokens=40, extra_body={"return_token_ids": True}
    )
    assert found.choices[0].model_extra is not None
    assert found.choices[0].model_extra["token_ids"] == expected.outputs[0].token_ids


def test_a_request_names_itself(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=2, extra_body={"request_id": "mine"})
    assert found.id == "chatcmpl-mine"
