"""Tool calls in a model's text, by the family of its chat template.

A parser reads one character after the other, so that what it says depends on the text alone and never on the pieces in
which the text comes: a speculative step brings several tokens at once, and a client must see the same calls.

Text that turns out to be no call is content. A call that has begun is never taken back: where its arguments break off,
they stay as far as they are JSON, and the rest is content.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from typing import Literal

MOST_DEPTH = 64  # of objects and arrays in arguments
_SPACE = " \t\r\n"
_DIGITS = "0123456789"
_WORDS = {"t": "true", "f": "false", "n": "null"}
_ESCAPES = '"\\/bfnrtu'
_HEXADECIMAL = "0123456789abcdefABCDEF"
_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
_OPEN, _CLOSE, _PYTHON, _CALLS, _ARGS = "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"

Reading = Generator[None, str, None]
Kind = Literal["content", "name", "arguments"]
ParsedPiece = tuple[Kind, str]  # more content; a call's name, with which it begins; more of the last call's arguments


class _Broken(Exception):
    """The character at hand is not what has to stand there."""


class ToolParser:
    """The content and the calls of one answer.

    Args:
        family: one of `FAMILIES`.
    """

    def __init__(self, family: str) -> None:
        self._pieces: list[ParsedPiece] = []
        self._char = ""  # the one at hand; "": the text is over
        self._raw = ""  # since a call may have begun, the character at hand included; given back if it is none
        self._blank = ""  # white space that is dropped where a call follows
        self._sink: list[str] | None = None  # gets the characters that are passed over
        self._first = ""  # while content is read and nothing is held back: how a tag begins
        self._called = False
        self._reading = _READINGS[family](self)
        next(self._reading)

    def feed(self, text: str) -> list[ParsedPiece]:
        """What more text says.

        Args:
            text: what comes next; any part of the answer.
        """
        if self._first and self._first not in text:
            self._content(text)
        else:
            for char in text:
                self._reading.send(char)
        return self._take()

    def end(self) -> list[ParsedPiece]:
        """What the end of the text says. Call it once, after the last `feed`."""
        with suppress(StopIteration):
            self._reading.send("")
        if not self._called:
            self._say("content", self._blank)
        return self._take()

    def _take(self) -> list[ParsedPiece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _say(self, kind: Kind, text: str) -> None:
        if text and self._pieces and kind != "name" and self._pieces[-1][0] == kind:
            self._pieces[-1] = kind, self._pieces[-1][1] + text
        elif text:
            self._pieces.append((kind, text))

    def _content(self, text: str) -> None:
        """Content, but for white space at its end, which waits."""
        text = self._blank + text
        solid = text.rstrip(_SPACE)
        self._blank = text[len(solid) :]
        self._say("content", solid)

    # -- characters

    def _next(self) -> Reading:
        """Pass over the character at hand."""
        if self._sink is not None:
            self._sink.append(self._char)
        if self._sink is None and self._streams:
            self._say("arguments", self._char)
        self._char = yield
        self._raw += self._char

    _streams = False  # whether what is passed over is the last call's arguments

    def _expect(self, text: str) -> Reading:
        for char in text:
            if self._char != char:
                raise _Broken
            yield from self._next()

    def _space(self) -> Reading:
        while self._char and self._char in _SPACE:
            yield from self._next()

    def _until(self, tag: str) -> Generator[None, str, bool]:
        """Read content; whether ``tag`` has come, whose last character is then at hand."""
        held = ""
        while True:
            self._first = "" if held else tag[0]
            self._char = yield
            self._first = ""
            if not self._char:
                self._content(held)
                return False
            if not tag.startswith(held + self._char):
                self._content(held)
                held = ""
            if tag.startswith(held + self._char):
                held += self._char
            else:
                self._content(self._char)
            if held == tag:
                self._raw = tag
                return True

    # -- JSON (RFC 8259)

    def _value(self, depth: int = 0) -> Reading:
        char = self._char
        if depth > MOST_DEPTH:
            raise _Broken
        if char == '"':
            yield from self._string()
        elif char == "{":
            yield from self._object(depth)
        elif char == "[":
            yield from self._members("]", lambda: self._value(depth + 1))
            yield from self._next()
        elif char in _WORDS:
            yield from self._expect(_WORDS[char])
        else:
            yield from self._number()

    def _object(self, depth: int) -> Reading:
        yield from self._members("}", lambda: self._pair(depth))
        yield from self._next()

    def _pair(self, depth: int) -> Reading:
        yield from self._string()
        yield from self._colon()
        yield from self._value(depth + 1)

    def _colon(self) -> Reading:
        yield from self._space()
        yield from self._expect(":")
        yield from self._space()

    def _members(self, end: str, member: Callable[[], Reading]) -> Reading:
        """Members with commas between, behind the bracket at hand; afterwards ``end`` is at hand."""
        yield from self._next()
        yield from self._space()
        while self._char != end:
            yield from member()
            yield from self._space()
            if self._char != end:
                yield from self._expect(",")
                yield from self._space()
                if self._char == end:
                    raise _Broken

    def _string(self) -> Reading:
        yield from self._expect('"')
        while self._char != '"':
            if not self._char or self._char < " ":
                raise _Broken
            escaped = self._char == "\\"
            yield from self._next()
            if escaped:
                digits = 4 if self._char == "u" else 0
                yield from self._one_of(_ESCAPES)
                for _ in range(digits):
                    yield from self._one_of(_HEXADECIMAL)
        yield from self._next()

    def _one_of(self, allowed: str) -> Reading:
        """Pass over the character at hand, which must be one of these."""
        if not self._char or self._char not in allowed:
            raise _Broken
        yield from self._next()

    def _number(self) -> Reading:
        if self._char == "-":
            yield from self._next()
        if self._char == "0":
            yield from self._next()
        else:
            yield from self._digits()
        if self._char == ".":
            yield from self._next()
            yield from self._digits()
        if self._char and self._char in "eE":
            yield from self._next()
            if self._char and self._char in "+-":
                yield from self._next()
            yield from self._digits()

    def _digits(self) -> Reading:
        yield from self._one_of(_DIGITS)
        while self._char and self._char in _DIGITS:
            yield from self._next()

    # -- calls

    def _begin(self, name: str) -> None:
        self._called, self._raw, self._blank = True, self._char, ""
        self._say("name", name)

    def _arguments(self) -> Reading:
        """An object, said as it comes."""
        if self._char != "{":
            raise _Broken
        self._streams = True
        try:
            yield from self._object(0)
        finally:
            self._streams = False
            self._raw = self._char

    def _kept(self, reading: Reading) -> Generator[None, str, str]:
        """What a part of the text is."""
        kept = self._sink = []
        try:
            yield from reading
        finally:
            self._sink = None
        return "".join(kept)

    def _call(self) -> Reading:
        """``{"name": .., "arguments": {..}}``; the keys in any order, others passed over."""
        name: str | None = None
        early: str | None = None  # arguments in front of the name
        begun = False

        def field() -> Reading:
            nonlocal name, early, begun
            key = json.loads((yield from self._kept(self._string())))
            yield from self._colon()
            if key == "name" and name is None:
                name = json.loads((yield from self._kept(self._string())))
                if not name:
                    raise _Broken
                if early is not None:
                    begun = True
                    self._begin(name)
                    self._say("arguments", early)
            elif key in ("arguments", "parameters") and early is None and not begun:
                if name is not None:
                    begun = True
                    self._begin(name)
                    yield from self._arguments()
                elif self._char == "{":
                    early = yield from self._kept(self._object(0))
                else:
                    raise _Broken
            else:
                yield from self._value(1)

        if self._char != "{":
            raise _Broken
        yield from self._members("}", field)
        if name is None:
            raise _Broken
        if not begun:
            self._begin(name)
            self._say("arguments", "{}")
        yield from self._next()
        self._raw = self._char

    def _calls(self) -> Reading:
        """One call, or a list of them."""
        if self._char != "[":
            yield from self._call()
            return
        yield from self._members("]", self._call)
        yield from self._next()
        self._raw = self._char

    def _give_back(self) -> None:
        """What was held back is no call: it is content, but for the beginning of what ends a call or parts two of them,
        where the text is over."""
        text = self._raw.strip()
        if self._char or not self._called or not (_CLOSE.startswith(text) or text in (",", ";")):
            self._content(self._raw)
        self._raw = ""

    # -- families

    def hermes(self) -> Reading:
        """``<tool_call>{..}</tool_call>``, of Hermes, Qwen and SmolLM2, which writes a list of calls in it."""
        while (yield from self._until(_OPEN)):
            try:
                yield from self._next()
                yield from self._space()
                yield from self._calls()
                yield from self._space()
                for char in _CLOSE[:-1]:
                    yield from self._expect(char)
                if self._char != _CLOSE[-1]:
                    raise _Broken
            except _Broken:
                self._give_back()

    def llama3(self) -> Reading:
        """``{"name": .., "parameters": {..}}``, several with ``;`` between, where an answer or what follows
        ``<|python_tag|>`` begins."""
        self._char = yield
        self._raw = self._char
        while True:
            try:
                yield from self._space()
                if self._char == "<":
                    yield from self._expect(_PYTHON)
                    yield from self._space()
                yield from self._call()
                while True:
                    yield from self._space()
                    if self._char != ";":
                        break
                    yield from self._next()
                    yield from self._space()
                    yield from self._call()
                raise _Broken
            except _Broken:
                self._give_back()
            if not self._char or not (yield from self._until(_PYTHON)):
                return
            yield from self._next()

    def mistral(self) -> Reading:
        """``[TOOL_CALLS]`` before a list of calls, or before ``name{..}`` and ``name[ARGS]{..}``."""
        while (yield from self._until(_CALLS)):
            try:
                yield from self._next()
                yield from self._space()
                if self._char == "[":
                    yield from self._calls()
                else:
                    yield from self._named()
                raise _Broken
            except _Broken:
                self._give_back()

    def _named(self) -> Reading:
        name = ""
        while self._char in _NAME:
            name += self._char
            yield from self._next()
        if not name:
            raise _Broken
        if self._char == _ARGS[0]:
            yield from self._expect(_ARGS)
        if self._char != "{":
            raise _Broken
        self._begin(name)
        yield from self._arguments()


_READINGS: Mapping[str, Callable[[ToolParser], Reading]] = {
    "hermes": ToolParser.hermes,
    "llama3": ToolParser.llama3,
    "mistral": ToolParser.mistral,
}
FAMILIES = tuple(_READINGS)
