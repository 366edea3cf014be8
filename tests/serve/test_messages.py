"""Anthropic's endpoints by Anthropic's own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2 as httpx
import jsonschema
import openai
import pytest
from kits.server import LiveServer, live_server
from kits.tools import CITY, TEMPLATE

MODEL = "paceline-small"
ASK: list[Any] = [{"role": "user", "content": "Tell me of the sea."}]
COLD = {"temperature": 0}  # the client has no argument for it any more
TOOLS: list[Any] = [{"name": "weather", "description": "of a city", "input_schema": CITY}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    template = tmp_path_factory.mktemp("templates") / "tools.jinja"
    template.write_text(TEMPLATE)
    with live_server("--chat-template", str(template), environment={"PACELINE_API_KEYS": "sesame"}) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: LiveServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="sesame", max_retries=0)


def test_text_is_that_of_the_other_endpoint_whole_and_streamed(server: LiveServer, client: anthropic.Anthropic) -> None:
    same: dict[str, Any] = {"model": MODEL, "max_tokens": 24, "extra_body": COLD}
    found = client.messages.create(**same, messages=ASK, system="Be short.")
    other = openai.OpenAI(base_url=f"{server.url}/v1", api_key="sesame").chat.completions.create(
        **same, messages=[{"role": "system", "content": "Be short."}, *ASK]
    )
    [block] = found.content
    assert block.type == "text" and block.text == other.choices[0].message.content
    assert other.usage is not None
    assert (found.usage.input_tokens, found.usage.output_tokens) == (
        other.usage.prompt_tokens,
        other.usage.completion_tokens,
    )
    assert found.stop_reason == {"length": "max_tokens", "stop": "end_turn"}[other.choices[0].finish_reason]
    with client.messages.stream(**same, messages=ASK, system=[{"type": "text", "text": "Be short."}]) as stream:
        pieces = [*stream.text_stream]
        last = stream.get_final_message()
    assert "".join(pieces) == block.text
    assert len(pieces) > 2, "a whole answer's pieces may wait for each other; a stream's go as they come"
    assert last.stop_reason == found.stop_reason
    assert last.usage.output_tokens == found.usage.output_tokens
    counted = client.messages.count_tokens(model=MODEL, messages=ASK, system="Be short.")
    assert counted.input_tokens == found.usage.input_tokens


def test_a_stop_sequence_is_named_and_left_out(client: anthropic.Anthropic) -> None:
    same: dict[str, Any] = {"model": MODEL, "max_tokens": 40, "messages": ASK, "extra_body": COLD}
    [whole] = client.messages.create(**same).content
    assert whole.type == "text"
    stop = whole.text[10:14]
    found = client.messages.create(**same, stop_sequences=[stop])
    [block] = found.content
    assert block.type == "text" and stop not in block.text
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)


def test_an_answer_goes_on_from_its_beginning(client: anthropic.Anthropic) -> None:
    same: dict[str, Any] = {"model": MODEL, "max_tokens": 20, "extra_body": COLD}
    [whole] = client.messages.create(**same, messages=ASK).content
    assert whole.type == "text"
    begun = [*ASK, {"role": "assistant", "content": whole.text[:8]}]
    [rest] = client.messages.create(**same, messages=begun).content
    assert rest.type == "text" and not rest.text.startswith(whole.text[:8])


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_calls_whole_and_streamed(client: anthropic.Anthropic, choice: Any) -> None:
    same: dict[str, Any] = {"model": MODEL, "max_tokens": 120, "extra_body": COLD, "messages": ASK, "tools": TOOLS}
    same["tool_choice"] = {**choice, "disable_parallel_tool_use": True}
    found = client.messages.create(**same)
    [block] = found.content
    assert block.type == "tool_use" and block.name == "weather" and found.stop_reason == "tool_use"
    jsonschema.validate(block.input, CITY)
    with client.messages.stream(**same) as stream:
        last = stream.get_final_message()
    [again] = last.content
    assert again.type == "tool_use" and (again.name, again.input) == (block.name, block.input)
    assert last.stop_reason == "tool_use"
    said: list[Any] = [
        *ASK,
        {"role": "assistant", "content": [block.model_dump(exclude_none=True)]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "rain"}]},
    ]
    counted = client.messages.count_tokens(model=MODEL, messages=said, tools=TOOLS)
    assert counted.input_tokens > found.usage.input_tokens
    answer = client.messages.create(model=MODEL, max_tokens=4, messages=said, tools=TOOLS)
    assert answer.usage.input_tokens == counted.input_tokens


WRONG: dict[str, tuple[dict[str, Any], int, str]] = {
    "no max_tokens": ({"messages": ASK}, 400, "max_tokens"),
    "an image": (
        {"max_tokens": 2, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, "image"),
    "an unknown field": ({"max_tokens": 2, "messages": ASK, "frog": 1}, 400, "frog"),
    "no such model": ({"max_tokens": 2, "messages": ASK, "model": "frog"}, 404, "frog"),
    "another's block": (
        {"max_tokens": 2, "messages": [{"role": "assistant", "content": [
            {"type": "tool_result", "tool_use_id": "a"}]}]}, 400, "user's"),
    "no such tool": (
        {"max_tokens": 2, "messages": ASK, "tools": TOOLS, "tool_choice": {"type": "tool", "name": "f"}},
        400, "weather"),
    "a tool's name": (
        {"max_tokens": 2, "messages": ASK, "tools": [{"name": "\x81é", "input_schema": {}}]}, 400, "name"),
    "a tool without a name": (
        {"max_tokens": 2, "messages": ASK, "tools": TOOLS, "tool_choice": {"type": "tool"}}, 400, "names one"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_errors_have_anthropic_s_form(server: LiveServer, case: str) -> None:
    body, status, words = WRONG[case]
    found = httpx.post(f"{server.url}/v1/messages", json=body, headers={"x-api-key": "sesame"})
    said = found.json()
    assert found.status_code == status and said["type"] == "error" and words in said["error"]["message"], said
    assert said["error"]["type"] in ("invalid_request_error", "not_found_error")


def test_keys_are_asked_for(server: LiveServer) -> None:
    with pytest.raises(anthropic.AuthenticationError, match="no key"):
        anthropic.Anthropic(base_url=server.url, api_key="frog", max_retries=0).messages.create(
            model=MODEL, max_tokens=2, messages=ASK
        )
