"""The parts of the server put together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from .. import __version__
from . import chat, completions, messages, metrics, models, playground, responses
from .config import ServeConfig
from .generation import Server
from .guard import Guard
from .http import APIError, Gone
from .openapi import schema

log = logging.getLogger(__name__)
# A family of endpoints each.
ROUTERS = (chat.router, completions.router, messages.router, responses.router, models.router, metrics.router)


def make_app(server: Server, config: ServeConfig) -> ASGIApp:
    """The application.

    Raises:
        ConfigError: keys that cannot be used, or are needed.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        server.client.start()
        preparing = asyncio.ensure_future(server.prepare())
        yield
        preparing.cancel()
        await server.client.close()

    app = FastAPI(
        title="Paceline", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    for router in ROUTERS:
        app.include_router(router(server))
    app.include_router(playground.router())
    app.openapi = lambda: schema(app)  # type: ignore[method-assign]
    app.add_exception_handler(APIError, _said)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(Gone, _gone)
    app.add_exception_handler(Exception, _failed)
    return Guard(app, config, config.keys())


async def _said(request: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    return error.response(request.url.path)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {404: "there is no such path", 405: "this path has no such method"}
    return APIError(error.status_code, words.get(error.status_code, str(error.detail))).response(request.url.path)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(b"", 499)


async def _failed(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return APIError(500, "the server failed at this request; its log says more").response(request.url.path)
