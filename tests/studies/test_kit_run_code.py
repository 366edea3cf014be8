"""Generated functions, run against their tests."""

from __future__ import annotations

import pytest
from kit.run_code import passes

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
