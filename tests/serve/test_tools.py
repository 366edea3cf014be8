"""Tools over HTTP by OpenAI's own client: the model is small and knows none, so calls come from grammars."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2 as httpx
import jsonschema
import openai
import pytest
from kits.server import LiveServer
from kits.tools import CITY

from paceline import LLM
from paceline.core.grammar import Grammar
from paceline.serve.config import ServeConfig
from paceline.serve.parsers import FAMILIES, ToolParser
from paceline.serve.schemas import Function
from paceline.serve.texts import renderer
from paceline.serve.tools import bound, family_of

MODEL = "paceline-small"
ASK: list[Any] = [{"role": "user", "content": "Weather in Paris?"}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {"weather": CITY, "now": {"type": "object", "maxProperties": 0}}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_calls_that_must_be_are_valid(client: openai.OpenAI, choice: Any) -> None:
    same: dict[str, Any] = {"model": MODEL, "messages": ASK, "tools": TOOLS, "max_tokens": 120, "tool_choice": choice}
    for seed in range(2):
        found = client.chat.completions.create(
            **same, seed=seed, temperature=float(seed), parallel_tool_calls=False
        ).choices[0]
        assert found.message.tool_calls is not None and found.message.content is None
        [call] = found.message.tool_calls
        assert call.type == "function"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
        named = not isinstance(choice, str)
        assert call.function.name == "weather" or not named
        assert found.finish_reason == ("stop" if named else "tool_calls")


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


def test_a_call_whose_closing_tag_is_cut_leaves_no_content(client: openai.OpenAI) -> None:
    same: dict[str, Any] = {"model": MODEL, "messages": ASK, "tools": TOOLS, "temperature": 0}
    same["tool_choice"] = {"type": "function", "function": {"name": "weather"}}
    whole = client.chat.completions.create(**same, max_tokens=120)
    assert whole.usage is not None and whole.choices[0].finish_reason == "stop"
    for fewer in range(1, 8):
        cut = client.chat.completions.create(**same, max_tokens=whole.usage.completion_tokens - fewer).choices[0]
        assert (cut.finish_reason, cut.message.content) == ("length", None)
        assert cut.message.tool_calls


def test_strict_tools_bind_what_the_model_calls_of_its_own_will() -> None:
    llm = LLM(MODEL)
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
        "not valid JSON",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_meant_is_a_400_in_words(server: LiveServer, case: str) -> None:
    fields, words = WRONG[case]
    found = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": ASK, "max_tokens": 4, **fields})
    assert found.status_code == 400 and words in found.json()["error"]["message"], found.text


def test_a_template_that_cannot_be_read_is_said_at_once(tmp_path: Path) -> None:
    from paceline.core.errors import ConfigError

    with pytest.raises(ConfigError, match="--chat-template .* one of: hermes, llama3, mistral"):
        ServeConfig(chat_template=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="hermes"):
        ServeConfig(tool_parser="frog")
    (tmp_path / "template.jinja").write_bytes(b"\xef\xbb\xbf{{ messages }} \xc3\xa9")  # as some editors write UTF-8
    assert ServeConfig(chat_template=str(tmp_path / "template.jinja")).template() == "{{ messages }} \u00e9"


TALK: list[Any] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [
        {"id": f"call_0123456789{day}", "function": {"name": "weather", "arguments": {"city": "K\u00f6ln", "day": day}}}
        for day in (1, 2)]},
    {"role": "tool", "tool_call_id": "call_01234567891", "content": "rain"},
    {"role": "tool", "tool_call_id": "call_01234567892", "content": "sun"},
    {"role": "assistant", "content": "Rain, sun."},
    {"role": "user", "content": "Thanks."},
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shipped_templates_write_what_their_family_reads(family: str) -> None:
    template = ServeConfig(chat_template=family).template() or ""

    def written(tools: list[Any] | None) -> str:
        made: Any = renderer()(
            conversations=[TALK], tools=tools, chat_template=template, add_generation_prompt=True,
            continue_final_message=False, bos_token="<s>", eos_token="</s>",
        )  # fmt: skip
        return str(made[0][0])

    assert family_of(template) == family
    text, results = written(None), ("Weather?", "rain", "sun", "Rain, sun.", "Thanks.")
    begin = min(text.index(mark) for mark in ("<tool_call>", "[TOOL_CALLS]", '{"name"') if mark in text)
    end = min(text.index(mark, begin) for mark in ("<|eot_id|>", "<|im_end|>", "</s>") if mark in text)
    parser = ToolParser(family)
    calls = [one for one in parser.feed(text[begin:end]) + parser.end() if not isinstance(one, str)]
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [
        ("weather", {"city": "K\u00f6ln", "day": day}) for day in (1, 2)
    ]
    places = [text.index(word) for word in results]
    assert places == sorted(places) and "Be short." in text and "K\u00f6ln" in text
    assert len(text) + 100 < len(told := written(TOOLS)) and '"weather"' in told and '"now"' in told


def test_families_by_their_templates() -> None:
    assert family_of("{{ messages }}") is None
    assert family_of("{{ tools }} [TOOL_CALLS]") == "mistral"
    assert family_of("{{ tools }} <|python_tag|>") == family_of('{{ tools }} {"name": n, "parameters": p}') == "llama3"
