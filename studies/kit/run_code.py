"""Whether a generated Python function passes its tests, run in a process of its own.

Nobody has read what runs here. It gets an empty folder, an empty environment, limits on time, memory and the size of
files; on Linux as root a network without interfaces, as anybody else no second process. What it leaves running is
killed. That stops accidents, not an attacker: whoever scores a model that he does not trust does it in a container.

Source: Chen et al. 2021 (HumanEval), section 2.1: functional correctness; pass@1 of one greedy answer, which ends at
the first line that is no part of the function.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from tempfile import TemporaryDirectory, TemporaryFile

SECONDS = 5
MEMORY = 2**30  # bytes of addresses
# A line at the left margin ends the function that the prompt began, unless it closes a bracket.
_NEXT = re.compile(r"\n(?=[^\s)\]}])")
_LIMITED = f"""
import os, resource, sys
for what, most in ((resource.RLIMIT_CPU, {SECONDS}), (resource.RLIMIT_AS, {MEMORY}), (resource.RLIMIT_FSIZE, 2**20),
                   (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NPROC, 1)):
    resource.setrlimit(what, (most, most))
exec(compile(sys.stdin.read(), "answer", "exec"), {{"__name__": "answer"}})
print("passed")
"""


def body(answer: str) -> str:
    """The part of a continuation that belongs to the function it continues."""
    return _NEXT.split(answer, maxsplit=1)[0]


def passes(before: str, answer: str, tests: str, seconds: float = SECONDS) -> bool:
    """Whether the text before an answer, the answer's function and the tests behind it run to their end.

    Args:
        before: imports, signature and docstring.
        answer: the continuation; what stands behind the function is not run.
        tests: code that raises where the function is wrong.
        seconds: of the clock.
    """
    program = f"{before}{body(answer)}\n{tests}\n"
    apart = ["unshare", "--net"] if sys.platform == "linux" and os.geteuid() == 0 else []
    with TemporaryDirectory() as folder, TemporaryFile() as given, TemporaryFile() as said:
        given.write(program.encode("utf-8", "replace"))
        given.seek(0)
        command = [*apart, sys.executable, "-I", "-c", _LIMITED]
        running = subprocess.Popen(
            command, stdin=given, stdout=said, stderr=subprocess.DEVNULL, cwd=folder, env={}, start_new_session=True
        )
        try:
            ended = running.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            ended = False
        with suppress(ProcessLookupError):  # none of it is left
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()
        said.seek(0)
        return ended and said.read().endswith(b"passed\n")
