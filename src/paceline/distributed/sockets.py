"""Channels over the pairs of sockets that a process of this host inherits: its life's, and an event loop's."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence

from .channels import Incoming, full, gone, prefix
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
        self._incoming = Incoming()

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
            try:
                count = self._socket.recv_into(self._incoming.room())
            except BlockingIOError:
                left = None if end is None else max(0.0, end - time.monotonic())
                if not _ready(self._socket, select.POLLIN, left):
                    raise Late("nothing came in time") from None
                continue
            except OSError:
                count = 0
            if not count:
                raise gone(self._incoming.begun)
            try:
                frame = self._incoming.took(count)
            except FrameError:
                self.close()
                raise
            if frame is not None:
                return frame

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
