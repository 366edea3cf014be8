"""Where a worker runs: host, cores, threads, device."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import CapabilityError, ConfigError
from ..core.options import check, option, shown, written

HERE = "localhost"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Of one worker; checked when it is made.

    Raises:
        ConfigError: cores that this process may not use, or more threads than cores.
        CapabilityError: another host, or a system that pins no process.
    """

    host: str = option(HERE, help="where it runs: localhost")
    cores: tuple[int, ...] = option((), help="CPU cores, such as <0,1>; none: all that this process may use")
    threads: int | None = option(None, help="threads of its layers; default: one a core", minimum=1)
    device: str = option("cpu", help="cpu or cuda, or one of several, such as cuda:1")

    def __post_init__(self) -> None:
        check(self, "placement ")
        if self.host != HERE:
            wrong = "workers are started on this host alone"
            raise CapabilityError(f"placement host={shown(self.host)}", wrong, f"use host={HERE!r}")
        if self.cores:
            self._check_cores()

    def _check_cores(self) -> None:
        asked = f"placement cores={written(self.cores)}"
        if not hasattr(os, "sched_setaffinity"):
            raise CapabilityError(asked, "this system pins no process to cores", "leave cores out")
        usable = cores()
        lost = sorted(set(self.cores) - set(usable))
        if lost or len(set(self.cores)) < len(self.cores):
            wrong = f"core {lost[0]} is none that this process may use" if lost else "a core is there twice"
            raise ConfigError(asked, wrong, f"use some of {written(tuple(usable))}")
        if self.threads is not None and self.threads > len(self.cores):
            wrong = f"there are {len(self.cores)} cores for {self.threads} threads"
            raise ConfigError(asked, wrong, "name as many cores as threads")

    @property
    def num_threads(self) -> int | None:
        """Threads of its layers; None: as torch chooses."""
        return self.threads or len(self.cores) or None

    def environment(self) -> dict[str, str]:
        """What its process must find in its environment before torch is imported."""
        threads = self.num_threads
        return {} if threads is None else dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))


def cores() -> list[int]:
    """Those that this process may use, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return [*range(os.cpu_count() or 1)]


def share_cores(counts: Sequence[int]) -> list[Placement]:
    """A placement for each of several workers, with so many cores of its own.

    Raises:
        ConfigError: there are fewer cores than that.
    """
    usable = cores()
    if sum(counts) > len(usable) or min(counts, default=1) < 1:
        wrong = f"this process may use {len(usable)}, and each worker needs one or more"
        raise ConfigError(f"{' + '.join(map(str, counts))} cores", wrong, "ask for fewer, or place workers together")
    found, at = [], 0
    for count in counts:
        found.append(Placement(cores=tuple(usable[at : at + count])))
        at += count
    return found


def pin(chosen: Iterable[int]) -> None:
    """Keep this process on some cores: the threads that it has, and those that it will have."""
    kept = set(chosen)
    tasks = Path("/proc/self/task")
    for task in [int(entry.name) for entry in tasks.iterdir()] if tasks.is_dir() else [0]:
        try:
            os.sched_setaffinity(task, kept)
        except ProcessLookupError:  # a thread that has just ended
            continue
