"""Clients that leave, and many that stay: the engine hears of it at once, the others get whole answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
from serve_fake_worker import FakeStart

ANSWER = FakeStart().answer
ENDLESS: dict[str, Any] = {"prompt": "x", "ignore_eos": True, "max_tokens": 4000}


def test_leaving_a_stream_aborts_every_choice(start_server) -> None:
    """Oracle: the fake engine's count of dropped requests, and its running count."""
    with start_server(FakeStart(step_s=0.005)) as slow, slow.http() as http:
        with http.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True, "n": 3}) as answer:
            next(answer.iter_lines())
        _until(lambda: slow.counter("aborts") == 3)
        assert slow.services.engine.stats.running == 0
        assert slow.services.traffic.in_flight == 0
        assert 'freetoken_requests_total{outcome="disconnected"} 1.0' in http.get("/metrics").text


def test_leaving_before_an_unstreamed_answer_aborts_it(start_server) -> None:
    """Oracle: the fake engine's count of dropped requests."""
    with start_server(FakeStart(step_s=0.005)) as slow:
        with slow.http() as http:
            try:
                http.post("/v1/completions", json=ENDLESS, timeout=0.3)
            except httpx.ReadTimeout:
                pass
            else:
                raise AssertionError("an endless answer ended")
        _until(lambda: slow.counter("aborts") == 1)


def test_half_of_32_streams_dropped_the_rest_whole(start_server) -> None:
    """Oracle: the script for those who stay; nothing left at the engine afterwards."""

    async def one(client: httpx.AsyncClient, index: int) -> str:
        body = {"prompt": "p" * (1 + 97 * (index % 5)), "stream": True, "max_tokens": 100}
        text = ""
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    if index % 2 and len(text) > index % 7:
                        return ""
        return text

    async def all_of_them(base: str) -> list[str]:
        async with httpx.AsyncClient(base_url=base, timeout=30) as client:
            return await asyncio.gather(*(one(client, index) for index in range(32)))

    with start_server(FakeStart(step_s=0.003)) as slow:
        texts = asyncio.run(all_of_them(slow.base))
        assert texts == [ANSWER, ""] * 16
        _until(lambda: slow.services.engine.stats.running == 0)
        assert slow.services.traffic.in_flight == 0
        assert slow.services.engine.stats.kv_pages_used == 0


def _until(condition: Any) -> None:
    async def wait() -> None:
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.01)

    asyncio.run(wait())
