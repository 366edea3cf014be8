"""What the commands share on the terminal: colours, the legend, figures and waiting.

Answers go to stdout, everything else to stderr, so that a pipe gets the answer alone.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from ..core.errors import ConfigError

STYLES = {"drafted": "green", "target": ""}  # by a token's origin; "": the terminal's own colour
LINE_EVERY_S = 20.0  # between two lines of progress where no terminal shows one that changes
PIPE_WIDTH = 160  # columns of a table that no terminal limits: rich would take 80 and cut the figures


def stdout(color: bool = True) -> Console:
    """Return the console for answers; ``NO_COLOR``, a pipe and ``color=False`` all mean plain text."""
    console = Console(no_color=True if not color else None, highlight=False, soft_wrap=True)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_WIDTH
    return console


def stderr() -> Console:
    """Return the console for errors, progress and figures."""
    return Console(stderr=True, highlight=False)


def note(text: str) -> None:
    """Print a dim line on stderr: figures and remarks, wrapped between words on a terminal."""
    console = stderr()
    console.print(text, style="dim", markup=False, soft_wrap=not console.is_terminal)


def this_command() -> str:
    """Return the command line of this process; running it again continues where it stopped."""
    return shlex.join(["paceline", *sys.argv[1:]])


def coloured(console: Console) -> bool:
    """Return whether the output shows colours."""
    return console.is_terminal and not console.no_color


def legend() -> Text:
    """Return one line that explains the colours."""
    return Text.assemble(("■ drafted and accepted", STYLES["drafted"]), "   ■ the target's own")


class Painter:
    """Gives an answer's text the colours of its tokens.

    The answer's text is the engine's (stop strings cut, their possible starts held back), the colours
    are the tokens': pieces of text are queued as tokens arrive and used up as text is shown.
    """

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        from ..engine.tokens import texts_of  # here: listing the commands must not load the engine

        texts = texts_of(tokenizer)
        if texts is None:
            raise ConfigError("coloured text", "the model has no tokenizer, so there is no text", "add --json")
        self._stream = texts.stream(prompt_ids, skip_special_tokens)
        self._pieces: deque[tuple[int, str]] = deque()  # characters still to show, their origin
        self._last = "target"

    def feed(self, token_ids: Sequence[int], origins: Sequence[str]) -> None:
        """Queue new tokens. A character of several tokens belongs to the one that completes it."""
        for token, origin in zip(token_ids, origins, strict=True):
            piece = self._stream.push(token)
            if piece:
                self._pieces.append((len(piece), origin))

    def take(self, text: str) -> Text:
        """Print the next part of the answer, in colour."""
        painted, start = Text(), 0
        while start < len(text):
            length, self._last = self._pieces.popleft() if self._pieces else (len(text), self._last)
            painted.append(text[start : start + length], style=STYLES[self._last])
            if start + length > len(text):
                self._pieces.appendleft((start + length - len(text), self._last))
            start += length
        return painted


class ProgressLine:
    """One line on stderr that changes while something takes long; where that is not a terminal, a line now and then.

    Args:
        text: is shown first; empty: nothing is, until `show`.
    """

    def __init__(self, text: str = "") -> None:
        self.console, self.last = stderr(), time.monotonic()
        self.status = self.console.status("") if self.console.is_terminal else None
        if text:
            self.show(text)

    def show(self, text: str) -> None:
        """Show the progress."""
        if self.status is not None:
            self.status.start()
            self.status.update(Text(text))
        elif time.monotonic() - self.last > LINE_EVERY_S:
            self.last = time.monotonic()
            note(text)

    def counting(self, what: str, total: int) -> Callable[[int], None]:
        """Return a function that shows how many of so many are done."""
        return lambda done: self.show(f"{what}: {done} of {total}")

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self.status is not None:
            self.status.stop()
