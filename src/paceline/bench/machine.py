"""The machine under the numbers: what it is, and how fast it reads memory."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """What a figure was measured on."""

    processor: str
    cores: int
    threads: int
    system: str
    python: str
    torch: str
    device: str

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)

    def line(self) -> str:
        """One line for people."""
        return (
            f"{self.device}: {self.processor}, {self.threads} of {self.cores} cores, {self.system}, "
            f"Python {self.python}, torch {self.torch}"
        )


def describe(device: str = "cpu") -> MachineFacts:
    """This machine, as the current process uses it."""
    on_gpu = device != "cpu"
    return MachineFacts(
        processor=torch.cuda.get_device_name(device) if on_gpu else _processor(),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=str(torch.__version__),
        device=device,
    )


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        fields = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
        names = {key.strip(): value.strip() for key, value in fields.items()}
        if "model name" in names:
            return f"{names['model name']} (family {names.get('cpu family')}, model {names.get('model')})"
    return platform.processor() or platform.machine()


def read_bandwidth(device: str = "cpu", size_bytes: int = 256 * 2**20, repeats: int = 15) -> float:
    """Bytes a second at which a large buffer can be read, the best of two ways to read it.

    The buffer is a few times larger than what a decode step reads, like it is read once a pass, and like it
    may partly lie in a large last-level cache: this is the ceiling that a decode step is held against.
    """
    data = torch.ones(size_bytes // 4, dtype=torch.float32, device=device)
    return max(size_bytes / _best_seconds(read, device, repeats) for read in (data.sum, data.max))


def _best_seconds(call: Any, device: str, repeats: int) -> float:
    times = []
    for index in range(repeats + 2):
        began = perf_counter()
        call()
        if device != "cpu":
            torch.cuda.synchronize(device)
        if index >= 2:  # the first two warm up
            times.append(perf_counter() - began)
    return min(times)  # a ceiling: what else ran meanwhile does not lower it
