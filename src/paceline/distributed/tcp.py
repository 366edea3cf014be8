"""Channels over sockets: TCP, between hosts or on the loopback, and the pairs that a process inherits.

Whoever reaches a port may connect: the handshake (`handshake`) asks for a key before anything else is believed.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence
from contextlib import suppress

from ..core.errors import ConfigError
from .channels import ChannelClosed, Incoming, gone, prefix
from .clock import Late
from .frames import Buffer, FrameError

LOOPBACK = "127.0.0.1"
FEW_BYTES = 2**16  # sent in one piece
GONE_MS = 10_000  # for which what was sent may be without an answer of the other host's system
FIRST_S = 2.0  # for the first frame of who connects
MOST_SILENT = 16  # connections without one


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
        self._whole: bytearray | None = None  # a frame that was found by `arrived`

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
        if self._whole is not None:
            whole, self._whole = self._whole, None
            return whole
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

    def arrived(self) -> bool:
        """Whether a whole frame is there, which `receive` then gives; errors as of `receive`."""
        with suppress(Late):
            self._whole = self.receive(0)
        return self._whole is not None

    def takes(self) -> bool:
        """Whether a short frame goes without a wait; also where the other end is gone, which sending says."""
        return _ready(self._socket, select.POLLOUT, 0)

    def detach(self) -> socket.socket:
        """The connection itself, for another hand; this channel is of no use then."""
        return socket.socket(fileno=self._socket.detach())

    def fileno(self) -> int:
        """Of the connection; below 0: it is closed."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class Listener:
    """A port that waits for connections.

    Args:
        host: of this machine, name or address.
        port: 0: any free one.
        first_s: seconds for the first frame of who connects, for `greeted`.

    Raises:
        ConfigError: it cannot be had.
    """

    def __init__(self, host: str = LOOPBACK, port: int = 0, first_s: float = FIRST_S) -> None:
        asked = f"to listen on {host}:{port}"
        try:
            self._socket = socket.create_server((host, port))
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise ConfigError(asked, f"the port cannot be had ({why})", "name a free one of this host, or 0") from error
        self.host, self.port = self._socket.getsockname()[:2]
        self._first_s = first_s
        self._silent: dict[SocketChannel, float] = {}  # who has connected and said nothing yet, and until when he may

    def accept(self, timeout: float) -> SocketChannel:
        """The next connection.

        Raises:
            Late: none came within so many seconds.
        """
        if not _ready(self._socket, select.POLLIN, timeout):
            raise Late(f"nobody connected to {self.host}:{self.port} within {timeout:g} s")
        return SocketChannel(self._socket.accept()[0])

    def greeted(self, timeout: float) -> SocketChannel:
        """The next connection over which a whole frame has come.

        All that say nothing are listened to at once, so that nobody waits for them; each is closed after ``first_s``,
        or when there are more than `MOST_SILENT`.

        Raises:
            Late: there was none within so many seconds.
        """
        end = time.monotonic() + timeout
        while True:
            for channel in [*self._silent]:
                if self._said(channel):
                    return channel
            if self._took_in():
                continue
            if time.monotonic() >= end:
                raise Late(f"nobody said anything to {self.host}:{self.port} within {timeout:g} s")
            self._until_something(end)

    def _said(self, channel: SocketChannel) -> bool:
        """Whether a connection's first frame is there; who says something else, or nothing for too long, is let go."""
        try:
            arrived = channel.arrived()
        except (ChannelClosed, FrameError):
            self._drop(channel)
            return False
        if arrived:
            del self._silent[channel]
        elif time.monotonic() > self._silent[channel]:
            self._drop(channel)
        return arrived

    def _took_in(self) -> bool:
        """Take one that waits to connect, in the place of who is silent for longest where there are many such."""
        if not _ready(self._socket, select.POLLIN, 0):
            return False
        if len(self._silent) >= MOST_SILENT:
            self._drop(next(iter(self._silent)))
        with suppress(ConnectionError):  # he has gone again
            self._silent[SocketChannel(self._socket.accept()[0])] = time.monotonic() + self._first_s
        return True

    def _until_something(self, end: float) -> None:
        """Wait until somebody connects, or says something, or was silent for too long, or it is the end."""
        waiting = select.poll()
        for one in (self._socket.fileno(), *(channel.fileno() for channel in self._silent)):
            waiting.register(one, select.POLLIN)
        waiting.poll(1e3 * max(0.0, min([end, *self._silent.values()]) - time.monotonic()) + 1)

    def _drop(self, channel: SocketChannel) -> None:
        del self._silent[channel]
        channel.close()

    def close(self) -> None:
        """Give the port back."""
        self._socket.close()
        for channel in [*self._silent]:
            self._drop(channel)


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
