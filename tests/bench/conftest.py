"""Runs of the benchmark take as long as their trials: what else they do is done in small."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.api.assembly import memory
from paceline.bench import machine

read_bandwidth = machine.read_bandwidth


@pytest.fixture(autouse=True, scope="module")
def small_memory() -> Iterator[None]:
    """The bandwidth is that of 16 MiB, read five times; a K/V pool that nobody gave a size has 64 MiB."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "read_bandwidth", lambda device="cpu", size_bytes=0: read_bandwidth(device, 2**24, 5))
        patch.setattr(memory, "DEFAULT_KV_BYTES", 64 * 2**20)
        yield
