"""What is read off a stream. Oracle: a scripted stream whose tokens, usage and pauses are known."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any

import pytest
from scripted_server import framed, scripted

from freetoken.serve.bench.chat import ChatServer, Exchange
from freetoken.vocab.errors import EngineError, UsageError

PAUSE_S = 0.02


def data(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def chunk(finish: str | None = None, **delta: object) -> bytes:
    return data(choices=[{"index": 0, "delta": delta, "finish_reason": finish}])


USAGE = data(
    choices=[], usage={"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
)
DONE = b"data: [DONE]\n\n"


def ask(*events: bytes, pause_s: float = 0.0, **extra: object) -> tuple[Exchange, dict[str, Any]]:
    async def run() -> tuple[Exchange, dict[str, Any]]:
        head = b"HTTP/1.1 200 OK\r\n\r\n"
        async with scripted([head, *events], pause_s) as server:
            exchange = await ChatServer(server.address, "m", extra, "key").ask("hello", 5)
            return exchange, json.loads(server.requests[0].partition(b"\r\n\r\n")[2])

    return asyncio.run(run())


def test_times_are_those_of_the_text() -> None:
    """The role's empty chunk is no token; sleeps are never shorter than asked for."""
    events = [chunk(role="assistant", content=""), chunk(content="a"), chunk(reasoning_content="b"), chunk(content="c"),
              chunk("stop"), USAGE, DONE]  # fmt: skip
    exchange, _ = ask(*events, pause_s=PAUSE_S)
    assert len(exchange.arrivals_s) == 3
    assert exchange.ttft_s >= 3 * PAUSE_S
    assert exchange.total_s >= 5 * PAUSE_S
    assert exchange.gaps_s == pytest.approx([b - a for a, b in pairwise(exchange.arrivals_s)])
    assert (exchange.prompt_tokens, exchange.completion_tokens, exchange.cached_tokens) == (9, 5, 4)
    assert exchange.decode_tok_s == pytest.approx(4 / (exchange.total_s - exchange.ttft_s))
    assert exchange.prefill_tok_s == pytest.approx(9 / exchange.ttft_s)


def test_a_token_without_text_ends_with_the_answer() -> None:
    exchange, _ = ask(chunk(role="assistant", content=""), chunk("length"), DONE)
    assert exchange.ttft_s == exchange.total_s
    assert exchange.completion_tokens == 1
    assert exchange.decode_tok_s is None


def test_without_usage_texts_are_counted() -> None:
    exchange, _ = ask(chunk(content="a"), chunk("stop", content="b"), DONE)
    assert exchange.completion_tokens == 2


def test_extra_fields_are_sent() -> None:
    _, body = ask(chunk("stop", content="a"), DONE, ignore_eos=True, temperature=1)
    assert body["ignore_eos"] is True
    assert body["temperature"] == 1
    assert body["stream_options"] == {"include_usage": True}
    assert body["messages"] == [{"role": "user", "content": "hello"}]


def test_a_stream_without_an_end_is_an_error() -> None:
    with pytest.raises(EngineError, match="without a finish_reason"):
        ask(chunk(content="a"))


def test_an_error_in_the_stream_is_an_error() -> None:
    with pytest.raises(EngineError, match="boom"):
        ask(chunk(content="a"), data(error={"message": "boom"}))


def test_a_refusal_carries_the_servers_words() -> None:
    async def run() -> None:
        answer = framed([b'{"error": {"message": "too long by 7"}}'], "length").replace(b"200 OK", b"400 Bad Request")
        async with scripted([answer]) as server:
            await ChatServer(server.address, "m").ask("x", 1)

    with pytest.raises(EngineError, match="HTTP 400: too long by 7"):
        asyncio.run(run())


@pytest.mark.parametrize(("listed", "found"), [(["a"], "a"), ([], None), (["a", "b"], None)])
def test_the_only_model_is_taken(listed: list[str], found: str | None) -> None:
    async def run() -> str:
        models = json.dumps({"data": [{"id": name} for name in listed]}).encode()
        async with scripted([framed([models], "length")]) as server:
            return (await ChatServer.find(server.address, None, {}, None, 5)).model

    if found:
        assert asyncio.run(run()) == found
    else:
        with pytest.raises(UsageError, match="--model"):
            asyncio.run(run())
