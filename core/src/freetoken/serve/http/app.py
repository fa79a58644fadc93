"""The HTTP application: which path is answered by whom."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from attrs import frozen
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from freetoken import __version__
from freetoken.serve.http import chat, completions, health, models, profile, tokenize
from freetoken.serve.http.errors import ApiError
from freetoken.serve.http.gate import Gate
from freetoken.serve.http.request_models import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    ProfileBody,
    RequestBody,
    TokenizeBody,
)
from freetoken.serve.http.services import Services

Endpoint = Callable[[Request], Awaitable[Response]]


@frozen
class Route:
    """One path. ``body`` describes what it takes, for the OpenAPI document; the endpoint parses it itself."""

    method: str
    path: str
    endpoint: Endpoint
    body: type[RequestBody] | None = None


ROUTES = (
    Route("POST", "/v1/chat/completions", chat.chat_completions, ChatBody),
    Route("POST", "/v1/completions", completions.completions, CompletionBody),
    Route("GET", "/v1/models", models.list_models),
    Route("GET", "/v1/models/{model:path}", models.get_model),
    Route("POST", "/tokenize", tokenize.tokenize, TokenizeBody),
    Route("POST", "/detokenize", tokenize.detokenize, DetokenizeBody),
    Route("GET", "/health", health.health),
    Route("GET", "/ready", health.ready),
    Route("GET", "/metrics", health.metrics),
    Route("POST", "/warmup/profile", profile.profile, ProfileBody),
)


def build_app(services: Services) -> FastAPI:
    """The application over ``services``. Its lifespan launches the engine and ends it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        services.engine.start()
        try:
            yield
        finally:
            await services.engine.stop()

    app = FastAPI(title="FreeToken", version=__version__, lifespan=lifespan, redirect_slashes=False)
    app.state.services = services
    for route in ROUTES:
        app.add_api_route(
            route.path,
            route.endpoint,
            methods=[route.method],
            response_class=Response,
            openapi_extra=_described(route.body),
        )
    app.add_exception_handler(HTTPException, _routing_error)
    app.add_middleware(Gate, services=services)
    return app


async def _routing_error(request: Request, error: Exception) -> Response:
    """A path or a method nobody answers, in the API's shape."""
    assert isinstance(error, HTTPException)
    known = ", ".join(f"{route.method} {route.path}" for route in ROUTES)
    asked = f"{request.method} {request.url.path[:200]}"
    problem = ApiError(error.status_code, f"there is no {asked} here; this server answers {known}")
    return Response(problem.encoded(), error.status_code, error.headers, media_type="application/json")


def _described(body: type[RequestBody] | None) -> dict[str, Any] | None:
    if body is None:
        return None
    schema = body.model_json_schema()
    definitions = schema.pop("$defs", {})
    content = {"application/json": {"schema": _inlined(schema, definitions)}}
    return {"requestBody": {"required": True, "content": content}}


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """``schema`` without references: OpenAPI would look for them elsewhere."""
    if isinstance(schema, list):
        return [_inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {key: _inlined(value, definitions) for key, value in schema.items()}
