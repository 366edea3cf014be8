"""What every test stands on: few threads, no network, fixed seeds."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from types import SimpleNamespace

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub, which reads it once
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# One thread in processes that tests start, as here: two that spin beside another busy process cost twenty times one.
os.environ["OMP_NUM_THREADS"] = "1"
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as for what a shell runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what tests start would inherit it

# Studies and recipes are scripts: here they are imported by name, as a process that they start imports them.
sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("studies", "zoo/recipes"))

import pytest
import torch
from hypothesis import settings

# The same examples every time, and no deadline: a slow machine is no failure.
settings.register_profile("paceline", derandomize=True, deadline=None)
settings.load_profile("paceline")

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fixed_seeds() -> Iterator[None]:
    """Every test starts from the same state of the global generators, and with one thread, in whatever order."""
    torch.set_num_threads(1)
    random.seed(0)
    torch.manual_seed(0)
    yield


@pytest.fixture(autouse=True, scope="session")
def what_a_run_has_of_its_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No drafter of this account is found, a pool that nobody gave a size is small, and what is frozen stays frozen.

    What `paceline adapt` made for a model would be its default drafter in tests, too; half a gigabyte for each of
    hundreds of engines is the machine's memory; and a run of the benchmark unfreezes in the end: every later collection
    would look at all that was ever imported.
    """
    place = tmp_path_factory.mktemp("adapted")
    frozen = SimpleNamespace(collect=gc.collect, freeze=lambda: None, unfreeze=lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.draft.adapted.pointers", lambda: place)
        patch.setattr("paceline.api.assembly.memory.DEFAULT_KV_BYTES", 2**26)
        patch.setattr("paceline.bench.run.gc", frozen)
        yield


@pytest.fixture(autouse=True, scope="module")
def what_stays_is_frozen() -> Iterator[None]:
    """What a file of tests leaves behind, modules above all, stays: garbage is not looked for in it again."""
    yield
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """No garbage is looked for meanwhile, a third of the time: what is imported stays, and is not looked at again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skipped from one place, these are one line of the list at the end of a run."""
    if "gpu" in item.keywords and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
