"""The page ``/openapi.json``: bodies are read by the endpoints themselves, so their schemas are added here."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from .messages import CountRequest, MessagesRequest
from .responses import ResponsesRequest
from .schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

BODIES = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/messages": MessagesRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
REFUSALS = ("400", "401", "404", "408", "413", "415", "429", "503")


def schema(app: FastAPI) -> dict[str, Any]:
    """The page of an application."""
    if app.openapi_schema is None:
        page = get_openapi(title=app.title, version=app.version, routes=app.routes)
        where = "#/components/schemas/{model}"
        kinds: Any = [(kind, "validation") for kind in BODIES.values()]
        _, found = models_json_schema(kinds, ref_template=where)
        page.setdefault("components", {})["schemas"] = found["$defs"]
        for path, kind in BODIES.items():
            content = {"application/json": {"schema": {"$ref": where.format(model=kind.__name__)}}}
            page["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
        for methods in page["paths"].values():
            for said in methods.values():
                said["responses"].pop("422", None)
                said["responses"] |= {status: {"description": "an error"} for status in REFUSALS}
        app.openapi_schema = page
    return app.openapi_schema
