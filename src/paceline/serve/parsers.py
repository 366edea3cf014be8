"""Tool calls in a model's text, by the family of its chat template.

The result depends on the text alone and never on the pieces in which it comes: a speculative step brings several
tokens at once, and a client must see the same calls. So text is kept until it is clear what it is: a call comes whole,
and text that turns out to be no call is content, in which further calls are looked for.
"""

from __future__ import annotations

import json
import re
from types import NoneType
from typing import Any, Literal

from pydantic_core import from_json

ParsedPiece = str | tuple[str, str]  # more content; or a call: name and arguments

# Before a call, and after it, where it is in no list:
# - Hermes, Qwen and SmolLM2, which writes a list in it: <tool_call>{"name": .., "arguments": {..}}</tool_call>
# - Llama 3, also at the beginning of an answer without the tag: <|python_tag|>{"name": .., "parameters": {..}}; {..}
# - Mistral: [TOOL_CALLS][{..}, {..}], [TOOL_CALLS]name{..} and [TOOL_CALLS]name[CALL_ID]id[ARGS]{..}
_FORMS = {"hermes": ("<tool_call>", "</tool_call>"), "llama3": ("<|python_tag|>", ";"), "mistral": ("[TOOL_CALLS]", "")}
FAMILIES = tuple(_FORMS)

_SPACE = " \t\r\n"
_NAMED = re.compile(r"([\w.-]+)(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?\s*", re.ASCII)
_MAY_BE_NAMED = re.compile(r"[\w.\[\]-]*\s*", re.ASCII)
_DECODER = json.JSONDecoder()


class _Broken(Exception):
    """Raised where the text is not a call."""


class ToolParser:
    """The content and the calls of one answer.

    Args:
        family: one of `FAMILIES`.
    """

    def __init__(self, family: str) -> None:
        self._family, (self._tag, self._close) = family, _FORMS[family]
        self._pieces: list[ParsedPiece] = []
        self._text = ""  # text that is not emitted yet, from where the next thing begins
        self._blank = ""  # white space that is dropped where a call follows
        self._called = False
        # The next state: content up to a tag; a call or a list; a call; what may follow one.
        self._stage: Literal["content", "open", "call", "after"] = "open" if family == "llama3" else "content"
        self._held = ""  # passed over since the tag or the last call; content, where no call follows
        self._in_list = False
        self._name: str | None = None  # of the call at hand, where it stands in front of its arguments

    def feed(self, text: str) -> list[ParsedPiece]:
        """Read more text and return the content and calls that it completes.

        Args:
            text: the next part of the answer.
        """
        self._text += text
        while self._step(last=False):
            pass
        return self._take()

    def end(self) -> list[ParsedPiece]:
        """Return what the end of the text completes; call it once, after the last `feed`."""
        while self._step(last=True):
            pass
        if not (self._called and self._held.strip() in ("", ",", ";")):
            self._say_content(self._held)
        if not self._called and self._blank:
            self._pieces.append(self._blank)
        return self._take()

    def _take(self) -> list[ParsedPiece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _say_content(self, text: str) -> None:
        """Add content, but for white space at its end, which waits."""
        text = self._blank + text
        solid = text.rstrip(_SPACE)
        self._blank = text[len(solid) :]
        if solid:
            self._pieces.append(solid)

    def _pass(self, count: int) -> None:
        self._held, self._text = self._held + self._text[:count], self._text[count:]

    # -- steps: each returns whether to continue, and raises _Broken where a call should stand and none does

    def _step(self, last: bool) -> bool:
        if self._stage == "content":
            return self._look_for_tag(last)
        self._pass(len(self._text) - len(self._text.lstrip(_SPACE)))
        if not self._text:
            return False
        try:
            return {"open": self._open, "call": self._call, "after": self._after}[self._stage](last)
        except _Broken:
            self._break_off()
            return True

    def _break_off(self) -> None:
        """Emit what was held back as content, and read on as content."""
        self._say_content(self._held)
        self._held, self._stage, self._in_list, self._name = "", "content", False, None

    def _look_for_tag(self, last: bool) -> bool:
        content, tag, rest = self._text.partition(self._tag)
        if not tag and not last:  # its beginning may stand at the end
            held_back = next(n for n in range(len(self._tag) - 1, -1, -1) if content.endswith(self._tag[:n]))
            content, rest = content[: len(content) - held_back], content[len(content) - held_back :]
        self._say_content(content)
        self._text = rest
        if tag:
            self._held, self._stage = tag, "open"
        return bool(tag)

    def _open(self, last: bool) -> bool:
        self._stage = "call"
        if self._text[0] == "[" and self._family != "llama3":
            self._in_list = True
            self._pass(1)
        elif self._text[0] != "{" and self._family == "mistral":
            head, brace, _ = self._text.partition("{")
            match = _NAMED.fullmatch(head)
            if not brace and not last and _MAY_BE_NAMED.fullmatch(head):
                self._stage = "open"
                return False
            if not brace or match is None:
                raise _Broken
            self._name = match[1]
            self._pass(len(head))
        return True

    def _call(self, last: bool) -> bool:
        text = self._text
        if text[0] == "]" and self._held.rstrip(_SPACE).endswith("["):  # no call, in SmolLM2's words
            self._pass(1)
            self._stage, self._in_list = "after", False
            return True
        if text[0] != "{":
            raise _Broken
        try:
            value, end = _DECODER.raw_decode(text)
            from_json(text[:end], allow_inf_nan=False)  # which is stricter
        except (ValueError, RecursionError):
            if last or not _may_go_on(text):
                raise _Broken from None
            return False
        name, arguments = (self._name, value) if self._name is not None else _read(value)
        self._called, self._held, self._blank = True, "", ""
        self._pieces.append((name, json.dumps(arguments, ensure_ascii=False)))
        self._text, self._stage, self._name = text[end:], "after", None
        return True

    def _after(self, last: bool) -> bool:
        for token in (",", "]") if self._in_list else (self._close,):
            if token and self._text.startswith(token):
                self._pass(len(token))
                self._stage = "call" if token in (",", ";") else "after" if token == "]" and self._close else "content"
                self._in_list = self._in_list and token == ","
                if self._stage != "call":
                    self._held = ""
                return True
            if token.startswith(self._text):  # it may come
                self._text = "" if last else self._text
                return False
        raise _Broken


def _read(call: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return name and arguments of a call."""
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = from_json(arguments or "{}", allow_inf_nan=False)
        except ValueError:
            raise _Broken from None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict | NoneType):
        raise _Broken
    return name, arguments or {}


def _may_go_on(text: str) -> bool:
    """Check that a text may be the beginning of an object."""
    try:
        from_json(text, allow_inf_nan=False, allow_partial=True)
    except ValueError:
        return False
    return True
