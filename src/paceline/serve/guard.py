"""What every request must pass before an endpoint sees it: host, key, size."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .config import ServeConfig
from .http import APIError
from .playground import FILES

MAX_BODY_BYTES = 4 * 2**20
OPEN = ("/health", *FILES)  # paths that no key guards


class Guard:
    """Refuses requests under a foreign name, without a key, or with a body that is too large.

    A page from elsewhere can make a browser send requests to this host under a name of its own that leads here: its
    Host header shows that.

    Args:
        app: the guarded application.
        config: names of this server.
        keys: of which a request must have one; empty: none is needed.
    """

    def __init__(self, app: ASGIApp, config: ServeConfig, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._hosts = {"localhost", config.host, *(config.allowed_hosts or ())}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        too_large, size = APIError(413, f"the body is too large: send at most {MAX_BODY_BYTES} bytes"), 0

        async def bounded() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > MAX_BODY_BYTES:
                raise too_large
            return message

        try:
            headers = dict(scope["headers"])
            self._check_host(headers.get(b"host", b"").decode("latin-1"))
            self._check_key(scope["path"], headers)
            length = headers.get(b"content-length", b"0")
            if not length.isdigit() or int(length) > MAX_BODY_BYTES:
                raise too_large
        except APIError as error:
            await error.response(scope["path"])(scope, receive, send)
            return
        await self._app(scope, bounded, send)

    def _check_host(self, host: str) -> None:
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        name = name.strip("[]")
        try:
            ipaddress.ip_address(name)  # an address cannot be made to lead elsewhere
            return
        except ValueError:
            pass
        if name.lower() not in self._hosts:
            remedy = "use its address, or start it with --allowed-hosts"
            raise APIError(400, f"this server is not called {name[:100]!r}: {remedy}", code="host_not_allowed")

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        if not self._keys or path in OPEN:
            return
        bearer = headers.get(b"authorization", b"")
        key_sent = bearer[7:].strip() if bearer[:7].lower() == b"bearer " else headers.get(b"x-api-key", b"")
        if not [key for key in self._keys if hmac.compare_digest(key, key_sent)]:  # each is compared: constant time
            raise APIError(401, "the key is missing or wrong: send authorization: Bearer KEY", code="invalid_api_key")
