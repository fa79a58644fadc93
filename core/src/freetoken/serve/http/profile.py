"""``POST /warmup/profile``: begin or end a record of what the driver loads, for ``freetoken warmup verify``."""

from __future__ import annotations

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from freetoken.serve.http.body import parse_body, read_body
from freetoken.serve.http.errors import ApiError
from freetoken.serve.http.request_models import ProfileBody
from freetoken.serve.http.services import services_of


async def profile(request: Request) -> Response:
    """``{"on": true}``, later ``{"on": false}`` for what was recorded between; ``why`` says what is in the way.

    A record slows every request, so the server has to be started with ``--profile-endpoint``; 404 where it was not.
    """
    services = services_of(request)
    if not services.profile_endpoint:
        raise ApiError(404, "this server was not started with --profile-endpoint")
    body = parse_body(await read_body(request, services.limits.max_body_bytes), ProfileBody)
    answer = await services.engine.profile(body.on)
    found: dict[str, object] = {"on": answer.on, "events": dict(answer.events), "seen": answer.seen}
    if answer.why:
        found["why"] = answer.why
    return JSONResponse(found)
