"""Connections: httptools' protocol of uvicorn, with bounds on what comes in front of a request's body, and with a way
for streams past ASGI."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from .http import CONNECTION, APIError

HEAD_BYTES = 2**16  # of a request's line and headers


class Connection(HttpToolsProtocol):
    """One connection.

    Args:
        header_s: seconds in which a request's line and headers must come.
        given: see `HttpToolsProtocol`.
    """

    def __init__(self, *, header_s: float, **given: Any) -> None:
        super().__init__(**given)
        self._header_s = header_s
        self._late: asyncio.TimerHandle | None = None  # while a head is under way
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first head begins."""
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing comes any more."""
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of heads, of bodies, or of both."""
        super().data_received(data)
        if self._late is not None:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self._refuse(431, f"a request's headers may have {HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        """The first byte of a request has come."""
        super().on_message_begin()
        if self._late is None:
            self._begin_head()

    def on_headers_complete(self) -> None:
        """A head is complete."""
        self._end_head()
        self.scope["extensions"] = {CONNECTION: {"write": self._write_part}}
        super().on_headers_complete()

    def _write_part(self, data: bytes) -> None:
        """A part of the body of a response whose head is written, and which is sent in chunks."""
        if not self.transport.is_closing():
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP."""
        self._refuse(400, msg)

    def _begin_head(self) -> None:
        words = f"the headers did not come within {self._header_s:g} s"
        self._head_bytes, self._late = 0, self.loop.call_later(self._header_s, self._refuse, 408, words)

    def _end_head(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _refuse(self, status: int, words: str) -> None:
        """Say what is wrong, in the form of every other error, and close."""
        self._end_head()
        if self.transport.is_closing():
            return
        response = APIError(status, words).response()
        head = b"".join(name + b": " + value + b"\r\n" for name, value in response.raw_headers)
        self.transport.write(STATUS_LINE[status] + head + b"connection: close\r\n\r\n" + bytes(response.body))
        self.transport.close()
