"""The machine under the numbers: what it is, and how fast it reads memory."""

from __future__ import annotations

import os
import platform
from time import perf_counter
from typing import Any

import torch

from ..engine.calibration import processor


def describe(device: str = "cpu") -> dict[str, Any]:
    """Describe this machine, as the current process uses it."""
    return {
        "processor": processor(device),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "device": device,
    }


def line(device: str = "cpu") -> str:
    """Return the same in one line for people."""
    form = "{device}: {processor}, {threads} of {cores} cores, {system}, Python {python}, torch {torch}"
    return form.format(**describe(device))


def read_bandwidth(device: str = "cpu", size_bytes: int = 256 * 2**20, repeats: int = 15) -> float:
    """Return the bytes a second at which a large buffer can be read, the best of two ways to read it.

    The buffer is a few times larger than what a decode step reads, like it is read once a pass, and like it may partly
    lie in a large last-level cache: this is the ceiling that a decode step is compared with.
    """
    data = torch.ones(size_bytes // 4, dtype=torch.float32, device=device)
    times, ways = list[float](), (data.sum, data.max)
    for read in ways:
        for index in range(repeats + 2):
            began = perf_counter()
            read()
            if device != "cpu":
                torch.cuda.synchronize(device)
            if index >= 2:  # the first two warm up
                times.append(perf_counter() - began)
    return size_bytes / min(times)  # a ceiling: what else ran meanwhile does not lower it
