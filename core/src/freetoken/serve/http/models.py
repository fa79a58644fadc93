"""``GET /v1/models`` and ``GET /v1/models/{id}``: the one model this server has."""

from __future__ import annotations

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from freetoken.serve.http.errors import ApiError
from freetoken.serve.http.services import Services, services_of


async def list_models(request: Request) -> Response:
    """All models."""
    return JSONResponse({"object": "list", "data": [_card(services_of(request))]})


async def get_model(request: Request) -> Response:
    """One model by its id, which may hold slashes."""
    services = services_of(request)
    check_model(services, request.path_params["model"])
    return JSONResponse(_card(services))


def check_model(services: Services, name: str | None) -> None:
    """``ApiError`` 404 unless ``name`` is absent or the served one."""
    if name is not None and name != services.served_name:
        message = f"there is no model {name[:200]!r} here; this server serves {services.served_name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


def _card(services: Services) -> dict[str, object]:
    ready = services.engine.status.ready
    card: dict[str, object] = {
        "id": services.served_name,
        "object": "model",
        "created": services.started_unix,
        "owned_by": "freetoken",
    }
    return card | ({"max_model_len": ready.max_seq_tokens} if ready is not None else {})
