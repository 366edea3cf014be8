"""Generated functions, run against their tests."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from kit.run_code import body, passes
from kit.task_scores import score_task

BEFORE = 'def double(x):\n    """Twice x."""\n'
TESTS = "def check(f):\n    assert f(2) == 4 and f(-1) == -2\ncheck(double)"


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("    return 2 * x\n", True),
        ("    return x + 2\n", False),
        ("    return 2 * x\n\nprint(double(", True),  # what stands behind the function is not run
        ("    return (\n        2\n        * x\n)\n", True),
        ("    return 2 *\n", False),
        ("    while True: pass\n", False),
        ("    return [0] * 10**10\n", False),
        ("    import sys; sys.exit(0)\n", False),
        ("    import os; os._exit(0)\n", False),
        ("    open('big', 'w').write('x' * 2**21); return 2 * x\n", False),
        ("    return 2 * x # \ud800\n", True),
    ],
)
def test_a_function_is_run(answer: str, right: bool) -> None:
    assert passes(BEFORE, answer, TESTS, seconds=3) is right


def test_it_finds_no_environment_and_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    assert passes(BEFORE, "    import os; return 2 * x if 'SECRET' not in os.environ else 0\n", TESTS)


def running() -> bool:
    """Whether generated code runs."""
    commands = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            commands.append(file.read_bytes())
    return any(b'"answer", "exec"' in command for command in commands)


@pytest.mark.skipif(sys.platform != "linux", reason="it looks at /proc")
def test_what_it_leaves_running_is_killed() -> None:
    passes(BEFORE, "    import os, time\n    os.fork() or time.sleep(600)\n    return 2 * x\n", TESTS, seconds=3)
    deadline = time.monotonic() + 30  # those of other tests at the same time end within seconds, this one never would
    while running() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not running()


def test_the_body_ends_at_the_margin() -> None:
    assert body("    a\n\n    b\ndef other():\n    c") == "    a\n\n    b"
    assert body("    return [\n    1,\n]\nx") == "    return [\n    1,\n]"


def test_it_is_a_task() -> None:
    found = score_task("humaneval", ["    return x * 2\n", "    return x\n"], [(BEFORE, TESTS)] * 2)
    assert found == {"pass@1": 0.5}
