"""Tool calls in text: what is read depends on the text alone, wherever it is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.serve.parsers import FAMILIES, ToolParser

Call = tuple[str, str]


def read(family: str, pieces: list[str]) -> tuple[str, list[Call]]:
    """The content and the calls of a text that comes in pieces."""
    parser = ToolParser(family)
    said = [one for piece in pieces for one in parser.feed(piece)] + parser.end()
    return "".join(one for one in said if isinstance(one, str)), [one for one in said if not isinstance(one, str)]


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
values: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.floats(-9, 9, allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
names = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
calls_ = st.lists(st.tuples(names, st.dictionaries(texts, values, max_size=3)), min_size=1, max_size=3)
words = st.text(alphabet="ab .,<>{}[]\"':;\n\u00e4\U0001f600/|_tool", max_size=12)


def write(family: str, calls: list[tuple[str, Any]], ascii_: bool, indent: int | None) -> str:
    """A text that holds these calls, as a model of the family writes them."""
    key = "parameters" if family == "llama3" else "arguments"
    bodies = [json.dumps({"name": n, key: a}, ensure_ascii=ascii_, indent=indent) for n, a in calls]
    if family == "hermes":
        return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)
    return "; ".join(bodies) if family == "llama3" else f"[TOOL_CALLS][{', '.join(bodies)}]"


@pytest.mark.parametrize("family", FAMILIES)
@given(calls=calls_, ascii_=st.booleans(), indent=st.none() | st.just(2), before=st.booleans(), draw=st.data())
def test_calls_come_out_as_they_were_written_wherever_they_are_cut(
    family: str, calls: list[tuple[str, Any]], ascii_: bool, indent: int | None, before: bool, draw: st.DataObject
) -> None:
    content = "Let me look. " if before and family != "llama3" else ""
    text = content + write(family, calls, ascii_, indent)
    cuts = sorted(draw.draw(st.sets(st.integers(0, len(text)), max_size=8)) | {0, len(text)})
    pieces = [text[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    said, found = read(family, pieces)
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    assert said == content.rstrip()


@pytest.mark.parametrize("family", FAMILIES)
@given(
    parts=st.lists(
        words
        | st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                "[TOOL_CALLS]",
                "<|python_tag|>",
                '{"name": "f", "arguments": {"a": [1]}}',
                '{"name":',
                '{"name": "g", "parameters": {}}',
                "[",
                "]",
                "f{}",
                "g[ARGS]{",
                '"x"',
                "}",
                ";",
                "[CALL_ID]a1",
                '{"name": "h", "arguments": null}',
                '{"name": "h", "arguments": "{}"}',
            ]
        ),
        max_size=8,
    ),
    size=st.integers(1, 7),
)
@example(parts=['<tool_call>{"name": "f", "arguments": {"a": tru'], size=1)
@example(parts=['<tool_call>{"name": "f", "arguments": nullx}'], size=1)
def test_any_text_is_read_alike_wherever_it_is_cut(family: str, parts: list[str], size: int) -> None:
    text = "".join(parts)
    whole = read(family, [text])
    assert read(family, [*text]) == whole
    assert read(family, [text[i : i + size] for i in range(0, len(text), size)]) == whole
    if not whole[1] and "[]" not in "".join(text.split()):
        assert whole[0] == text  # nothing of a text without calls is lost


CASES: dict[str, tuple[str, str, str, list[Call]]] = {
    "a call in the middle": (
        "hermes",
        'Well. <tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call> Done.',
        "Well. Done.",
        [("f", '{"a": "</tool_call>"}')],
    ),
    "a list of calls": (
        "hermes",
        '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"b": 1}}]</tool_call>',
        "",
        [("f", "{}"), ("g", '{"b": 1}')],
    ),
    "arguments first": (
        "hermes",
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
        "",
        [("f", '{"a": 1}')],
    ),
    "no arguments": ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    "cut off": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": [1, 2',
        '<tool_call>{"name": "f", "arguments": {"a": [1, 2',
        [],
    ),
    "no call at all": ("hermes", "a <tool_call>not json</tool_call> b", "a <tool_call>not json</tool_call> b", []),
    "python tag": ("llama3", '<|python_tag|>{"name": "f", "parameters": {"x": 1}}', "", [("f", '{"x": 1}')]),
    "json that is no call": ("llama3", '{"a": 1}', '{"a": 1}', []),
    "names in front": ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}', "", [("f", '{"a": 1}')]),
    "names that follow each other": (
        "mistral",
        '[TOOL_CALLS]a[ARGS]{"x": 1}[TOOL_CALLS]b[ARGS]{}\n[TOOL_CALLS]c{}',
        "",
        [("a", '{"x": 1}'), ("b", "{}"), ("c", "{}")],
    ),
    "lists that follow each other": (
        "mistral",
        '[TOOL_CALLS][{"name": "a", "arguments": {}}][TOOL_CALLS] [{"name": "b", "arguments": {}, "id": "1"}] and',
        "and",
        [("a", "{}"), ("b", "{}")],
    ),
    "ids of calls": (
        "mistral",
        '[TOOL_CALLS]a[CALL_ID]x1[ARGS]{"x": 1}[TOOL_CALLS]b[CALL_ID]y2[ARGS]{}',
        "",
        [("a", '{"x": 1}'), ("b", "{}")],
    ),
    "python tags that follow each other": (
        "llama3",
        '<|python_tag|>{"name": "a", "parameters": {}}<|python_tag|>{"name": "b", "parameters": {"x": 1}}; ok',
        "; ok",
        [("a", "{}"), ("b", '{"x": 1}')],
    ),
    "behind a call that broke off": (
        "hermes",
        '<tool_call>{"name": "a", "arguments": {"x": 1 <tool_call>{"name": "b", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "a", "arguments": {"x": 1',
        [("b", "{}")],
    ),
    "behind what was no call": (
        "hermes",
        '<tool_call>{"name": <tool_call>\n{"name": "b", "arguments": {}}\n</tool_call>',
        '<tool_call>{"name":',
        [("b", "{}")],
    ),
    "no arguments in words": ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    "arguments as text": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("f", '{"a": 1}')],
    ),
    "other arguments": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "a"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "a"}</tool_call>',
        [],
    ),
    "no call in a list": ("hermes", "No. <tool_call>[]</tool_call>", "No.", []),
    "no call in a list at the end": ("hermes", "No. <tool_call>[]", "No. <tool_call>[]", []),
    "no call in a list that is cut": ("hermes", "<tool_call>\n[]</tool", "<tool_call> []</tool", []),
    "a closing tag that is cut": ("hermes", '<tool_call>\n{"name": "f"}\n</tool', "", [("f", "{}")]),
    "a list that is cut": ("mistral", '[TOOL_CALLS][{"name": "f"}, ', "", [("f", "{}")]),
    "calls that are cut": ("llama3", '{"name": "f"}; ', "", [("f", "{}")]),
    "braces at once": ("mistral", 'ok [TOOL_CALLS]f{"a": 1}', "ok", [("f", '{"a": 1}')]),
}


@pytest.mark.parametrize("case", CASES)
def test_cases(case: str) -> None:
    family, text, content, calls = CASES[case]
    for pieces in ([text], [*text]):
        said, found = read(family, pieces)
        assert (" ".join(said.split()), found) == (content, calls)
