"""Where a worker runs: cores, threads, device."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import CapabilityError, ConfigError
from ..core.options import written


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Describe where one worker runs; validated on construction.

    Raises:
        ConfigError: cores that this process may not use, or more threads than cores.
        CapabilityError: a system that pins no process.
    """

    cores: tuple[int, ...] = ()  # none: all that this process may use
    threads: int | None = None  # of its layers; None: one a core
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not self.cores:
            return
        subject = f"placement cores={written(self.cores)}"
        if not hasattr(os, "sched_setaffinity"):
            raise CapabilityError(subject, "this system pins no process to cores", "leave cores out")
        usable = cores()
        lost = sorted(set(self.cores) - set(usable))
        if lost or len(set(self.cores)) < len(self.cores):
            wrong = f"core {lost[0]} is not one that this process may use" if lost else "a core is there twice"
            raise ConfigError(subject, wrong, f"use some of {written(tuple(usable))}")
        if self.threads is not None and self.threads > len(self.cores):
            wrong = f"there are {len(self.cores)} cores for {self.threads} threads"
            raise ConfigError(subject, wrong, "name as many cores as threads")

    @property
    def num_threads(self) -> int | None:
        """Return threads of its layers; None: as torch chooses."""
        return self.threads or len(self.cores) or None

    def environment(self) -> dict[str, str]:
        """Return what its process must find in its environment before torch is imported."""
        threads = self.num_threads
        return {} if threads is None else dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))


def cores() -> list[int]:
    """Return those that this process may use, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return [*range(os.cpu_count() or 1)]


def pin(chosen: Iterable[int]) -> None:
    """Keep this process on some cores: the threads that it has, and those that it will have."""
    cores = set(chosen)
    tasks = Path("/proc/self/task")
    for task in [int(entry.name) for entry in tasks.iterdir()] if tasks.is_dir() else [0]:
        try:
            os.sched_setaffinity(task, cores)
        except ProcessLookupError:  # a thread that has just ended
            continue
