"""One streamed chat completion, and when each piece of its text arrived."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from attrs import field, frozen

from freetoken.serve.bench.http import Address, request
from freetoken.vocab.errors import EngineError, UsageError

_TEXT = ("content", "reasoning_content", "reasoning")


@frozen
class Exchange:
    """Times of one answer in seconds since the request was sent, before the connection was opened.

    ``ttft_s`` is to the first text; ``arrivals_s`` are all events that carried text. ``completion_tokens`` is the
    server's own count, or the number of those events where it sends none.
    """

    ttft_s: float
    total_s: float
    arrivals_s: tuple[float, ...]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def decode_tok_s(self) -> float | None:
        """(n − 1) tokens over the time after the first; ``None`` for an answer of one."""
        rest = self.total_s - self.ttft_s
        return (self.completion_tokens - 1) / rest if self.completion_tokens > 1 and rest > 0 else None

    @property
    def prefill_tok_s(self) -> float:
        return self.prompt_tokens / self.ttft_s

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Times between one event with text and the next."""
        return tuple(b - a for a, b in pairwise(self.arrivals_s))


@frozen
class ChatServer:
    """A server to measure. ``extra`` is merged into every request; ``key`` is sent as a bearer token."""

    address: Address
    model: str
    extra: Mapping[str, object] = field(factory=dict)
    key: str | None = None
    timeout_s: float = 900.0

    @classmethod
    async def find(
        cls, address: Address, model: str | None, extra: Mapping[str, object], key: str | None, timeout_s: float
    ) -> ChatServer:
        """The server at ``address``; without ``model`` the only one it lists. Raises ``UsageError``."""
        server = cls(address, model or "", extra, key, timeout_s)
        if model:
            return server
        names = [str(item["id"]) for item in (await server.get("/v1/models")).get("data", [])]
        if len(names) != 1:
            listed = ", ".join(names) or "none"
            raise UsageError(f"a model of {address}", f"it lists {len(names)}: {listed}", "name one with --model")
        return cls(address, names[0], extra, key, timeout_s)

    async def get(self, path: str) -> Any:
        """A JSON answer. Raises ``EngineError`` for another status than 200."""
        return await self._json("GET", path, None)

    async def post(self, path: str, body: object) -> Any:
        """A JSON answer. Raises ``EngineError`` for another status than 200."""
        return await self._json("POST", path, body)

    async def _json(self, method: str, path: str, body: object) -> Any:
        async with request(self.address, method, path, body, self._headers(), self.timeout_s) as answer:
            data = await answer.body()
        if answer.status != 200:
            raise _refused(f"{method} {self.address}{path}", answer.status, data)
        return json.loads(data)

    async def ask(self, text: str, max_tokens: int) -> Exchange:
        """Stream one greedy answer to ``text``. Raises ``EngineError`` when the server refuses or breaks off."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        path = "/v1/chat/completions"
        start = time.perf_counter()
        async with request(self.address, "POST", path, body, self._headers(), self.timeout_s) as answer:
            if answer.status != 200:
                raise _refused(f"POST {self.address}{path}", answer.status, await answer.body())
            record = _Record(start)
            async for line in answer.lines():
                if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                    record.take(json.loads(line[5:]), time.perf_counter())
        return record.exchange(f"POST {self.address}{path}")

    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"} if self.key else {}


class _Record:
    """Reads events as they come."""

    def __init__(self, start: float) -> None:
        self._start = start
        self._arrivals: list[float] = []
        self._finished: float | None = None
        self._usage: Mapping[str, Any] = {}

    def take(self, event: Mapping[str, Any], now: float) -> None:
        if "error" in event:
            raise EngineError("a streamed answer", f"the server sent an error in it: {event['error']}")
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            if any(delta.get(name) for name in _TEXT):
                self._arrivals.append(now - self._start)
            if choice.get("finish_reason"):
                self._finished = now - self._start

    def exchange(self, asked: str) -> Exchange:
        if self._finished is None:
            raise EngineError(asked, "the stream ended without a finish_reason")
        # A single token may be no visible text: then the end of the answer is the first sign of it.
        arrivals = self._arrivals or [self._finished]
        details = self._usage.get("prompt_tokens_details") or {}
        return Exchange(
            ttft_s=arrivals[0],
            total_s=arrivals[-1],
            arrivals_s=tuple(arrivals),
            prompt_tokens=int(self._usage.get("prompt_tokens") or 0),
            completion_tokens=int(self._usage.get("completion_tokens") or len(arrivals)),
            cached_tokens=int(details.get("cached_tokens") or 0),
        )


def _refused(asked: str, status: int, data: bytes) -> EngineError:
    text = data.decode("utf-8", "replace").strip()
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = text[:300]
    return EngineError(asked, f"HTTP {status}: {message}")
