"""What every request must pass before an endpoint sees it: host, key, size."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .config import ServeConfig
from .http import APIError
from .playground import FILES

OPEN = ("/health", *FILES)  # paths that no key guards


class Guard:
    """Refuses requests under a foreign name, without a key, or with a body that is too large.

    A page from elsewhere can make a browser ask a server on this host under a name of its own that leads here: its
    Host header tells.

    Args:
        app: what is guarded.
        config: the limits.
        keys: of which a request must have one; empty: none is asked for.
    """

    def __init__(self, app: ASGIApp, config: ServeConfig, keys: Sequence[str]) -> None:
        self._app, self._config = app, config
        self._keys = [key.encode() for key in keys]
        self._open = dict.fromkeys(self._keys, 0)  # requests in flight
        self._hosts = {"localhost", config.host, *(config.allowed_hosts or ())}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = dict(scope["headers"])
            self._check_host(headers.get(b"host", b"").decode("latin-1"))
            key = self._key(scope["path"], headers)
            self._check_length(headers.get(b"content-length", b"0"))
        except APIError as error:
            await error.response(scope["path"])(scope, receive, send)
            return
        if key is None:
            await self._app(scope, self._bounded(receive), send)
            return
        self._open[key] += 1
        try:
            await self._app(scope, self._bounded(receive), send)
        finally:
            self._open[key] -= 1

    def _check_host(self, host: str) -> None:
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        name = name.strip("[]")
        try:
            ipaddress.ip_address(name)  # an address cannot be made to lead elsewhere
            return
        except ValueError:
            pass
        if name.lower() not in self._hosts:
            message = (
                f"this server is not called {name[:100]!r}: ask it by its address, or start it with --allowed-hosts"
            )
            raise APIError(400, message, code="host_not_allowed")

    def _key(self, path: str, headers: dict[bytes, bytes]) -> bytes | None:
        """Whose key a request has; None: it needs none."""
        if not self._keys or path in OPEN:
            return None
        bearer = headers.get(b"authorization", b"")
        given = bearer[7:].strip() if bearer[:7].lower() == b"bearer " else headers.get(b"x-api-key", b"")
        found = [key for key in self._keys if hmac.compare_digest(key, given)]
        if not found:
            raise APIError(401, "no key, or a wrong one: send authorization: Bearer KEY", code="invalid_api_key")
        most = self._config.max_open_per_key
        if most is not None and self._open[found[0]] >= most:
            raise APIError(
                429, f"{most} requests of this key are in flight, and no more may be", code="too_many_requests"
            )
        return found[0]

    def _check_length(self, length: bytes) -> None:
        if not length.isdigit() or int(length) > self._config.max_body_bytes:
            raise self._too_large()

    def _too_large(self) -> APIError:
        return APIError(413, f"the body may have {self._config.max_body_bytes} bytes")

    def _bounded(self, receive: Receive) -> Receive:
        """A body of unknown length, up to what it may have."""
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._config.max_body_bytes:
                raise self._too_large()
            return message

        return counted
