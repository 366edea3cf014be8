"""``/v1/responses`` by OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any, Literal

import httpx2 as httpx
import jsonschema
import openai
import pytest
from kits.server import LiveServer
from kits.tools import CITY
from pydantic import BaseModel

MODEL = "paceline-small"
TOOLS: list[Any] = [{"type": "function", "name": "weather", "description": "of a city", "parameters": CITY}]


def test_text_whole_and_streamed(client: openai.OpenAI) -> None:
    same: dict[str, Any] = {"model": MODEL, "max_output_tokens": 24, "temperature": 0}
    found = client.responses.create(**same, input="Tell me of the sea.", instructions="Be short.")
    parts: list[Any] = [{"role": "system", "content": "Be short."}]
    parts.append({"role": "user", "content": [{"type": "input_text", "text": "Tell me of the sea."}]})
    events = list(client.responses.create(**same, input=parts, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"
    ]  # fmt: skip
    assert kinds[-4:-1] == ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(deltas) == found.output_text and len(deltas) > 2
    assert events[-1].type == f"response.{found.status}" and events[-1].response.output_text == found.output_text


def test_the_client_reads_its_own_type(client: openai.OpenAI) -> None:
    class Answer(BaseModel):
        city: Literal["Paris", "Rome"]
        sure: bool

    found = client.responses.parse(model=MODEL, input="Where?", text_format=Answer, max_output_tokens=60)
    assert isinstance(found.output_parsed, Answer)


def test_calls_whole_streamed_and_answered(client: openai.OpenAI) -> None:
    same: dict[str, Any] = {"model": MODEL, "max_output_tokens": 120, "temperature": 0, "tools": TOOLS}
    same |= {"tool_choice": {"type": "function", "name": "weather"}, "parallel_tool_calls": False, "input": "Weather?"}
    found = client.responses.create(**same)
    [call] = found.output
    assert call.type == "function_call" and call.name == "weather"
    jsonschema.validate(json.loads(call.arguments), CITY)
    with client.responses.stream(**same) as stream:
        deltas = "".join(e.delta for e in stream if e.type == "response.function_call_arguments.delta")
        [again] = stream.get_final_response().output
    assert again.type == "function_call" and again.arguments == deltas == call.arguments
    said: list[Any] = [
        {"role": "user", "content": "Weather?"},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
    ]
    answer = client.responses.create(model=MODEL, input=said, tools=TOOLS, max_output_tokens=4)
    assert answer.usage is not None and found.usage is not None
    assert answer.usage.input_tokens > found.usage.input_tokens


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "what is kept": ({"input": "a", "store": True}, "keeps no answers"),
    "too long": ({"input": "a " * 5000}, "context"),
    "later": ({"input": "a", "background": True}, "keeps no answers"),
    "what is not there": ({"input": "a", "include": ["message.output_text.logprobs"]}, "include"),
    "an image": ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]}, "content"),
    "another's tool": ({"input": "a", "tools": [{"type": "web_search"}]}, "function"),
    "no schema": ({"input": "a", "text": {"format": {"type": "json_schema", "name": "a"}}}, "schema"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_a_400_in_words(server: LiveServer, case: str) -> None:
    body, words = WRONG[case]
    found = httpx.post(f"{server.url}/v1/responses", json=body)
    error = found.json()["error"]
    assert found.status_code == 400 and words in error["message"], found.text
    assert error["param"].startswith({"too long": "input", "no schema": "text.format"}.get(case, "")), found.text
