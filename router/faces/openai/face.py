"""The HTTP face, put together: which path is answered by which handler, and `/openapi.json`, which says so."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from router.faces.anthropic.messages import count_tokens, create_message
from router.faces.anthropic.request import Conversation, MessagesRequest
from router.faces.openai.chat import ChatRequest, chat
from router.faces.openai.completions import CompletionsRequest, complete
from router.faces.openai.desk import Desk
from router.faces.openai.information import (
    DetokenizeRequest,
    TokenizeRequest,
    detokenize,
    health,
    model,
    models,
    tokenize,
    version,
)
from router.faces.openai.responses import ResponsesRequest, respond
from shell.http.server import Call, Route
from shell.telemetry.metrics import Metrics
from tandem import __version__

_Handler = Callable[[Desk, Call], Awaitable[web.StreamResponse]]
_POSTS: Mapping[str, tuple[_Handler, type[msgspec.Struct]]] = {
    "/v1/chat/completions": (chat, ChatRequest),
    "/v1/completions": (complete, CompletionsRequest),
    "/v1/responses": (respond, ResponsesRequest),
    "/v1/messages": (create_message, MessagesRequest),
    "/v1/messages/count_tokens": (count_tokens, Conversation),
    "/tokenize": (tokenize, TokenizeRequest),
    "/detokenize": (detokenize, DetokenizeRequest),
}
_GETS: Mapping[str, _Handler] = {"/v1/models": models, "/v1/models/{model}": model, "/version": version}
_PROBES = ("/health", "/ping")


def http_routes(desk: Desk, metrics: Metrics) -> list[Route]:
    """Returns all routes of the face."""

    async def exposition(call: Call) -> web.StreamResponse:
        body, content_type = metrics.exposition(call.request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def openapi(call: Call) -> web.StreamResponse:
        return web.Response(body=description, content_type="application/json")

    description = msgspec.json.encode(openapi_document())
    return [
        *(Route("POST", path, partial(handler, desk)) for path, (handler, _) in _POSTS.items()),
        *(Route("GET", path, partial(handler, desk)) for path, handler in _GETS.items()),
        *(Route("GET", path, partial(health, desk), is_probe=True) for path in _PROBES),
        Route("GET", "/metrics", exposition),
        Route("GET", "/openapi.json", openapi),
    ]


def openapi_document() -> dict[str, Any]:
    """Returns the face's description by OpenAPI 3.1, from the types that requests are read into."""
    kinds = [kind for _, kind in _POSTS.values()]
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    answer = {"200": {"description": "An answer, or a stream of server-sent events."}}
    paths: dict[str, Any] = {
        path: {"post": {"requestBody": {"content": {"application/json": {"schema": schema}}}, "responses": answer}}
        for path, schema in zip(_POSTS, schemas, strict=True)
    }
    named = {"parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]}
    for path in (*_GETS, *_PROBES, "/metrics", "/openapi.json"):
        paths[path] = {"get": {**(named if "{" in path else {}), "responses": answer}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tandem", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }
