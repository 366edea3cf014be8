"""Ways for frames between two ends: over shared memory (`shared`) or a pair of sockets (`sockets`) on a host, over a
network (`groups`).

A channel carries whole frames, in order, and each end is used by one thread. On a stream of bytes a frame follows its
length: who says more than may come, or anything else, is not read further.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Protocol

from ..core.errors import PacelineError
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


def gone(begun: bool) -> ChannelClosed:
    """The other end is not there any more."""
    return ChannelClosed("the other end is gone" + (" in the middle of a frame" if begun else ""))


def full(seconds: float | None) -> ChannelClosed:
    """The other end takes nothing."""
    return ChannelClosed(f"the other end took nothing for {seconds} s, and is not waited for any longer")
