"""Bodies, errors and event streams, as OpenAI's API has them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import to_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
MESSAGES = "/v1/messages"  # paths that begin so are Anthropic's
RESPONSES = "/v1/responses"
ANTHROPIC_KINDS = KINDS | {404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}
RETRY_S = 1


class APIError(Exception):
    """An answer that says what is wrong."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self, path: str = "") -> dict[str, Any]:
        """In OpenAI's form, or in Anthropic's on its paths."""
        if path.startswith(MESSAGES):
            kind = ANTHROPIC_KINDS.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, path: str = "") -> Response:
        """With its status; one that may be asked again says when, one without a key how to give it."""
        again = {"retry-after": str(RETRY_S)} if self.status in (429, 503) else {}
        keyed = {"www-authenticate": "Bearer"} if self.status == 401 else {}
        return json_response(self.body(path), self.status, again | keyed)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON; what is no number there becomes null."""
    return Response(to_json(content, inf_nan_mode="null"), status, headers, "application/json")


class Strict(BaseModel):
    """A request's body: no unknown field, no value of another type."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


async def read(request: Request, kind: type[M], seconds: float) -> M:
    """A request's body.

    Raises:
        APIError: it is not JSON, not what is expected, or did not come in time.
        ClientDisconnect: the client left.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise APIError(415, "the body must be JSON: send content-type: application/json")
    try:
        body = await asyncio.wait_for(request.body(), seconds)
    except TimeoutError as error:
        raise APIError(408, f"the body did not come within {seconds:g} s") from error
    except asyncio.CancelledError as error:
        raise APIError(503, "the server ends", code="draining") from error
    return checked(kind, body)


def _refusal(error: ValidationError) -> APIError:
    """The first thing that is wrong with a body; of several forms that a value may have, with the one it is nearest."""
    fault = max(error.errors(include_url=False, include_input=False), key=lambda found: len(found["loc"]))
    forms = ("function-", "list[", "str", "int")  # of a field that has several, beside classes' names
    place = [part for part in map(str, fault["loc"]) if not part.startswith(forms) and not part[:1].isupper()]
    name = ".".join(place) or None
    if fault["type"] == "extra_forbidden":
        return APIError(400, f"unknown field: {name}", name, "unknown_field")
    if fault["type"] == "none_required":
        return APIError(400, f"{name!r} is not supported by this server: leave it out", name, "unsupported_value")
    if fault["type"] == "json_invalid":
        return APIError(400, f"the body is no JSON that can be read: {_printable(fault['msg'])}", None, "invalid_json")
    return APIError(400, f"{name or 'body'}: {_printable(fault['msg'])}", name, "invalid_value")


def checked(form: type[M], body: bytes | dict[str, Any]) -> M:
    """A body in one of our forms, from JSON or from values.

    Raises:
        APIError: with the first thing that is wrong.
    """
    try:
        return form.model_validate_json(body) if isinstance(body, bytes) else form.model_validate(body)
    except ValidationError as error:
        raise _refusal(error) from None


def _printable(text: str) -> str:
    return text[:300].encode("utf-8", "backslashreplace").decode()


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Do something for a client, until he leaves; the body must have been read.

    Raises:
        ClientDisconnect: he left; the work was cancelled, and has ended.
    """
    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for one in (task, leaving):
            one.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


Write = Callable[[bytes], None]
CONNECTION = "paceline.connection"  # among a scope's extensions; its "write" writes a part of a body


class EventStream(Response):
    """A stream of server-sent events; the caller formats the bytes.

    They go to the connection itself where it is our own (`connections`), past the layers of ASGI, which take as long as
    all else of a chunk; to another server's connection they go by ASGI.

    Args:
        events: writes all of them, one or several whole events at a time; cancelled when the client leaves.
        end: called at the end in any case, also where the client left before anything was written.
        keep_alive_s: after so long without an event a comment is sent.
    """

    def __init__(
        self, events: Callable[[Write], Awaitable[None]], end: Callable[[], object], keep_alive_s: float = 15.0
    ) -> None:
        super().__init__(None, 200, {"cache-control": "no-cache", "x-accel-buffering": "no"}, "text/event-stream")
        del self.headers["content-length"]
        self._events, self._end, self._keep_alive_s = events, end, keep_alive_s
        self._written_at = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of them."""
        parts = asyncio.Queue[bytes]()
        own = scope.get("extensions", {}).get(CONNECTION)
        connection: Write = parts.put_nowait if own is None else own["write"]

        def write(data: bytes) -> None:
            if data:
                self._written_at = time.monotonic()
                connection(data)

        beside = asyncio.ensure_future(self._keep_alive(connection))
        sending = asyncio.ensure_future(self._send_parts(parts, send))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await unless_gone(receive, self._events(write))
            beside.cancel()
            parts.put_nowait(b"")
            await sending
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientDisconnect:
            return
        finally:
            beside.cancel()
            sending.cancel()
            self._end()

    async def _send_parts(self, parts: asyncio.Queue[bytes], send: Send) -> None:
        """Send parts by ASGI until an empty one."""
        while data := await parts.get():
            await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _keep_alive(self, write: Write) -> None:
        """Send a comment where nothing was sent for long."""
        while True:
            silent = time.monotonic() - self._written_at
            if silent >= self._keep_alive_s:
                self._written_at = time.monotonic()
                write(b": keep-alive\n\n")
            else:
                await asyncio.sleep(self._keep_alive_s - silent)


DONE = b"data: [DONE]\n\n"


def event(content: Any, name: str = "") -> bytes:
    """One event of JSON."""
    head = f"event: {name}\ndata: " if name else "data: "
    return head.encode() + to_json(content, inf_nan_mode="null") + b"\n\n"


def failure(path: str, error: APIError) -> bytes:
    """The events that end a stream of any path, by who does not know what it said before."""
    if path.startswith(MESSAGES):
        return event(error.body(path), "error")
    if path.startswith(RESPONSES):
        said = {"type": "error", "code": error.code, "message": error.message, "param": None, "sequence_number": 0}
        return event(said, "error")
    return event(error.body(path)) + DONE
