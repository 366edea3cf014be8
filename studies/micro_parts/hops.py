"""What it costs to pass a message to another process: half of a round trip to a worker on a core of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.runtime.placement import Placement, cores, pin
from paceline.runtime.remote import Remote, Timeouts, WorkerSpec
from paceline.runtime.serving import Service

WARM_UP = 200  # round trips that are not counted
PAUSE_S = 3e-4  # long enough for the other side to be asleep
LONGEST_S = 60.0


@dataclass(frozen=True, kw_only=True)
class HopCost:
    """Microseconds of one way of a message."""

    wait: str  # busy: one follows the other; idle: after a pause
    size_bytes: int
    median_us: float
    low_us: float  # 10th percentile
    high_us: float  # 90th percentile


@dataclass(frozen=True, slots=True)
class Ping:
    """A message, and its answer."""

    payload: Tensor


class Echo(Service):
    """Returns every message."""

    def handle(self, message: Ping) -> list[Ping]:
        """Return it."""
        return [message]


def echo(device: str) -> Echo:
    """Make the worker's service."""
    return Echo()


def measure(sizes: Sequence[int], repeats: int) -> list[HopCost]:
    """Time hops of messages of every size.

    Raises:
        ConfigError: this process may use fewer than two cores.
    """
    if len(usable := cores()) < 2:
        raise ConfigError("hops between two cores", "this process may use one", "give it two")
    spec = WorkerSpec(name="echo", service=f"{__name__}:echo", placement=Placement(cores=(usable[1],)))
    own = str(Path(__file__).parents[1])  # where the worker finds this module
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [own, os.environ.get("PYTHONPATH")]))
    worker = Remote(spec, Timeouts(silent_s=LONGEST_S))
    try:
        line = worker.start()
        with _pinned(usable[0], usable):
            return [_cost(line, wait, size, repeats) for wait in ("busy", "idle") for size in sizes]
    finally:
        worker.stop()


@contextmanager
def _pinned(core: int, usable: Sequence[int]) -> Iterator[None]:
    pin([core])
    try:
        yield
    finally:
        pin(usable)


def _cost(line: Any, wait: str, size: int, repeats: int) -> HopCost:
    message, times = Ping(torch.zeros(size, dtype=torch.uint8)), []
    for _ in range(repeats + WARM_UP):
        if wait == "idle":
            time.sleep(PAUSE_S)
        began = time.perf_counter()
        line.send(message)
        line.receive(LONGEST_S)
        times.append((time.perf_counter() - began) / 2)
    low, median, high = (1e6 * float(np.quantile(times[WARM_UP:], q)) for q in (0.1, 0.5, 0.9))
    return HopCost(wait=wait, size_bytes=size, median_us=median, low_us=low, high_us=high)
