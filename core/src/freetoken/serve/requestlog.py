"""The record of one request: what it asked, what it got and when; one JSON line in the log when it is over."""

from __future__ import annotations

import json
import logging
import re
import secrets
import time

from attrs import define, field

log = logging.getLogger("freetoken.request")

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def request_id_from(header: str | None) -> str:
    """The client's ``X-Request-Id`` if it is 1 to 128 letters, digits and ``._:-``, else a new one."""
    if header is not None and _SANE_ID.fullmatch(header):
        return header
    return secrets.token_hex(8)


@define
class RequestRecord:
    """Filled while the request runs; instants are ``time.monotonic`` seconds. ``finish`` is the outcome: a finish
    reason, ``deadline``, ``disconnected``, ``failed`` (the server's fault), ``refused`` (the client's) or ``ok``
    (nothing was generated). ``serial`` tells apart requests to which clients gave the same id."""

    request_id: str
    path: str
    serial: str = field(factory=lambda: secrets.token_hex(4))
    started: float = field(factory=time.monotonic)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token: float | None = None
    ended: float | None = None
    stream: bool = False
    status: int = 0
    finish: str = ""
    error: str = ""

    def engine_id(self, index: int) -> str:
        """The name under which the engine knows one choice of the request."""
        return f"{self.request_id}.{self.serial}.{index}"

    @property
    def ttft_ms(self) -> float | None:
        return None if self.first_token is None else (self.first_token - self.started) * 1e3

    @property
    def total_ms(self) -> float:
        return ((self.ended if self.ended is not None else time.monotonic()) - self.started) * 1e3

    def line(self) -> str:
        """One line of JSON."""
        ttft = self.ttft_ms
        fields: dict[str, object] = {
            "request_id": self.request_id,
            "path": self.path,
            "status": self.status,
            "finish": self.finish,
            "stream": self.stream,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "ttft_ms": None if ttft is None else round(ttft, 1),
            "total_ms": round(self.total_ms, 1),
        }
        if self.error:
            fields["error"] = self.error
        return json.dumps(fields, ensure_ascii=False)
