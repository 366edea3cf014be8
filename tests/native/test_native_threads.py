"""The compiled layers' own threads: whoever computes, the bits are the same, and nobody waits for ever."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kits.native import SHAPES, make, needs_kernels, tokens_of, whole
from torch import Tensor

from paceline.kernels.linear import NativeLinear

pytestmark = needs_kernels
SIZE = 1024  # weights that are worth eight threads from one row on


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Tests may set torch's number of threads, which is the layers' too."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def product(seed: int = 0) -> tuple[NativeLinear, Tensor, Tensor]:
    """A product, inputs of 33 rows, and what one thread makes of them."""
    generator = torch.Generator().manual_seed(seed)
    linear = NativeLinear(torch.randn(SIZE, SIZE, generator=generator).bfloat16(), None)
    x = torch.randn(33, SIZE, generator=generator).bfloat16()
    torch.set_num_threads(1)
    return linear, x, linear(x)


@pytest.mark.parametrize("count", [2, 3, 7, 300])
def test_any_number_of_threads_gives_the_same_bits(count: int):
    linear, x, alone = product()
    torch.set_num_threads(count)
    for rows in (33, 1, 5, 33, 2) * 20:
        assert torch.equal(linear(x[:rows]), alone[:rows])


def test_callers_in_several_threads_do_not_meet():
    parts = [product(seed) for seed in range(3)]
    torch.set_num_threads(3)
    wrong: list[int] = []

    def call(seed: int) -> None:
        linear, x, alone = parts[seed]
        wrong.extend(seed for _ in range(200) if not torch.equal(linear(x), alone))

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not any(caller.is_alive() for caller in callers) and not wrong


def test_threads_end_with_the_thread_that_called():
    linear, x, alone = product()
    torch.set_num_threads(4)
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        pytest.skip("no /proc to count threads in")
    linear(x)
    here = len([*tasks.iterdir()])
    for _ in range(3):
        caller = threading.Thread(target=lambda: linear(x))
        caller.start()
        caller.join(60)
    for _ in range(100):  # Python's join does not wait for the system's thread
        if len([*tasks.iterdir()]) <= here:
            break
        time.sleep(0.1)
    assert len([*tasks.iterdir()]) <= here
    assert torch.equal(linear(x), alone)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="no /proc to count threads in")
def test_a_small_network_decodes_on_the_calling_thread_alone():
    """Whatever the number of threads that may be used: they would wait for each other longer than they compute."""
    decoder = make(SHAPES["heads of 8"] | {"num_layers": 5, "windows": (None,) * 5, "vocab_size": 512})
    linear, x, _ = product()
    torch.set_num_threads(4)
    tasks = Path("/proc/self/task")
    hired: list[int] = []

    def call() -> None:
        torch.ones(10**7).add_(1)  # torch's own threads are there before the counting begins
        before = len([*tasks.iterdir()])
        for work in (lambda: whole(decoder, tokens_of(decoder, 40), 1), lambda: linear(x)):
            work()
            hired.append(len([*tasks.iterdir()]) - before)

    caller = threading.Thread(target=call)
    caller.start()
    caller.join(60)
    assert hired == [0, 3]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_computes_on():
    """The threads are gone in a forked process: waiting for them would never end."""
    code = f"""
import os, sys, torch
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]}
from test_native_threads import product
linear, x, alone = product()
torch.set_num_threads(2)
for _ in range(10): linear(x)
child = os.fork()
if child == 0:
    os._exit(0 if linear(x[:5]).tolist() == alone[:5].tolist() else 3)  # so few rows that torch itself needs no threads
assert os.waitpid(child, 0)[1] == 0
assert torch.equal(linear(x), alone)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
