"""The parts of the server put together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import models, playground
from .chat import chat
from .completions import completions
from .config import ServeConfig
from .generation import ANSWERS, Answer, Server
from .guard import Guard
from .http import TRANSPORT, APIError, read, unless_gone
from .messages import CountRequest, MessagesRequest, count_tokens, messages
from .responses import ResponsesRequest, responses
from .schemas import ChatRequest, CompletionRequest

log = logging.getLogger(__name__)
# Paths of POST: the form of the body and the function that answers it.
POSTS: dict[str, tuple[type[BaseModel], Callable[[Server, Any], Awaitable[Response]]]] = {
    "/v1/chat/completions": (ChatRequest, chat),
    "/v1/completions": (CompletionRequest, completions),
    "/v1/messages": (MessagesRequest, messages),
    "/v1/messages/count_tokens": (CountRequest, count_tokens),
    "/v1/responses": (ResponsesRequest, responses),
}


def make_app(server: Server, config: ServeConfig) -> ASGIApp:
    """Return the ASGI application.

    Raises:
        ConfigError: keys that cannot be used, or are needed.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        server.client.start()
        preparing = asyncio.ensure_future(server.prepare())
        yield
        preparing.cancel()
        await server.client.close()

    routes = [Route(path, _posted(form, answer), methods=["POST"]) for path, (form, answer) in POSTS.items()]
    routes += [Route(path, answer) for path, answer in (models.GETS | playground.GETS).items()]
    refusals: Any = dict.fromkeys((APIError, HTTPException, ClientDisconnect, Exception), _refused)
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=refusals)
    app.router.redirect_slashes = False
    app.state.server = server
    return logged(Guard(app, config, config.keys()))


def logged(app: ASGIApp) -> ASGIApp:
    """Log a line for each request: at info what is posted, all else at debug."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        status, answers = 499, list[Answer]()
        ANSWERS.set(answers)
        scope[TRANSPORT] = getattr(getattr(send, "__self__", None), "transport", None)

        async def noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await app(scope, receive, noted)
        finally:
            if scope["type"] == "http":
                level = logging.INFO if scope["method"] == "POST" else logging.DEBUG
                parts = [f"{scope['method']} {quote(scope['path'])} {status}", *(one.summary() for one in answers)]
                log.log(level, "%s", ", ".join(parts))

    return call


def _posted(
    form: type[BaseModel], answer: Callable[[Server, Any], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that reads a body, checks its ``model``, and answers while the client is connected."""

    async def posted(request: Request) -> Response:
        server: Server = request.app.state.server
        body: Any = await read(request, form)
        server.application(body.model)
        return await unless_gone(request.receive, answer(server, body))

    return posted


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(b"", 499)
    if isinstance(error, HTTPException):
        words = {404: "there is no such path", 405: "this path has no such method"}
        error = APIError(error.status_code, words.get(error.status_code, str(error.detail)))
    elif not isinstance(error, APIError):
        log.error("%s %s failed", request.method, request.scope["path"], exc_info=error)
        error = APIError(500, "the server failed at this request; see its log")
    return error.response(request.scope["path"])
