"""What the four endpoints that generate have alike: whole and streamed answers, speculation, tools, errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx2 as httpx
import jsonschema
import pytest
from kits.server import LiveServer
from kits.tools import CITY

TEXT = "Tell me of the sea."
CHAT = [{"role": "user", "content": TEXT}]


class Read(NamedTuple):
    """An answer of any endpoint."""

    text: str
    calls: list[tuple[str, Any]]
    tokens: int
    whole: Any  # where provenance, trace, stats and metrics are
    choice: Any


@dataclass(frozen=True)
class Endpoint:
    """How an endpoint is asked, and its answers are read."""

    body: dict[str, Any]
    limit: str
    whole: Callable[[Any], Read]
    joined: Callable[[list[Any]], Any]  # the whole answer that a stream's events make
    tools: dict[str, Any] | None = None


def completion(found: Any) -> Read:
    choice = found["choices"][0]
    return Read(choice["text"], [], found["usage"]["completion_tokens"], found, choice)


def chat(found: Any) -> Read:
    choice = found["choices"][0]
    functions = [call["function"] for call in choice["message"].get("tool_calls", ())]
    calls = [(one["name"], json.loads(one["arguments"])) for one in functions]
    return Read(choice["message"]["content"] or "", calls, found["usage"]["completion_tokens"], found, choice)


def message(found: Any) -> Read:
    text = "".join(block.get("text", "") for block in found["content"])
    calls = [(block["name"], block["input"]) for block in found["content"] if block["type"] == "tool_use"]
    return Read(text, calls, found["usage"]["output_tokens"], found, found)


def response(found: Any) -> Read:
    text = "".join(part["text"] for item in found["output"] for part in item.get("content", ()))
    functions = [item for item in found["output"] if item["type"] == "function_call"]
    calls = [(one["name"], json.loads(one["arguments"])) for one in functions]
    return Read(text, calls, found["usage"]["output_tokens"], found, found)


def join_chunks(events: list[Any]) -> Any:
    """Join the chunks of completions, or of chat."""
    *chunks, last = events
    parts = [part for chunk in chunks for part in chunk["choices"]]
    deltas = [part.get("delta", {}) for part in parts]
    choice: dict[str, Any] = {"text": "".join(part.get("text", "") for part in parts)}
    for name in ("provenance", "trace"):
        choice[name] = [one for part in parts for one in part.get(name, ())]
    calls: list[Any] = []
    for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
        if call["index"] == len(calls):
            assert call["id"] and call["type"] == "function" and call["function"]["name"]
            calls.append({"function": dict(call["function"])})
        else:
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    choice["message"] = {"content": "".join(delta.get("content", "") for delta in deltas), "tool_calls": calls}
    return last | {"choices": [choice]}


def join_message(events: list[Any]) -> Any:
    """Join the blocks of a message."""
    found, arguments = dict(events[0]["message"]), dict[int, str]()
    assert [events[0]["type"], events[1]["type"], events[-1]["type"]] == ["message_start", "ping", "message_stop"]
    for one in events[2:-1]:
        if one["type"] == "content_block_start":
            found["content"].append(one["content_block"])
        elif one["type"] == "content_block_delta" and "text" in one["delta"]:
            found["content"][one["index"]]["text"] += one["delta"]["text"]
        elif one["type"] == "content_block_delta":
            arguments[one["index"]] = arguments.get(one["index"], "") + one["delta"]["partial_json"]
        elif one["type"] == "message_delta":
            found |= one["delta"] | {name: value for name, value in one.items() if name not in ("type", "delta")}
    for index, text in arguments.items():
        found["content"][index]["input"] = json.loads(text)
    return found


def join_response(events: list[Any]) -> Any:
    """Return the response that the last event has, which the deltas must make."""
    assert [one["sequence_number"] for one in events] == [*range(len(events))]
    found, kinds = events[-1]["response"], ("response.output_text.delta", "response.function_call_arguments.delta")
    parts = [part for item in found["output"] for part in item.get("content", [item])]
    contents = [part["text"] if "text" in part else part["arguments"] for part in parts]
    assert "".join(one["delta"] for one in events if one["type"] in kinds) == "".join(contents)
    return found


FUNCTION = {"name": "weather", "description": "of a city", "parameters": CITY}
ENDPOINTS = {
    "/v1/completions": Endpoint({"prompt": TEXT}, "max_tokens", completion, join_chunks),
    "/v1/chat/completions": Endpoint(
        {"messages": CHAT}, "max_tokens", chat, join_chunks,
        {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}),
    "/v1/messages": Endpoint(
        {"messages": CHAT}, "max_tokens", message, join_message,
        {"tools": [{"name": "weather", "input_schema": CITY}], "tool_choice": {"type": "any"}}),
    "/v1/responses": Endpoint(
        {"input": TEXT}, "max_output_tokens", response, join_response,
        {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"}),
}  # fmt: skip


def ask(server: LiveServer, path: str, tokens: int = 24, **fields: Any) -> Read:
    endpoint = ENDPOINTS[path]
    body = {**endpoint.body, endpoint.limit: tokens, "temperature": 0, **fields}
    answer = httpx.post(server.url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return endpoint.whole(answer.json())


def stream(server: LiveServer, path: str, tokens: int = 24, **fields: Any) -> tuple[Read, int]:
    """Return the answer that a stream makes, and the number of its events."""
    endpoint = ENDPOINTS[path]
    body = {**endpoint.body, endpoint.limit: tokens, "temperature": 0, "stream": True, **fields}
    if endpoint.joined is join_chunks:
        body["stream_options"] = {"include_usage": True}
    with httpx.stream("POST", server.url + path, json=body, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert (lines[-1] == "[DONE]") is (endpoint.joined is join_chunks)
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    return endpoint.whole(endpoint.joined(events)), len(events)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_whole_and_streamed_answers_are_the_same_with_and_without_drafts(server: LiveServer, path: str) -> None:
    whole, (streamed, events), plain = ask(server, path), stream(server, path), ask(server, path, speculation=False)
    assert whole.text and whole[:3] == streamed[:3] == plain[:3] and events > 5
    assert whole.whole["stats"]["drafted"] > 0 == plain.whole["stats"]["drafted"]
    if path != "/v1/completions":
        assert whole[:3] == ask(server, "/v1/chat/completions")[:3]


@pytest.mark.parametrize("path", ENDPOINTS)
def test_what_was_drafted_is_told_whole_and_streamed(server: LiveServer, path: str) -> None:
    wish = {"speculation": {"provenance": True, "trace": True}}
    for found in (ask(server, path, **wish), stream(server, path, **wish)[0]):
        assert len(found.choice["provenance"]) == found.tokens
        assert sum(step["emitted"] for step in found.choice["trace"]) == found.tokens
        assert found.whole["stats"]["drafted"] >= found.whole["stats"]["accepted"] > 0
    plain = ask(server, path)
    assert not {"provenance", "trace"} & {*plain.choice}


@pytest.mark.parametrize("path", [path for path, endpoint in ENDPOINTS.items() if endpoint.tools])
def test_calls_are_valid_and_the_same_whole_and_streamed(server: LiveServer, path: str) -> None:
    tools = ENDPOINTS[path].tools or {}
    whole, (streamed, _) = ask(server, path, 160, **tools), stream(server, path, 160, **tools)
    assert whole.calls and whole[:3] == streamed[:3]
    name, arguments = whole.calls[0]
    assert name == "weather"
    jsonschema.validate(arguments, CITY)


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(("fields", "status"), [({"frog": 1}, 400), ({"model": "frog"}, 404)])
def test_errors_have_the_form_of_the_api_and_name_what_is_wrong(
    server: LiveServer, path: str, fields: dict[str, Any], status: int
) -> None:
    endpoint = ENDPOINTS[path]
    found = httpx.post(server.url + path, json={**endpoint.body, endpoint.limit: 2, **fields})
    said = found.json()
    assert found.status_code == status and "frog" in said["error"]["message"]
    assert {*said["error"]} == ({"type", "message"} if path == "/v1/messages" else {"message", "type", "param", "code"})
