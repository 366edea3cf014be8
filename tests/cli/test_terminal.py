"""`paceline chat` in a terminal of 80 columns: pasted text, history, Ctrl-C."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

import pytest

WAIT_S = 120.0
CHAT = (sys.executable, "-m", "paceline", "chat", "--model", "paceline-small", "--drafter", "none")


class Terminal:
    """A command in a terminal of its own.

    Args:
        command: its words.
    """

    def __init__(self, *command: str) -> None:
        self._end, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        environment = {**os.environ, "TERM": "xterm"} | {name: "" for name in ("NO_COLOR", "COLUMNS", "INPUTRC")}
        self.process = subprocess.Popen(
            command, stdin=inner, stdout=inner, stderr=inner, env=environment, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(inner)

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self._end, text.encode())

    def until(self, words: str) -> str:
        """Return what is written up to these words."""
        text, end = "", time.monotonic() + WAIT_S
        while words not in text:
            assert time.monotonic() < end, f"{words!r} is not in {text!r}"
            if select.select([self._end], [], [], 1.0)[0]:
                text += os.read(self._end, 4096).decode(errors="replace").replace("\r\n", "\n")
        return text

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        os.close(self._end)


@pytest.fixture
def chat() -> Iterator[Terminal]:
    made = Terminal(*CHAT, "--max-tokens", "1800", "--ignore-eos")
    yield made
    made.close()


def test_pasted_lines_are_one_turn_and_ctrl_c_stops_with_figures(chat: Terminal) -> None:
    begin = chat.until("> ")
    assert "\x1b[32m■ drafted and accepted\x1b[0m   ■ the target's own" in begin  # in the terminal's own colour
    assert re.search(r"sets the system *\nprompt, /as", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", begin))  # no word is cut
    chat.type("\x1b[200~one two\nthree four\x1b[201~")
    chat.until("three four")
    chat.type("\r")
    chat.until("\n")
    for _ in range(8):
        chat.until(" ")  # the answer has several tokens
    chat.type("\x03")
    answer = chat.until("> ")
    assert answer.count("(stopped)") == answer.count(" tokens/s, 1.00 tokens a pass, prompt ") == 1
    chat.type("\x1b[A")
    assert re.search(r"one two\s+three four", chat.until("three four"))  # the whole turn comes back
    chat.type("\x15/exit\r")
    assert chat.process.wait(WAIT_S) == 0
