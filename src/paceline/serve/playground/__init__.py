"""The playground at ``/``: the files of this folder, which load nothing from elsewhere."""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

FILES = {  # by path, name and type
    "/": ("index.html", "text/html"),
    "/playground.css": ("playground.css", "text/css"),
    "/playground.js": ("playground.js", "text/javascript"),
    "/playground.svg": ("playground.svg", "image/svg+xml"),
}
PAGES = {path: (files(__name__).joinpath(name).read_bytes(), kind) for path, (name, kind) in FILES.items()}
HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


async def page(request: Request) -> Response:
    """Return a file of the page."""
    content, media_type = PAGES[request.scope["path"]]
    return Response(content, 200, HEADERS, media_type)


GETS = dict.fromkeys(FILES, page)
