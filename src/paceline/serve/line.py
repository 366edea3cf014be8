"""Messages over a socket on an event loop: nothing here waits."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from ..distributed.channels import ChannelClosed, prefix
from ..distributed.clock import Late
from ..distributed.frames import Codec, FrameError
from ..distributed.sockets import SocketChannel


class LoopLine:
    """One end of a connection.

    Args:
        connection: a connected socket, which it takes over.
        codec: of the messages of both directions.
        heard: called with each message that comes.
        lost: called once, when the other end is gone or sends what is no message.
    """

    def __init__(
        self, connection: socket.socket, codec: Codec, heard: Callable[[Any], None], lost: Callable[[], None]
    ) -> None:
        self._channel = SocketChannel(connection)
        self._socket, self._codec, self._heard, self._lost = connection, codec, heard, lost
        self._unsent = bytearray()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection.fileno(), self._read)

    def send(self, message: Any) -> None:
        """Send a message; what the socket does not take now goes when it does."""
        parts = self._codec.encode(message)
        data = b"".join([prefix(sum(map(len, parts))), *parts])
        if self._socket.fileno() < 0:
            return  # `lost` was called
        if self._unsent:
            self._unsent += data
            return
        self._unsent += data
        self._write()
        if self._unsent and self._socket.fileno() >= 0:
            self._loop.add_writer(self._socket.fileno(), self._write)

    def close(self) -> None:
        """Close the connection; `lost` is not called for that."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()

    def _write(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
            self._loop.remove_writer(self._socket.fileno())
        except BlockingIOError:
            return
        except OSError:
            self._gone()

    def _read(self) -> None:
        """Take what is there, up to a whole message: the loop calls again where there is more."""
        try:
            self._heard(self._codec.decode(self._channel.receive(0)))
        except Late:
            return
        except (ChannelClosed, FrameError):
            self._gone()

    def _gone(self) -> None:
        if self._socket.fileno() >= 0:
            self.close()
            self._lost()
