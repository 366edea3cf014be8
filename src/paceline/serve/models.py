"""Endpoints of the model and the server: models, tokenize, health, load, metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from .. import __version__
from ..core.errors import ConfigError
from .client import EngineDown
from .generation import Server, field_of
from .http import APIError, json_response
from .schemas import DetokenizeRequest, TokenizeRequest

router = APIRouter()


def _server(request: Request) -> Server:
    server: Server = request.app.state.server
    return server


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """Return the model and its applications."""
    server = _server(request)
    names = [server.model, *server.described.applications]
    return json_response({"object": "list", "data": [_card(server, name) for name in names]})


@router.get("/v1/models/{model:path}")
async def model(request: Request, model: str) -> Response:
    """Return one model or application."""
    server = _server(request)
    server.application(model)
    return json_response(_card(server, model))


def _card(server: Server, name: str) -> dict[str, Any]:
    parent = None if name == server.model else server.model
    most = server.described.max_model_len
    card = {"id": name, "object": "model", "created": server.started, "owned_by": "paceline"}
    return card | {"root": server.described.model, "parent": parent, "max_model_len": most}


async def tokenize(server: Server, body: TokenizeRequest) -> Response:
    """Return the ids of a text, or of a conversation."""
    if (body.prompt is None) == (body.messages is None):
        raise APIError(400, "a request has either 'prompt' or 'messages': send one of them", "prompt", "invalid_value")
    texts, place = server.texts, "messages" if body.prompt is None else "prompt"
    try:
        ids = texts.conversation(body) if body.prompt is None else texts.encode(body.prompt, body.add_special_tokens)
    except ConfigError as error:
        raise APIError(400, str(error), field_of(place, error) or place, "invalid_value") from error
    strings = [texts.piece(token) for token in ids] if body.return_token_strs else None
    most = server.described.max_model_len
    return json_response({"count": len(ids), "max_model_len": most, "tokens": ids, "token_strs": strings})


async def detokenize(server: Server, body: DetokenizeRequest) -> Response:
    """Return the text of ids."""
    high = max(body.tokens, default=0)
    if high >= server.described.vocab_size:
        raise APIError(400, f"token id {high}: ids go up to {server.described.vocab_size - 1}", "tokens")
    return json_response({"prompt": server.texts.decode(body.tokens)})


@router.get("/health")
async def health(request: Request) -> Response:
    """Return status 200 if requests are accepted."""
    server = _server(request)
    if server.draining:
        raise APIError(503, "the server is shutting down", code="draining")
    if not server.client.ready:
        raise APIError(503, str(server.client.failed or "the engine is being loaded"), code="loading")
    return Response(b"", 200)


@router.get("/version")
async def version() -> Response:
    """Return the version of Paceline."""
    return json_response({"version": __version__})


@router.get("/load")
async def load(request: Request) -> Response:
    """Return the number of requests in flight."""
    counters = await _counters(request)
    held = {name: counters[name] for name in ("running", "waiting")}
    return json_response({"server_load": _server(request).client.num_open, **held})


@router.get("/v1/speculation")
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


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return counters, gauges and histograms."""
    server = _server(request)
    text = await (server.all_metrics or server.metrics)()
    return Response(text, 200, media_type="text/plain; version=0.0.4; charset=utf-8")
