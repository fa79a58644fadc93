"""The gate every request passes: its id, the key, the last net under exceptions, the record in the books."""

from __future__ import annotations

import hmac
import time
from collections.abc import MutableMapping
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from freetoken.serve.http.errors import ApiError, ClientGone, to_api_error
from freetoken.serve.http.services import RECORD_KEY, Services
from freetoken.serve.requestlog import RequestRecord, log, request_id_from

OPEN_PATHS = frozenset({"/health", "/ready"})
GENERATION_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})


class Gate:
    """Outermost of all: whatever happens further in, the client gets an answer in the API's shape."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        record = RequestRecord(request_id_from(headers.get("x-request-id")), scope["path"])
        scope[RECORD_KEY] = record
        tagged = _Tagged(send, record)
        try:
            check_key(self._services.api_key, scope["path"], headers.get("authorization"))
            await self._app(scope, receive, tagged)
        except ClientGone:
            record.finish = "disconnected"
        except Exception as error:
            await _answer(error, tagged, record)
        finally:
            self._close(record, scope["method"])

    def _close(self, record: RequestRecord, method: str) -> None:
        record.ended = time.monotonic()
        if not record.finish:
            record.finish = _outcome(record.status)
        if method != "POST":
            return
        log.info("%s", record.line())
        if record.path in GENERATION_PATHS:
            self._services.metrics.count(record)


class _Tagged:
    """``send`` that adds the request id to the answer and notes its status."""

    __slots__ = ("_record", "_send", "started")

    def __init__(self, send: Send, record: RequestRecord) -> None:
        self._send, self._record = send, record
        self.started = False

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self._record.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self._record.request_id.encode())]
        await self._send(message)


def check_key(key: str | None, path: str, authorization: str | None) -> None:
    """``ApiError`` 401 unless ``authorization`` is ``Bearer KEY``; compared in constant time."""
    if key is None or path in OPEN_PATHS:
        return
    scheme, _, given = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not given:
        raise _unauthorised("no API key was sent; send the header 'Authorization: Bearer KEY'")
    # Headers were decoded as Latin-1; this gives the bytes back as they were sent.
    if not hmac.compare_digest(given.strip().encode("latin-1"), key.encode()):
        raise _unauthorised("the API key is wrong")


def _outcome(status: int) -> str:
    """Of a request that generated nothing; one without a status was cut off by the server's end."""
    if not status or status >= 500:
        return "failed"
    return "refused" if status >= 400 else "ok"


def _unauthorised(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


async def _answer(error: Exception, send: _Tagged, record: RequestRecord) -> None:
    problem = to_api_error(error)
    record.error = problem.message
    record.finish = "failed" if problem.status >= 500 else "refused"
    if send.started:
        return
    body = problem.encoded()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **problem.headers}
    if problem.status == 413:
        headers["Connection"] = "close"  # the rest of the body is not read
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": problem.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
