"""Errors as the OpenAI API words them: ``{"error": {"message", "type", "param", "code"}}`` and a status."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from freetoken.serve.client import EngineDied, RequestRefused
from freetoken.serve.sse import dumps
from freetoken.serve.supervisor import EngineUnavailable
from freetoken.vocab.errors import CheckpointError, Refusal, UsageError

_log = logging.getLogger("freetoken.http")

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large", 429: "queue_full"}
UNAVAILABLE_RETRY_S = 2


class ApiError(Exception):
    """An answer that is an error. ``param`` is the field at fault, ``code`` is for programs, ``headers`` go along."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code if code is not None else _CODES.get(status)
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        fallback = "server_error" if self.status >= 500 else "invalid_request_error"
        return _TYPES.get(self.status, fallback)

    def body(self) -> dict[str, object]:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    def encoded(self) -> bytes:
        # A message may quote the client's own broken text.
        return dumps(self.body()).encode("utf-8", "replace")


class ClientGone(Exception):
    """The client hung up; there is nobody to answer."""


def one_line(refusal: Refusal) -> str:
    """``asked: found; fix``."""
    text = f"{refusal.asked}: {refusal.found}" if refusal.found else refusal.asked
    return f"{text}; {refusal.fix}" if refusal.fix else text


def to_api_error(error: BaseException) -> ApiError:
    """Whatever was raised while serving a request, as the answer. What nobody foresaw is logged with its stack and told
    to the client without."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineUnavailable):
        return _unavailable(one_line(error.refusal), error.code)
    if isinstance(error, EngineDied):
        return _unavailable(one_line(error.refusal), "engine_dead")
    if isinstance(error, RequestRefused):
        headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
        return ApiError(error.status, one_line(error.refusal), headers=headers)
    if isinstance(error, UsageError | CheckpointError):
        name = error.refusal.asked.partition("=")[0]
        return ApiError(400, one_line(error.refusal), param=name if name.isidentifier() else None)
    _log.error("an unexpected error while serving a request", exc_info=error)
    return ApiError(500, "an unexpected error; the server's log holds the details", code="internal_error")


def _unavailable(message: str, code: str) -> ApiError:
    return ApiError(503, message, code=code, headers={"Retry-After": str(UNAVAILABLE_RETRY_S)})
