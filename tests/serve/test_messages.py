"""Anthropic's endpoints by Anthropic's own client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import httpx2 as httpx
import jsonschema
import pytest
from kits.server import LiveServer
from kits.tools import CITY

from paceline.core.outputs import Chunk
from paceline.serve.messages import MessageReply, MessagesRequest
from paceline.serve.tools import ToolUse

MODEL = "paceline-small"
ASK: list[Any] = [{"role": "user", "content": "Tell me of the sea."}]
COLD = {"temperature": 0}  # the client has no argument for it any more
TOOLS: list[Any] = [{"name": "weather", "description": "of a city", "input_schema": CITY}]


@pytest.fixture(scope="module")
def client(server: LiveServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def test_the_client_reads_text_whole_and_streamed_and_counts_the_same_tokens(client: anthropic.Anthropic) -> None:
    same: dict[str, Any] = {"model": MODEL, "max_tokens": 24, "messages": ASK, "extra_body": COLD}
    found = client.messages.create(**same, system="Be short.")
    [block] = found.content
    with client.messages.stream(**same, system=[{"type": "text", "text": "Be short."}]) as stream:
        pieces, last = [*stream.text_stream], stream.get_final_message()
    assert block.type == "text" and "".join(pieces) == block.text and len(pieces) > 2
    assert (last.stop_reason, last.usage) == (found.stop_reason, found.usage)
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


def test_calls_whole_and_streamed(client: anthropic.Anthropic) -> None:
    same: dict[str, Any] = {"model": MODEL, "max_tokens": 120, "extra_body": COLD, "messages": ASK, "tools": TOOLS}
    same["tool_choice"] = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
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


class Said:
    """An answer in these pieces."""

    name, model, prompt_tokens, completion_tokens, stats = "a", "m", 1, 1, {}  # type: ignore[var-annotated]

    def __init__(self, *texts: str) -> None:
        self._texts = texts

    def abort(self) -> None: ...

    async def into(self, take: Any) -> None:
        for text in self._texts:
            take([Chunk(0, text, [1], None, None, None, None, [], 0)])
        take([Chunk(0, "", [], "stop", None, None, None, [], 0)])


def test_text_and_calls_stand_in_the_answer_s_order_whole_and_streamed() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    answer: Any = Said("Let me", f" see. {call} And:", f" {call[:20]}", f"{call[20:]}{call} Done.")
    body = MessagesRequest(messages=ASK, max_tokens=9)
    found = json.loads(asyncio.run(MessageReply(answer, ToolUse("hermes", None), body).respond(False)).body)["content"]
    kinds = ["text", "tool_use", "text", "tool_use", "tool_use", "text"]
    assert [block["type"] for block in found] == kinds
    texts = ["Let me see.", {"a": 1}, " And:", {"a": 1}, {"a": 1}, " Done."]
    assert [block.get("text", block.get("input")) for block in found] == texts
    said = list[bytes]()
    asyncio.run(MessageReply(answer, ToolUse("hermes", None), body)._events(said.append))
    events = [json.loads(line[6:]) for line in b"".join(said).splitlines() if line.startswith(b"data: ")]
    assert [one["content_block"]["type"] for one in events if one["type"] == "content_block_start"] == kinds


def test_fields_that_change_nothing_are_taken(client: anthropic.Anthropic) -> None:
    same: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "messages": ASK}
    more: dict[str, Any] = {"thinking": {"type": "disabled"}, "cache_control": {"type": "ephemeral"}}
    more |= {"inference_geo": "eu", "output_config": {"effort": "low"}, "speed": "standard"}
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    found = client.messages.create(**same, **more, extra_body={**COLD, "context_management": edits})
    assert found.content == client.messages.create(**same, extra_body=COLD).content


WRONG: dict[str, tuple[dict[str, Any], int, str]] = {
    "no max_tokens": ({"messages": ASK}, 400, "max_tokens"),
    "an image": (
        {"max_tokens": 2, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, "image"),
    "thinking": ({"max_tokens": 2, "messages": ASK, "thinking": {"type": "adaptive"}}, 400, "thinking.type"),
    "a format": (
        {"max_tokens": 2, "messages": ASK, "output_config": {"format": {"type": "json_schema", "schema": {}}}},
        400, "'output_config.format' is not supported"),
    "an empty stop": ({"max_tokens": 2, "messages": ASK, "stop_sequences": [""]}, 400, "stop_sequences.0"),
    "another's block": (
        {"max_tokens": 2, "messages": [{"role": "assistant", "content": [
            {"type": "tool_result", "tool_use_id": "a"}]}]}, 400, "for the user"),
    "no such tool": (
        {"max_tokens": 2, "messages": ASK, "tools": TOOLS, "tool_choice": {"type": "tool", "name": "f"}},
        400, "weather"),
    "a tool without a name": (
        {"max_tokens": 2, "messages": ASK, "tools": TOOLS, "tool_choice": {"type": "tool"}}, 400, "must name a tool"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_errors_have_anthropic_s_form(server: LiveServer, case: str) -> None:
    body, status, words = WRONG[case]
    found = httpx.post(f"{server.url}/v1/messages", json=body, headers={"x-api-key": "sesame"})
    said = found.json()
    assert found.status_code == status and said["type"] == "error" and words in said["error"]["message"], said
    assert said["error"]["type"] in ("invalid_request_error", "not_found_error")
