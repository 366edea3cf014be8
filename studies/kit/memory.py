"""Memory of a process or of a device, its peaks among it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch

SELF = Path("/proc/self")
PEAK_RESET = "5"  # what clears VmHWM, see proc(5)


class Memory:
    """Memory of the process or of the device, in bytes. Every figure is None where the system does not tell."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def held(self) -> int | None:
        """What is held now: resident pages, or what torch has allocated on the device."""
        if self._device.type == "cuda":
            return int(torch.cuda.memory_allocated(self._device))
        return _status_bytes("VmRSS")

    def reset_peak(self) -> bool:
        """Start looking for the highest value anew. Returns whether that can be done."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return True
        try:
            (SELF / "clear_refs").write_text(PEAK_RESET)
        except OSError:
            return False
        return True

    def peak(self) -> int | None:
        """The highest value since `reset_peak`."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return _status_bytes("VmHWM")


def _status_bytes(name: str) -> int | None:
    with suppress(OSError):
        for line in (SELF / "status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None
