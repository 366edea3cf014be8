"""Bodies, errors and event streams, as OpenAI's API has them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
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
TRANSPORT = "paceline.transport"  # in a scope: the connection of uvicorn's
ANTHROPIC_KINDS = KINDS | {413: "request_too_large", 503: "overloaded_error"}
BODY_S = 30.0  # in which a request's body must come
KEEP_ALIVE_S = 15.0  # without an event, after which a stream sends a comment


class APIError(Exception):
    """An answer with an error."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self, path: str = "") -> dict[str, Any]:
        """Return the error in OpenAI's form, or in Anthropic's on its paths."""
        if path.startswith(MESSAGES):
            kind = ANTHROPIC_KINDS.get(self.status, "api_error" if self.status >= 500 else KINDS[400])
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else KINDS[400])
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, path: str = "") -> Response:
        """Return the response, with Retry-After where a retry may succeed and WWW-Authenticate without a key."""
        headers = {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": "1"}, 503: {"retry-after": "1"}}
        return json_response(self.body(path), self.status, headers.get(self.status))


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return JSON; numbers that are not finite become null."""
    return Response(to_json(content, inf_nan_mode="null"), status, headers, "application/json")


class Strict(BaseModel):
    """A request's body: no unknown field, no value of another type."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


async def read(request: Request, kind: type[M], seconds: float = BODY_S) -> M:
    """Read the body of a request.

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
        raise APIError(503, "the server is shutting down", code="draining") from error
    return checked(kind, body)


def _refusal(error: ValidationError) -> APIError:
    """Describe the first error in a body; of several accepted forms, compare with the nearest one."""
    fault = max(error.errors(include_url=False, include_input=False), key=lambda problem: len(problem["loc"]))
    forms = ("function-", "list[", "str", "int")  # of a field that has several, next to classes' names
    place = [part for part in map(str, fault["loc"]) if not part.startswith(forms) and not part[:1].isupper()]
    name = ".".join(place) or None
    words = fault["msg"][:300].encode("utf-8", "backslashreplace").decode()
    if fault["type"] == "extra_forbidden":
        return APIError(400, f"unknown field: {name}", name, "unknown_field")
    if fault["type"] == "none_required":
        return APIError(400, f"{name!r} is not supported by this server: leave it out", name, "unsupported_value")
    if fault["type"] == "json_invalid":
        return APIError(400, f"the body is not valid JSON: {words}", None, "invalid_json")
    return APIError(400, f"{name or 'body'}: {words}", name, "invalid_value")


def checked(form: type[M], body: bytes | dict[str, Any]) -> M:
    """Validate a body against one of our forms, from JSON or from values.

    Raises:
        APIError: with the first thing that is wrong.
    """
    try:
        return form.model_validate_json(body) if isinstance(body, bytes) else form.model_validate(body)
    except ValidationError as error:
        raise _refusal(error) from None


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Do something for a client until the client leaves; the body must have been read.

    Raises:
        ClientDisconnect: the client left; the work was cancelled, and has ended.
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        leaving.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


Write = Callable[[bytes], None]


class EventStream(Response):
    """A stream of server-sent events; the caller formats the bytes.

    They go to the connection itself where the server is uvicorn (`app.logged` puts its transport into the scope), past
    the layers of ASGI, which take as long as all else of a chunk; to another server's connection they go by ASGI.

    Args:
        events: writes all of them, one or several whole events at a time; cancelled when the client leaves.
        end: called at the end in any case, also where the client left before anything was written.
        keep_alive_s: after so long without an event a comment is sent.
    """

    def __init__(
        self,
        events: Callable[[Write], Awaitable[None]],
        end: Callable[[], object],
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        super().__init__(None, 200, {"cache-control": "no-cache", "x-accel-buffering": "no"}, "text/event-stream")
        del self.headers["content-length"]
        self._events, self._end, self._keep_alive_s = events, end, keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of them."""
        parts, transport, written_at = asyncio.Queue[bytes](), scope.get(TRANSPORT), time.monotonic()

        def write(data: bytes) -> None:
            nonlocal written_at
            if not data:
                return
            written_at = time.monotonic()
            if transport is None:
                parts.put_nowait(data)
            elif not transport.is_closing():
                transport.write(b"%x\r\n%b\r\n" % (len(data), data))

        async def keep_alive() -> None:
            while True:
                await asyncio.sleep(written_at + self._keep_alive_s - time.monotonic())
                if time.monotonic() - written_at >= self._keep_alive_s:
                    write(b": keep-alive\n\n")

        async def send_parts() -> None:
            while data := await parts.get():
                await send({"type": "http.response.body", "body": data, "more_body": True})

        beside, sending = asyncio.ensure_future(keep_alive()), asyncio.ensure_future(send_parts())
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


def event(content: Mapping[str, Any]) -> bytes:
    """Return one event of JSON, named by its type where it has one."""
    name = content.get("type")
    head = f"event: {name}\ndata: " if name else "data: "
    return head.encode() + to_json(content, inf_nan_mode="null") + b"\n\n"
