"""What Ray runs on another host: an actor around a worker. Nothing here needs torch."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import ray

from .frames import Codec
from .handshake import LIFE, Begin
from .serving import Progress, answer


class WorkerActor:
    """A worker: one call for its whole work, and one beside it that says how far it is."""

    def __init__(self) -> None:
        self._progress = Progress()

    def run(self, told: bytes, environment: Mapping[str, str]) -> int:
        """Be the worker that `Begin` says, until who asks is gone; an exit status.

        Args:
            told: a `Begin` as bytes.
            environment: what must be there before torch is imported.
        """
        os.environ.update(environment)
        from .groups import GroupChannel, Member, join

        asked: Begin = Codec(*LIFE).decode(bytearray(told))
        host = ray.util.get_node_ip_address()
        member = Member.parse(asked.way.partition(":")[2])
        channel = GroupChannel(join(member, host), 0)
        return answer(asked, channel, self._progress, host)

    @ray.method(concurrency_group="watch")
    def beat(self) -> tuple[float, tuple[str, int]]:
        """Seconds at the present piece of work; Ray's number of this host, and the process's."""
        return self._progress.busy_s(), (ray.get_runtime_context().get_node_id(), os.getpid())


def end_stopped(pid: int) -> None:
    """End an actor's process of this host that answers nobody: Ray takes seconds to see that its own way does not."""
    with suppress(OSError):
        if f"ray::{WorkerActor.__name__}" in Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8"):
            os.kill(pid, signal.SIGKILL)
