"""Conversations in a model's template, as OpenAI's clients write them."""

from __future__ import annotations

from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.engine.tokens import chat_ids
from paceline.serve.schemas import ChatRequest
from paceline.serve.texts import ServedTexts
from paceline.weights.source import load_tokenizer

ZOO = load_tokenizer(Path(__file__).parents[2] / "zoo" / "paceline-small")
USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": [1, "x"]}'}}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.a[1] }})"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def with_template(template: str) -> Any:
    made = copy(ZOO)
    made.chat_template = template
    return made


def text(messages: Any, template: str = TEMPLATE) -> str:
    tokenizer = with_template(template)
    ids, said = chat_ids(messages, tokenizer, "m")
    assert tokenizer.decode(ids) == said
    return said


PARTS_FORMS = {
    "text": ("{{ m.content }}", "a\nb"),
    "trimmed": ("{{ m['content'] | trim }}", "a\nb"),
    "joined": ("{{ '=' + m.content }}", "=a\nb"),
    "json": ("{{ m.content | tojson }}", '"a\\nb"'),
    "parts": (
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}[{{ p.text }}]{% endfor %}"
        "{% endif %}",
        "[a][b]",
    ),
    "one by one": (
        "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}",
        "ab",
    ),
}


@pytest.mark.parametrize("form", PARTS_FORMS)
def test_parts_of_text_are_as_the_template_has_them_offline_and_served(form: str):
    own, expected = PARTS_FORMS[form]
    template = TEMPLATE.replace("{{ m.content }}", own)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages: Any = [{"role": "user", "content": parts}]
    assert text(messages, template) == f"<user>{expected}<assistant>"
    described: Any = SimpleNamespace(tokenizer=ZOO._tokenizer.to_str(), chat_templates={}, special_tokens={})
    served = ServedTexts(described, template).conversation(ChatRequest(messages=messages))
    assert served == chat_ids(messages, with_template(template), "m")[0]


def test_developers_are_systems_where_the_template_knows_none():
    messages = [{"role": "developer", "content": "be"}, USER]
    assert text(messages) == "<system>be<user>hi<assistant>"
    assert text(messages, TEMPLATE + "{# developer #}") == "<developer>be<user>hi<assistant>"


def test_calls_of_tools_and_their_answers():
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "3"}]
    assert text(messages) == "<user>hi<assistant>add(x)<tool>3<assistant>"
    assert CALL["function"]["arguments"].startswith("{")  # type: ignore[index]  # the caller's own is as it was


@pytest.mark.parametrize(
    ("messages", "word"),
    [
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "reads text alone"),
        ([{"role": "user", "content": ["x"]}], "reads text alone"),
        ([{"role": "user", "content": None}], "a role and a text"),
        ([{"role": 3, "content": "x"}], "a role and a text"),
        (["x"], "a role and a text"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], "not JSON"),
        ([{"role": "assistant", "tool_calls": ["f"]}], "names no function"),
    ],
)
def test_what_a_conversation_cannot_have(messages: Any, word: str):
    with pytest.raises(ConfigError, match=word):
        chat_ids(messages, ZOO, "m")
