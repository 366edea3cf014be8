"""A service for tests, without torch: it answers, counts, fails, hangs and dies as it is told."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import ConfigError
from paceline.runtime.handshake import Facts
from paceline.runtime.serving import Service


@dataclass(frozen=True, slots=True)
class Say:
    text: str


@dataclass(frozen=True, slots=True)
class Count:
    """Say the numbers from 1 on, one a piece of work."""

    most: int


@dataclass(frozen=True, slots=True)
class About:
    pid: int
    cores: list[int]
    threads: str | None
    torch: bool  # whether it is loaded


class Echo(Service):
    """Answers what is said in capitals."""

    def __init__(self, weights: str = "") -> None:
        self.facts = Facts(weights=weights, vocabulary="v")
        self.counted = self.most = 0

    def handle(self, message: Any) -> Iterable[Any]:
        if isinstance(message, Count):
            self.counted, self.most = 0, message.most
            return []
        return self.obey(message.text)

    def obey(self, text: str) -> Iterator[Any]:
        if text == "about":
            threads = os.environ.get("OMP_NUM_THREADS")
            yield About(os.getpid(), sorted(os.sched_getaffinity(0)), threads, "torch" in sys.modules)
        elif text == "fail":
            raise ValueError("no such thing")
        elif text == "hang":
            time.sleep(1000)
        elif text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            yield Say(text.upper())

    def work(self) -> Iterable[Any] | None:
        if self.counted == self.most:
            return None
        self.counted += 1
        return [Say(str(self.counted))]


def echo(device: str, weights: str = "", refuse: bool = False, fail: bool = False) -> Echo:
    """What a worker makes."""
    if refuse:
        raise ConfigError(f"device {device}", "it is not liked", "use another")
    if fail:
        raise RuntimeError("out of order")
    return Echo(weights)
