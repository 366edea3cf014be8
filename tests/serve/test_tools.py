"""Tools over HTTP by OpenAI's own client: the model is small and knows none, so calls come from grammars."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import jsonschema
import openai
import pytest
from kits.server import LiveServer, live_server
from kits.tools import CITY, TEMPLATE

from paceline import LLM
from paceline.core.grammar import Grammar
from paceline.serve.schemas import Function
from paceline.serve.tools import bound, family_of

MODEL = "paceline-small"
ASK: list[Any] = [{"role": "user", "content": "Weather in Paris?"}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {"weather": CITY, "now": {"type": "object", "maxProperties": 0}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    template = tmp_path_factory.mktemp("templates") / "tools.jinja"
    template.write_text(TEMPLATE)
    with live_server("--chat-template", str(template)) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[str | None, list[tuple[str, str]], str | None]:
    """Content, calls and finish reason of a stream."""
    content, calls, ids, reason = "", list[list[str]](), list[str](), None
    for chunk in client.chat.completions.create(model=MODEL, messages=ASK, tools=TOOLS, stream=True, **fields):
        [choice] = chunk.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            assert call.function is not None
            if call.index == len(calls):
                assert call.id and call.type == "function" and call.function.name
                ids.append(call.id)
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments or ""
        reason = choice.finish_reason or reason
    assert len({*ids}) == len(ids)
    return content or None, [(name, arguments) for name, arguments in calls], reason


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_calls_that_must_be_are_valid_whole_and_streamed(
    client: openai.OpenAI, choice: Any, temperature: float
) -> None:
    for seed in range(3):
        same: dict[str, Any] = {"seed": seed, "temperature": temperature, "max_tokens": 120, "tool_choice": choice}
        same["parallel_tool_calls"] = False
        found = client.chat.completions.create(model=MODEL, messages=ASK, tools=TOOLS, **same).choices[0]
        assert found.message.tool_calls is not None and found.message.content is None
        [call] = found.message.tool_calls
        assert call.type == "function"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
        named = not isinstance(choice, str)
        assert call.function.name == "weather" or not named
        assert found.finish_reason == ("stop" if named else "tool_calls")
        expected = [(call.function.name, call.function.arguments)]
        assert streamed(client, **same) == (None, expected, found.finish_reason)
        alone = client.chat.completions.create(
            model=MODEL, messages=ASK, tools=TOOLS, **same, extra_body={"speculation": False}
        )
        [other] = alone.choices[0].message.tool_calls or []
        assert other.type == "function" and other.function == call.function


def test_several_calls(client: openai.OpenAI) -> None:
    """A bias against the end makes more than one."""
    found = client.chat.completions.create(
        model=MODEL, messages=ASK, tools=TOOLS, tool_choice="required", seed=1, max_tokens=200,
        logit_bias={"1": -100, "2": -100},
    )  # fmt: skip
    calls = found.choices[0].message.tool_calls or []
    assert len(calls) > 1
    for call in calls[:-1]:
        assert call.type == "function"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def test_an_answer_without_calls_is_content(client: openai.OpenAI) -> None:
    same: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
    found = client.chat.completions.create(model=MODEL, messages=ASK, tools=TOOLS, **same).choices[0]
    assert found.message.tool_calls is None and found.message.content and found.finish_reason in ("stop", "length")
    content, calls, _ = streamed(client, **same)
    assert (content, calls) == (found.message.content, [])


def test_the_template_is_told_of_tools_and_of_calls(client: openai.OpenAI) -> None:
    said: list[Any] = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]  # fmt: skip

    def tokens(**fields: Any) -> int:
        found = client.chat.completions.create(model=MODEL, max_tokens=1, **fields)
        assert found.usage is not None
        return found.usage.prompt_tokens

    assert tokens(messages=ASK, tools=TOOLS) > tokens(messages=ASK) + 20
    assert tokens(messages=ASK, tools=TOOLS, tool_choice="none") == tokens(messages=ASK)
    assert tokens(messages=said, tools=TOOLS) > tokens(messages=ASK, tools=TOOLS) + 10


def test_strict_tools_bind_what_the_model_calls_of_its_own_will() -> None:
    llm = LLM(MODEL)
    assert llm.engine.grammars is not None
    function = Function(name="weather", parameters=CITY, strict=True)
    matcher = llm.engine.grammars.matcher(Grammar(**bound("hermes", [function], None)))  # type: ignore[arg-type]

    def allows(arguments: str, name: str = "weather") -> bool:
        text = f'Well. <tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call> Done.'
        return matcher.within([], [llm.tokenizer.encode(text, add_special_tokens=False)])[0]

    assert allows('{"city":"Paris","days":3}')
    assert not allows('{"city":"Oslo","days":3}') and not allows("{}") and not allows('{"city":"Paris","days":3}', "no")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no tools": ({"tool_choice": "required"}, "needs tools"),
    "no such tool": ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "weather, now"),
    "two grammars": (
        {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
        "give one",
    ),
    "a bad schema": (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "frog"}}}],
         "tool_choice": "required"}, "frog",
    ),
    "a bad name": ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name"),
    "a call that is no JSON": (
        {"messages": [*ASK, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "no JSON",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_meant_is_a_400_in_words(server: LiveServer, case: str) -> None:
    fields, words = WRONG[case]
    found = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": ASK, "max_tokens": 4, **fields})
    assert found.status_code == 400 and words in found.json()["error"]["message"], found.text


def test_a_template_that_cannot_be_read_is_said_at_once(tmp_path: Path) -> None:
    from paceline.core.errors import ConfigError
    from paceline.serve.config import ServeConfig

    with pytest.raises(ConfigError, match="--chat-template"):
        ServeConfig(chat_template=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="hermes"):
        ServeConfig(tool_parser="frog")


def test_families_by_their_templates() -> None:
    assert family_of(TEMPLATE) == "hermes" and family_of("{{ messages }}") is None
    assert family_of("{{ tools }} [TOOL_CALLS]") == "mistral"
    assert family_of("{{ tools }} <|python_tag|>") == family_of('{{ tools }} {"name": n, "parameters": p}') == "llama3"
