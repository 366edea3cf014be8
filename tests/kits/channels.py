"""Lines between two activities of one process, in real and in virtual time, and services with them."""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections.abc import Callable
from typing import Any

from kit.clock import Mailbox, RealClock
from kit.links import Link

from paceline.runtime.serving import serve
from paceline.runtime.wire import Late, decode, encode

log = logging.getLogger(__name__)


class RealTime(RealClock):
    """Real time, in which activities are threads."""

    label = ""  # for figures

    def start(self, name: str, run: Callable[[], None]) -> None:
        """Run something in a thread, which ends with the process."""
        threading.Thread(target=run, name=name, daemon=True).start()

    def mailbox(self) -> Mailbox:
        """A queue between threads."""
        return _RealMailbox()


class _RealMailbox:
    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def put(self, item: Any) -> None:
        self._items.put(item)

    def get(self, timeout: float | None = None) -> Any:
        try:
            return self._items.get(timeout != 0, timeout)
        except queue.Empty:
            raise Late("nothing came in time") from None


class LocalLine:
    """An end of a line between two activities of one process; over a link what is sent arrives as over that."""

    def __init__(self, incoming: Mailbox, outgoing: Mailbox, clock: Any, link: Link | None = None) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self._clock, self._link = clock, link
        self._free = 0.0  # when the link has sent what it was given
        self._held: tuple[float, list[Any]] | None = None  # in flight

    def send(self, message: Any, timeout: float | None = None) -> None:
        """Send a message; never waits."""
        parts, due = encode(message), 0.0
        if self._link is not None:
            self._free = max(self._clock.now(), self._free) + self._link.transfer_s(sum(map(len, parts)))
            due = self._free + self._link.latency_ms * 1e-3
        self._outgoing.put((due, parts))

    def receive(self, timeout: float | None = None, beside: Any = None) -> Any:
        """Return the next message that is due."""
        end = math.inf if timeout is None else self._clock.now() + timeout
        held = self._incoming.get(timeout) if self._held is None else self._held
        if held[0] > end:
            self._held = held
            self._clock.sleep_until(end)
            raise Late("no message arrived in time")
        self._held = None
        self._clock.sleep_until(held[0])
        return decode([bytearray(part) for part in held[1]])

    def close(self) -> None:
        """Nothing is there to close."""


def local_pair(clock: Any, link: Link | None = None) -> tuple[Any, Any]:
    """Both ends of a line in one process, whose waits are by this clock."""
    one, other = clock.mailbox(), clock.mailbox()
    return LocalLine(one, other, clock, link), LocalLine(other, one, clock, link)


class InProcess:
    """A service with its client in the same process: a thread, or an activity of virtual time.

    Args:
        service: what it serves.
        clock: real or virtual.
        link: emulated; None: messages take no time.
    """

    def __init__(self, service: Any, clock: Any, link: Link | None = None) -> None:
        self.line, other = local_pair(clock, link)
        self.faults: list[str] = []
        clock.start("service", lambda: _serve(service, other))

    def poll(self) -> bool:
        """Whether it is there."""
        return self.line is not None

    def failed(self, why: str) -> None:
        """It is not used any more."""
        self.faults.append(why)
        self.line = None


def _serve(service: Any, line: Any) -> None:
    """As a process would: a service that fails has said so, and is gone."""
    try:
        serve(service, line)
    except Exception as error:
        log.error("a service failed", exc_info=error)
