"""Tools: their form in the template, the grammar of the answer, and calls parsed from its text."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..core.outputs import Chunk
from .http import APIError
from .parsers import ParsedPiece, ToolParser
from .schemas import ChatRequest, Function
from .texts import ServedTexts

TAGS = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3": "<|python_tag|>"}  # in front of a call
ARGUMENTS = {"hermes": "arguments", "mistral": "arguments", "llama3": "parameters"}  # what a call names them


@dataclass(frozen=True)
class ToolUse:
    """The effect of a request's tools on its answer."""

    family: str  # how calls are written
    definitions: list[dict[str, Any]] | None  # what the template is given
    grammar: dict[str, str] | None = None  # fields of a `Grammar` that makes calls valid
    tag: str | None = None  # the tag, where it is a special token, whose text must stay in the answer
    named: bool = False  # the request names the function to call


def family_of(template: str) -> str | None:
    """Return the family of tool calls that a chat template writes; None: it has none."""
    if "tools" not in template:
        return None
    for family, tag in TAGS.items():
        if tag in template:
            return family
    return "llama3" if '"parameters"' in template else "hermes"


def tool_use(body: ChatRequest, texts: ServedTexts, parser: str) -> ToolUse | None:
    """Return the effect of a request's tools; None: it has none, or forbids their use.

    Args:
        parser: the family, or "auto": the template's.

    Raises:
        APIError: a choice without tools or of none of them, or a model without a template for them.
    """
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise APIError(400, "tool_choice needs tools: add them", "tool_choice", "invalid_value")
        return None
    if choice == "none":
        return None
    family = family_of(texts.template(tools=True)) if parser == "auto" else parser
    if family is None:
        message = "this model's chat template has no place for tools; start the server with --chat-template hermes"
        raise APIError(400, message, "tools", "unsupported_value")
    functions = {tool.function.name: tool.function for tool in body.tools}
    listed = [tool.model_dump(exclude_none=True) for tool in body.tools]
    tag = TAGS[family] if TAGS[family] in texts.special else None
    if choice is None or choice == "auto":
        strict = [one for one in functions.values() if one.strict]
        grammar = bound(family, strict, tag) if strict else None
        return ToolUse(family, listed, grammar, tag)
    usable, many = list(functions.values()), body.parallel_tool_calls is not False
    if not isinstance(choice, str):
        if choice.function.name not in functions:
            message = f"tool_choice names {choice.function.name!r}; the tools are {', '.join(functions)}"
            raise APIError(400, message, "tool_choice", "invalid_value")
        usable, many = [functions[choice.function.name]], False
    return ToolUse(family, listed, calls(family, usable, many, texts), tag, named=not isinstance(choice, str))


def calls(family: str, functions: list[Function], many: bool, texts: ServedTexts) -> dict[str, str]:
    """Return the grammar of an answer that is one call, or several."""
    schemas = [_call(family, function) for function in functions]
    compact = {"x-guidance": {"whitespace_flexible": False}}
    schema = json.dumps(compact | ({"anyOf": schemas} if len(schemas) > 1 else schemas[0]))
    tag = _literal(TAGS[family], texts)
    if family == "hermes":
        text = f'start: one{"+" if many else ""}\none: {tag} "\\n" call "\\n" {_literal("</tool_call>", texts)}'
    elif family == "mistral":
        others = '("," call)*' if many else ""
        text = f'start: {tag} "[" call {others} "]"'
    else:
        text = "start: call" + (' (";" call)*' if many else "")
    return {"kind": "lark", "text": f"{text}\ncall: %json {schema}"}


def _call(family: str, function: Function) -> dict[str, Any]:
    arguments = ARGUMENTS[family]
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, arguments: function.schema_of_arguments()},
        "required": ["name", arguments],
        "additionalProperties": False,
    }


def bound(family: str, strict: list[Function], special: str | None) -> dict[str, str]:
    """Return the grammar of free text in which calls of strict functions are valid."""
    if family != "hermes" or special is not None:
        message = f"strict tools under tool_choice auto, as the {family} form writes calls: use tool_choice required"
        raise APIError(400, message, "tools", "unsupported_value")
    structures = [
        {
            "begin": f'<tool_call>\n{{"name": {json.dumps(one.name)}, "arguments": ',
            "schema": one.schema_of_arguments(),
            "end": "}\n</tool_call>",
        }
        for one in strict
    ]
    return {"kind": "structural_tag", "text": json.dumps({"structures": structures, "triggers": ["<tool_call>"]})}


def _literal(text: str, texts: ServedTexts) -> str:
    """Return a text as a grammar writes it: a special token by its number."""
    return f"<[{texts.special[text]}]>" if text in texts.special else json.dumps(text)


class CallReader:
    """The content and the calls of one sample, as they come.

    Args:
        use: of the request; None: all is content.
    """

    def __init__(self, use: ToolUse | None) -> None:
        self.content = ""  # text that is not a call
        self.calls: list[dict[str, str]] = []  # id, name, arguments
        self.named = use is not None and use.named
        self._parser = None if use is None else ToolParser(use.family)

    def read(self, chunk: Chunk) -> Iterator[str | None]:
        """Yield more content as it is added; None: a call was added."""
        if self._parser is None:
            pieces: list[ParsedPiece] = [chunk.text] if chunk.text else []
        else:
            pieces = self._parser.feed(chunk.text)
            if chunk.finish_reason is not None:
                pieces += self._parser.end()
        for piece in pieces:
            if isinstance(piece, str):
                self.content += piece
                yield piece
            else:
                self.calls.append({"id": f"call_{secrets.token_hex(12)}", "name": piece[0], "arguments": piece[1]})
                yield None
