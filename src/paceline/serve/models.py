"""Endpoints of the model and the server: models, health, load, metrics."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from .. import __version__
from .client import EngineDown
from .generation import Server
from .http import APIError, json_response


def _server(request: Request) -> Server:
    server: Server = request.app.state.server
    return server


async def models(request: Request) -> Response:
    """Return the model and its applications."""
    server = _server(request)
    names = [server.model, *server.described.applications]
    return json_response({"object": "list", "data": [_card(server, name) for name in names]})


async def model(request: Request) -> Response:
    """Return one model or application."""
    server, model = _server(request), request.path_params["model"]
    server.application(model)
    return json_response(_card(server, model))


def _card(server: Server, name: str) -> dict[str, Any]:
    parent = None if name == server.model else server.model
    most = server.described.max_model_len
    card = {"id": name, "object": "model", "created": server.started, "owned_by": "paceline"}
    return card | {"root": server.described.model, "parent": parent, "max_model_len": most}


async def health(request: Request) -> Response:
    """Return status 200 if requests are accepted."""
    server = _server(request)
    if server.draining:
        raise APIError(503, "the server is shutting down", code="draining")
    if not server.client.ready:
        raise APIError(503, str(server.client.failed or "the engine is being loaded"), code="loading")
    return Response(b"", 200)


async def version(request: Request) -> Response:
    """Return the version of Paceline."""
    return json_response({"version": __version__})


async def load(request: Request) -> Response:
    """Return the number of requests in flight."""
    counters = await _counters(request)
    held = {name: counters[name] for name in ("running", "waiting")}
    return json_response({"server_load": _server(request).client.num_open, **held})


async def speculation(request: Request) -> Response:
    """Return how the server drafts, and the engine's counters."""
    counters = await _counters(request)
    drafts = dict(_server(request).described.speculation)
    drafts["off_reason"] = counters["speculation"]["failure"] or drafts["off_reason"]
    return json_response({**drafts, "engine": counters})


async def _counters(request: Request) -> dict[str, Any]:
    try:
        return await _server(request).client.look()
    except EngineDown as error:
        raise APIError(503, str(error), code="engine_down") from error


async def metrics(request: Request) -> Response:
    """Return counters, gauges and histograms."""
    server = _server(request)
    text = await (server.all_metrics or server.metrics)()
    return Response(text, 200, media_type="text/plain; version=0.0.4; charset=utf-8")


GETS = {
    "/v1/models": models,
    "/v1/models/{model:path}": model,
    "/health": health,
    "/version": version,
    "/load": load,
    "/v1/speculation": speculation,
    "/metrics": metrics,
}
