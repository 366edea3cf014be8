"""Ways for frames between two ends: in one process, over shared memory (`shared`) or a pair of
sockets (`sockets`) between two, over a network (`groups`).

A channel carries whole frames, in order, and each end is used by one thread. On a stream of bytes a frame follows its
length: who says more than may come, or anything else, is not read further.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..core.errors import PacelineError
from ..core.options import check, option
from .clock import Clock, Late, Mailbox
from .frames import Buffer, Codec, FrameError

MARK = b"PLf1"  # in front of every length: who speaks another language is told so
PREFIX = struct.Struct("<4sI")
MOST_BYTES = 256 * 2**20  # of a frame


class ChannelClosed(PacelineError, ConnectionError):
    """The other end is gone, or cannot be understood any more."""


class Channel(Protocol):
    """One end of a way for frames."""

    def send(self, parts: Sequence[Buffer], timeout: float | None = None) -> None:
        """Send one frame.

        Args:
            parts: its bytes, one part behind the other.
            timeout: seconds to wait for room; None: for ever.

        Raises:
            ChannelClosed: the other end is gone, or takes nothing in time; the channel is closed then.
            FrameError: the frame is larger than a channel takes; nothing was sent.
        """
        ...

    def receive(self, timeout: float | None = None) -> bytearray:
        """The next frame.

        Args:
            timeout: seconds to wait for it; 0: only what is there; None: for ever.

        Raises:
            Late: none came in time; what came of one is kept for the next call.
            ChannelClosed: the other end is gone, and all that it sent was received.
            FrameError: no frame comes any more, since what came is none; the channel is closed.
        """
        ...

    def close(self) -> None:
        """Be gone for the other end."""
        ...


class Line:
    """Messages over a channel.

    Args:
        channel: one end.
        codec: of the messages of both directions.
    """

    def __init__(self, channel: Channel, codec: Codec) -> None:
        self.channel, self.codec = channel, codec

    def send(self, message: Any, timeout: float | None = None) -> None:
        """Send one message; errors as of `Channel.send`."""
        self.channel.send(self.codec.encode(message), timeout)

    def receive(self, timeout: float | None = None) -> Any:
        """The next message; errors as of `Channel.receive`. One that the codec refuses does not end the channel."""
        return self.codec.decode(self.channel.receive(timeout))

    def close(self) -> None:
        """Close the channel."""
        self.channel.close()


def fits(size: int) -> None:
    """Refuse a frame that no channel takes.

    Raises:
        FrameError: it has too many bytes.
    """
    if size > MOST_BYTES:
        raise FrameError(f"a frame of {size} bytes is larger than the {MOST_BYTES} that a channel takes")


def prefix(size: int) -> bytes:
    """What stands in front of a frame on a stream of bytes; errors as of `fits`."""
    fits(size)
    return PREFIX.pack(MARK, size)


def size_of(head: Buffer) -> int:
    """Bytes of the frame behind this prefix.

    Raises:
        FrameError: it is none, or says too many.
    """
    mark, size = PREFIX.unpack_from(head)
    if mark != MARK:
        raise FrameError(f"{bytes(mark)!r} stands where a frame should begin")
    if size > MOST_BYTES:
        raise FrameError(f"a frame of {size} bytes is announced, and {MOST_BYTES} is the most")
    return size


class Incoming:
    """A frame while it comes in on a stream of bytes."""

    def __init__(self) -> None:
        self._head = bytearray(PREFIX.size)
        self._data: bytearray | None = None
        self._filled = 0  # of the prefix, or of the frame behind it

    @property
    def begun(self) -> bool:
        """Whether a part of it is there."""
        return self._filled > 0 or self._data is not None

    def room(self) -> memoryview:
        """Where the next bytes go."""
        return memoryview(self._head if self._data is None else self._data)[self._filled :]

    def took(self, count: int) -> bytearray | None:
        """So many bytes went there; the frame, if it is whole now.

        Raises:
            FrameError: they are no frame's.
        """
        self._filled += count
        if self._data is None and self._filled == PREFIX.size:
            self._data, self._filled = bytearray(size_of(self._head)), 0
        if self._data is None or self._filled < len(self._data):
            return None
        whole, self._data, self._filled = self._data, None, 0
        return whole


def gone(begun: bool) -> ChannelClosed:
    """The other end is not there any more."""
    return ChannelClosed("the other end is gone" + (" in the middle of a frame" if begun else ""))


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


def local_pair(clock: Clock) -> tuple[LocalChannel, LocalChannel]:
    """Both ends of a channel in one process, whose waits are by this clock."""
    one, other = clock.mailbox(), clock.mailbox()
    return LocalChannel(one, other), LocalChannel(other, one)


@dataclass(frozen=True, kw_only=True)
class Link:
    """A way between two hosts that is emulated: a frame occupies it for its bytes, then travels."""

    latency_ms: float = option(0.0, help="milliseconds that a frame travels", minimum=0.0, maximum=1e6)
    gbit_per_s: float = option(math.inf, help="10^9 bits a second; inf: frames take no time", above=0.0)

    def __post_init__(self) -> None:
        check(self, "link ")

    def transfer_s(self, size: int) -> float:
        """Seconds for which so many bytes occupy it."""
        return size * 8e-9 / self.gbit_per_s


class LinkedChannel:
    """A channel over an emulated link: what is sent is there when it would have come over the link.

    Both ends must be linked: a frame carries when it is due. In real time that holds within one host, whose processes
    share a clock.
    """

    _DUE = struct.Struct("<d")

    def __init__(self, channel: Channel, link: Link, clock: Clock) -> None:
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
