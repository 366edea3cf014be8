"""Tool calls in a model's text, by the family of its chat template.

The result depends on the text alone and never on the pieces in which it comes: a speculative step brings several
tokens at once, and a client must see the same calls. So content streams up to where a call may begin; all after that is
read when the text is complete. Text that turns out to be no call is content, in which further calls are looked for.
"""

from __future__ import annotations

import json
import re
from types import NoneType
from typing import Any

from pydantic_core import from_json

ParsedPiece = str | tuple[str, str]  # more content; or a call: name and arguments

# Before a call, and after it, where it is in no list:
# - Hermes, Qwen and SmolLM2, which writes a list in it: <tool_call>{"name": .., "arguments": {..}}</tool_call>
# - Llama 3, also at the beginning of an answer without the tag: <|python_tag|>{"name": .., "parameters": {..}}; {..}
# - Mistral: [TOOL_CALLS][{..}, {..}], [TOOL_CALLS]name{..} and [TOOL_CALLS]name[CALL_ID]id[ARGS]{..}
_FORMS = {"hermes": ("<tool_call>", "</tool_call>"), "llama3": ("<|python_tag|>", ";"), "mistral": ("[TOOL_CALLS]", "")}
FAMILIES = tuple(_FORMS)

_SPACE = " \t\r\n"
_BLANK = re.compile(f"[{_SPACE}]*")
_NAMED = re.compile(r"([\w.-]+)(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?\s*(?=\{)", re.ASCII)
_DECODER = json.JSONDecoder()


class ToolParser:
    """The content and the calls of one answer.

    Args:
        family: one of `FAMILIES`.
    """

    def __init__(self, family: str) -> None:
        self._family, self._emitted = family, 0  # characters of content that were returned
        self._pieces, self._tail = list[str](), ""  # the whole text; what of it was not returned
        self._holds = False  # whether a call may have begun: all waits for the end

    def feed(self, text: str) -> list[ParsedPiece]:
        """Read the next part of the answer, and return the content that it adds in front of anything like a call."""
        self._pieces.append(text)
        if self._holds:
            return []
        self._tail += text
        tag = _FORMS[self._family][0]
        content, whole_tag, _ = self._tail.partition(tag)
        if not whole_tag:  # its beginning may stand at the end
            start = next(tag[:n] for n in range(len(tag) - 1, -1, -1) if content.endswith(tag[:n]))
            content = content.removesuffix(start)
        content = content.rstrip(_SPACE)  # white space is dropped where a call follows
        json_first = self._family == "llama3" and not self._emitted and content.lstrip(_SPACE)[:1] == "{"
        self._holds = bool(whole_tag) or json_first
        if json_first or not content:
            return []
        self._emitted, self._tail = self._emitted + len(content), self._tail[len(content) :]
        return [content]

    def end(self) -> list[ParsedPiece]:
        """Return the rest of the content, and the calls; call it once, after the last `feed`."""
        pieces = _parse(self._family, "".join(self._pieces))
        if self._emitted:
            pieces[0] = str(pieces[0])[self._emitted :]
        return [piece for piece in pieces if piece]


def _parse(family: str, text: str) -> list[ParsedPiece]:
    """Return content and calls of a whole text, in order."""
    tag, pieces, called, blank = _FORMS[family][0], list[ParsedPiece](), False, ""

    def add(content: str) -> None:
        """Add content, but for white space at its end, which waits."""
        nonlocal blank
        solid = (blank + content).rstrip(_SPACE)
        blank = (blank + content)[len(solid) :]
        pieces.extend([solid] if solid else [])

    rest, at = 0, -1 if family != "llama3" else 0  # where text that is not emitted begins; where a call may begin
    while True:
        if at >= 0:
            calls, rest, at = _calls(family, text, rest, at)
            if calls:
                pieces += calls
                called, blank = True, ""
            if at == len(text) and called and text[rest:].strip() in ("", ",", ";"):
                break
        start = text.find(tag, max(at, 0))
        add(text[rest : start if start >= 0 else len(text)])
        if start < 0:
            break
        rest, at = start, start + len(tag)
    return pieces if called or not blank else [*pieces, blank]


def _calls(family: str, text: str, rest: int, at: int) -> tuple[list[tuple[str, str]], int, int]:
    """Read calls, or a list of them.

    Args:
        rest: where the text begins that would be content if there is no call.
        at: where the first call may begin.

    Returns:
        The calls, and for the text after them ``rest`` and ``at``.
    """
    close, calls, name, listed = _FORMS[family][1], list[tuple[str, str]](), None, False
    at = _blank(text, at)
    if text[at : at + 1] == "[" and family != "llama3":
        listed, at = True, at + 1
    elif family == "mistral" and (match := _NAMED.match(text, at)) is not None:
        name, at = match[1], match.end()
    while True:
        at = _blank(text, at)
        if not (listed and not calls and text[at : at + 1] == "]"):  # else no call, in SmolLM2's words
            if text[at : at + 1] != "{":  # at once: an error of the decoder counts the lines before it
                return calls, rest, at
            try:
                value, end = _DECODER.raw_decode(text, at)
                from_json(text[at:end], allow_inf_nan=False)  # which is stricter
                called, arguments = (name, value) if name is not None else _read(value)
            except (ValueError, RecursionError):
                return calls, rest, at
            calls.append((called, json.dumps(arguments, ensure_ascii=False)))
            rest = at = end
        at = _blank(text, at)
        if listed and text[at : at + 1] == "]":
            listed, at = False, at + 1
            rest = at if calls else rest
            if not close:
                return calls, rest, at
            at = _blank(text, at)
        separator = "," if listed else close
        if not (separator and text.startswith(separator, at)):
            cut_off = calls and not listed and close.startswith(text[at : at + len(close) + 1])
            return (calls, len(text), len(text)) if cut_off else (calls, rest, at)
        at += len(separator)
        if separator not in (",", ";"):
            return calls, at, at


def _blank(text: str, at: int) -> int:
    """Return where white space ends."""
    match = _BLANK.match(text, at)
    return at if match is None else match.end()


def _read(call: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return name and arguments of a call; raises ValueError where it is none."""
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        arguments = from_json(arguments or "{}", allow_inf_nan=False)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict | NoneType):
        raise ValueError("it is not a call")
    return name, arguments or {}
