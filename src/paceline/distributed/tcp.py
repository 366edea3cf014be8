"""Channels over sockets: TCP, between hosts or on the loopback, and the pairs that a process inherits.

Whoever reaches a port may connect: the handshake (`handshake`) asks for a key before anything else is believed.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence

from ..core.errors import ConfigError
from .channels import ChannelClosed, Incoming, gone, prefix
from .clock import Late
from .frames import Buffer, FrameError

LOOPBACK = "127.0.0.1"
FEW_BYTES = 2**16  # sent in one piece
GONE_MS = 10_000  # for which what was sent may be without an answer of the other host's system


class SocketChannel:
    """One end of a connection.

    Args:
        connection: a connected socket, which it takes over.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # a host that is gone without a word is gone
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE_MS)
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
                self._until_room(timeout)
            except (OSError, ValueError) as error:
                self.close()
                raise gone(False) from error

    def _until_room(self, timeout: float | None) -> None:
        if not _ready(self._socket, select.POLLOUT, timeout):
            self.close()
            raise ChannelClosed(f"the other end took nothing for {timeout} s, and is not waited for any longer")

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
            if (frame := self._took(count)) is not None:
                return frame

    def _took(self, count: int) -> bytearray | None:
        try:
            return self._incoming.took(count)
        except FrameError:
            self.close()
            raise

    def takes(self) -> bool:
        """Whether a short frame goes without a wait; also where the other end is gone, which sending says."""
        return _ready(self._socket, select.POLLOUT, 0)

    def detach(self) -> socket.socket:
        """The connection itself, for another hand; this channel is of no use then."""
        return socket.socket(fileno=self._socket.detach())

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class Listener:
    """A port that waits for connections.

    Args:
        host: of this machine, name or address.
        port: 0: any free one.

    Raises:
        ConfigError: it cannot be had.
    """

    def __init__(self, host: str = LOOPBACK, port: int = 0) -> None:
        asked = f"to listen on {host}:{port}"
        try:
            self._socket = socket.create_server((host, port))
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise ConfigError(asked, f"the port cannot be had ({why})", "name a free one of this host, or 0") from error
        self.host, self.port = self._socket.getsockname()[:2]

    def accept(self, timeout: float) -> SocketChannel:
        """The next connection.

        Raises:
            Late: none came within so many seconds.
        """
        if not _ready(self._socket, select.POLLIN, timeout):
            raise Late(f"nobody connected to {self.host}:{self.port} within {timeout:g} s")
        return SocketChannel(self._socket.accept()[0])

    def close(self) -> None:
        """Give the port back."""
        self._socket.close()


def connect(host: str, port: int, timeout: float) -> SocketChannel:
    """A connection to a listener.

    Raises:
        ConfigError: none can be had within so many seconds; asked for again until then.
    """
    end = time.monotonic() + timeout
    while True:
        try:
            return SocketChannel(socket.create_connection((host, port), max(0.1, end - time.monotonic())))
        except (OSError, OverflowError) as error:
            if time.monotonic() + 0.05 > end:
                wrong = f"nobody answers there ({error})"
                remedy = "start the other side first, and check host, port and firewall"
                raise ConfigError(f"a channel to {host}:{port}", wrong, remedy) from error
            time.sleep(0.05)


def _ready(connection: socket.socket, event: int, timeout: float | None) -> bool:
    """Whether a socket can be read from, or written to, within so many seconds."""
    if connection.fileno() < 0:
        return True  # closed: the next call says so
    waiting = select.poll()
    waiting.register(connection, event)
    return bool(waiting.poll(None if timeout is None else 1e3 * timeout))
