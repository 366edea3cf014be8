"""Where a worker runs: cores, threads, device; and on which cluster, where it is one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from ..core.errors import CapabilityError, ConfigError
from ..core.named import NamedConfig, made, pairs
from ..core.options import MOST_TEXT, check, option, shown, written

HOST_PORT = re.compile(r"[^\s:,=/\[\]]+:\d{1,5}")


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Of one worker; checked when it is made.

    Raises:
        ConfigError: cores that this process may not use, or more threads than cores.
        CapabilityError: a system that pins no process.
    """

    cores: tuple[int, ...] = option((), help="CPU cores, such as <0,1>; none: all that this process may use")
    threads: int | None = option(None, help="threads of its layers; default: one a core", minimum=1)
    device: str = option("cpu", help="cpu or cuda, or one of several, such as cuda:1")

    def __post_init__(self) -> None:
        check(self, "placement ")
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
        """Return threads of its layers; None: as torch chooses."""
        return self.threads or len(self.cores) or None

    def environment(self) -> dict[str, str]:
        """Return what its process must find in its environment before torch is imported."""
        threads = self.num_threads
        return {} if threads is None else dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(NamedConfig):
    """A Ray cluster, and what each worker gets of it."""

    kind: ClassVar[str] = "cluster"

    address: str = option("auto", help="auto: the one that this host has joined; or HOST:PORT of its head")
    place: Literal["spread", "pack"] = option("spread", help="workers on as many hosts as there are, or on few")
    cores: int | None = option(None, help="cores and threads of each worker; none: an even share of a host", minimum=1)
    gpus: int | None = option(None, help="GPUs of each worker; none: 1 with device=cuda, else 0", minimum=0)

    def validate(self) -> None:
        """Check that an address is a word or a host and a port."""
        self.require(
            "address", self.address == "auto" or HOST_PORT.fullmatch(self.address) is not None, "is no address"
        )


def parse_cluster(given: str) -> ClusterConfig:
    """Read what a user gives as ``cluster``: ``auto``, ``10.0.0.1:6379``, ``auto,place=pack,cores=8``.

    Raises:
        ConfigError: neither, or options that do not fit.
    """
    asked, (first, _, rest) = f"cluster={shown(given)}", given.partition(",")
    if len(given) > MOST_TEXT or not first.strip():
        raise ConfigError(asked, "it is no address", "write auto, or HOST:PORT of the cluster's head")
    given_options = [("address", first.strip()), *pairs(asked, ClusterConfig, rest or None)]
    found: ClusterConfig = made(asked, ClusterConfig, given_options)
    return found


def cores() -> list[int]:
    """Return those that this process may use, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return [*range(os.cpu_count() or 1)]


def pin(chosen: Iterable[int]) -> None:
    """Keep this process on some cores: the threads that it has, and those that it will have."""
    kept = set(chosen)
    tasks = Path("/proc/self/task")
    for task in [int(entry.name) for entry in tasks.iterdir()] if tasks.is_dir() else [0]:
        try:
            os.sched_setaffinity(task, kept)
        except ProcessLookupError:  # a thread that has just ended
            continue
