"""Channels between two activities of one process, in real and in virtual time, and services behind them."""

from __future__ import annotations

import logging
import math
import queue
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

from kit.clock import Mailbox
from kit.links import Link

from paceline.runtime.channels import Channel, Line, gone
from paceline.runtime.clock import Late, RealClock
from paceline.runtime.frames import Buffer, Codec, FrameError
from paceline.runtime.handshake import GREETINGS
from paceline.runtime.serving import serve

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


class LocalChannel:
    """An end of a channel between two activities of one process; see `local_pair`."""

    def __init__(self, incoming: Mailbox, outgoing: Mailbox) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self._closed = False

    def send(self, parts: Sequence[Buffer], timeout: float | None = None) -> None:
        """Send one frame; never waits."""
        if self._closed:
            raise gone(False)
        self._outgoing.put(bytearray().join(parts))

    def receive(self, timeout: float | None = None) -> bytearray:
        """The next frame."""
        if self._closed:
            raise gone(False)
        frame = self._incoming.get(timeout)
        if frame is None:
            self._closed = True
            raise gone(False)
        return frame

    def close(self) -> None:
        """Be gone for the other end."""
        self._closed = True
        self._outgoing.put(None)


def local_pair(clock: Any) -> tuple[LocalChannel, LocalChannel]:
    """Both ends of a channel in one process, whose waits are by this clock."""
    one, other = clock.mailbox(), clock.mailbox()
    return LocalChannel(one, other), LocalChannel(other, one)


class LinkedChannel:
    """A channel over an emulated link: what is sent is there when it would have come over the link.

    Both ends must be linked: a frame carries when it is due. In real time that holds within one host, whose processes
    share a clock.
    """

    _DUE = struct.Struct("<d")

    def __init__(self, channel: Channel, link: Link, clock: Any) -> None:
        self._channel, self._link, self._clock = channel, link, clock
        self._free = 0.0  # when the link has sent what it was given
        self._held: bytearray | None = None  # under way

    def send(self, parts: Sequence[Buffer], timeout: float | None = None) -> None:
        """Send one frame; errors as of the channel."""
        begin = max(self._clock.now(), self._free)
        self._free = begin + self._link.transfer_s(sum(map(len, parts)))
        due = self._free + self._link.latency_ms * 1e-3
        self._channel.send([self._DUE.pack(due), *parts], timeout)

    def receive(self, timeout: float | None = None) -> bytearray:
        """The next frame that is due; errors as of the channel."""
        end = math.inf if timeout is None else self._clock.now() + timeout
        held = self._channel.receive(timeout) if self._held is None else self._held
        if len(held) < self._DUE.size:
            raise FrameError("a frame came over a link without its time: both ends must be linked")
        (due,) = self._DUE.unpack_from(held)
        if due > end:
            self._held = held
            self._clock.sleep_until(end)
            raise Late("nothing came in time")
        self._held = None
        self._clock.sleep_until(due)
        return held[self._DUE.size :]

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()


class InProcess:
    """A service beside who asks, in the same process: a thread, or an activity of virtual time.

    Args:
        service: what it serves.
        clock: real or virtual.
        link: makes an emulated link of each end of its channel; None: messages take no time.
    """

    def __init__(self, service: Any, clock: Any, link: Any = None) -> None:
        own, other = local_pair(clock)
        if link is not None:
            own, other = link(own), link(other)
        codec = Codec(*GREETINGS, *service.kinds)
        self.line: Line | None = Line(own, codec)
        self.faults: list[str] = []
        clock.start("service", lambda: _serve(service, Line(other, codec)))

    def poll(self) -> bool:
        """Whether it is there."""
        return self.line is not None

    def failed(self, why: str) -> None:
        """It is not used any more."""
        self.faults.append(why)
        if self.line is not None:
            self.line.close()
        self.line = None

    def lost(self) -> None:
        """It is not there any more."""
        self.failed("closed its line")


def _serve(service: Any, line: Line) -> None:
    """As a process would: a service that fails has said so, and is gone."""
    try:
        serve(service, line)
    except Exception as error:
        log.error("a service failed", exc_info=error)
    finally:
        line.close()
