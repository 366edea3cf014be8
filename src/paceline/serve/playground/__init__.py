"""The playground at ``/``: the files of this folder, which load nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
FILES = {
    "/": "index.html",
    "/playground.css": "playground.css",
    "/playground.js": "playground.js",
    "/playground.svg": "playground.svg",
}
HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


def router() -> APIRouter:
    """The page's paths."""
    made = APIRouter(include_in_schema=False)
    for path, name in FILES.items():
        data = files(__name__).joinpath(name).read_bytes()
        made.add_api_route(path, _sender(data, TYPES[name.rpartition(".")[2]]), methods=["GET"])
    return made


def _sender(data: bytes, media_type: str) -> Callable[[], Awaitable[Response]]:
    async def send() -> Response:
        return Response(data, 200, HEADERS, media_type)

    return send
