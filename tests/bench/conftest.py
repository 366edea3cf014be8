"""Runs of the benchmark take as long as their trials: what else they do is done in small."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.bench import machine

read_bandwidth = machine.read_bandwidth


@pytest.fixture(autouse=True, scope="module")
def little_bandwidth() -> Iterator[None]:
    """The bandwidth is that of 16 MiB, read five times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "read_bandwidth", lambda device="cpu", size_bytes=0: read_bandwidth(device, 2**24, 5))
        yield
