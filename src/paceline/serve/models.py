"""What is served, its tokenizer, and how the server is: models, tokenize, health, load, metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from .. import __version__
from ..core.errors import ConfigError
from .acceptance import acceptance
from .client import EngineDown
from .generation import Server
from .http import APIError, json_response, read
from .schemas import DetokenizeRequest, TokenizeRequest


def router(server: Server) -> APIRouter:
    """The endpoints."""
    made = APIRouter()

    @made.get("/v1/models")
    async def models() -> Response:
        """The model and its applications."""
        return json_response({"object": "list", "data": [_card(server, name) for name in _names(server)]})

    @made.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        """One of them."""
        server.application(model)
        return json_response(_card(server, model))

    @made.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """Ids of a text, or of a conversation."""
        body = await read(request, TokenizeRequest, server.config.body_s)
        server.application(body.model)
        ids = _ids(server, body)
        strings = [server.texts.piece(token) for token in ids] if body.return_token_strs else None
        most = server.described.max_model_len
        return json_response({"count": len(ids), "max_model_len": most, "tokens": ids, "token_strs": strings})

    @made.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        """The text of ids."""
        body = await read(request, DetokenizeRequest, server.config.body_s)
        server.application(body.model)
        high = max(body.tokens, default=0)
        if high >= server.described.vocab_size:
            raise APIError(400, f"token id {high}: ids go up to {server.described.vocab_size - 1}", "tokens")
        return json_response({"prompt": server.texts.decode(body.tokens)})

    @made.get("/health")
    async def health() -> Response:
        """200 where requests are taken."""
        if server.draining:
            raise APIError(503, "the server is about to end", code="draining")
        if not server.client.ready:
            raise APIError(503, str(server.client.failed or "the engine is being loaded"), code="loading")
        return Response(b"", 200)

    @made.get("/version")
    async def version() -> Response:
        """Of Paceline."""
        return json_response({"version": __version__})

    @made.get("/load")
    async def load() -> Response:
        """Requests in flight."""
        counters = await _counters(server)
        held = {name: counters[name] for name in ("running", "waiting")}
        return json_response({"server_load": server.client.num_open, **held})

    @made.get("/v1/speculation")
    async def speculation() -> Response:
        """How the server drafts, and what came of it."""
        counters = await _counters(server)
        return json_response({**server.described.speculation, **acceptance(counters), "engine": counters})

    return made


def _names(server: Server) -> list[str]:
    return [server.model, *server.described.applications]


def _card(server: Server, name: str) -> dict[str, Any]:
    parent = None if name == server.model else server.model
    most = server.described.max_model_len
    found = {"id": name, "object": "model", "created": server.started, "owned_by": "paceline"}
    return found | {"root": server.described.model, "parent": parent, "max_model_len": most}


def _ids(server: Server, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise APIError(400, "give either prompt or messages", "prompt", "invalid_value")
    try:
        if body.prompt is not None:
            return server.texts.encode(body.prompt, body.add_special_tokens)
        text = server.texts.chat(
            [message.plain() for message in body.messages or ()],
            continue_final_message=body.continue_final_message,
            add_generation_prompt=body.add_generation_prompt,
            options=body.chat_template_kwargs,
        )
        return server.texts.encode(text, special=False)
    except ConfigError as error:
        raise APIError(400, str(error), "prompt", "invalid_value") from error


async def _counters(server: Server) -> dict[str, Any]:
    try:
        return await server.client.look()
    except EngineDown as error:
        raise APIError(503, str(error), code="engine_down") from error
