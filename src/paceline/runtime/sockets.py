"""Channels over the pairs of sockets that a process of this host inherits: its life's, and an event loop's."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence

from .channels import PREFIX, full, gone, prefix, size_of
from .clock import Late
from .frames import Buffer, FrameError

FEW_BYTES = 2**16  # sent in one piece


class SocketChannel:
    """One end of a pair.

    Args:
        connection: a connected socket, which it takes over.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.setblocking(False)
        self._head = bytearray(PREFIX.size)
        self._data: bytearray | None = None  # behind it
        self._filled = 0  # of the prefix, or of the frame behind it

    def send(self, parts: Sequence[Buffer], timeout: float | None = None) -> None:
        """Send one frame."""
        size = sum(map(len, parts))
        pieces: Sequence[Buffer] = [prefix(size), *parts]
        for piece in [b"".join(pieces)] if size < FEW_BYTES else pieces:
            self._send(memoryview(piece), timeout)

    def _send(self, left: memoryview, timeout: float | None) -> None:
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                if not _ready(self._socket, select.POLLOUT, timeout):
                    self.close()
                    raise full(timeout) from None
            except (OSError, ValueError) as error:
                self.close()
                raise gone(False) from error

    def receive(self, timeout: float | None = None) -> bytearray:
        """The next frame."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            into = self._head if self._data is None else self._data
            try:
                count = self._socket.recv_into(memoryview(into)[self._filled :])
            except BlockingIOError:
                left = None if end is None else max(0.0, end - time.monotonic())
                if not _ready(self._socket, select.POLLIN, left):
                    raise Late("nothing came in time") from None
                continue
            except OSError:
                count = 0
            if not count:
                raise gone(self._filled > 0 or self._data is not None)
            self._filled += count
            if (frame := self._whole()) is not None:
                return frame

    def _whole(self) -> bytearray | None:
        """The frame, if all of it is there now."""
        if self._data is None and self._filled == PREFIX.size:
            try:
                self._data, self._filled = bytearray(size_of(self._head)), 0
            except FrameError:
                self.close()
                raise
        if self._data is None or self._filled < len(self._data):
            return None
        whole, self._data, self._filled = self._data, None, 0
        return whole

    def takes(self) -> bool:
        """Whether a short frame goes without a wait; also where the other end is gone, which sending says."""
        return _ready(self._socket, select.POLLOUT, 0)

    def fileno(self) -> int:
        """Of the socket; below 0: it is closed."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def _ready(connection: socket.socket, event: int, timeout: float | None) -> bool:
    """Whether a socket can be read from, or written to, within so many seconds."""
    if connection.fileno() < 0:
        return True  # closed: the next call says so
    waiting = select.poll()
    waiting.register(connection, event)
    return bool(waiting.poll(None if timeout is None else 1e3 * timeout))
