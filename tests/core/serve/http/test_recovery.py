"""The engine process dies: clients, readiness, recovery, and the end of a crash loop, through HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time

import httpx
import pytest
from fastapi.testclient import TestClient
from serve_bench import fake_services
from serve_fake_worker import FakeStart

from freetoken.serve.http.app import build_app
from freetoken.serve.supervisor import RestartPolicy

ENDLESS = {"prompt": "x", "ignore_eos": True, "max_tokens": 4000}


def test_kill_9_answers_every_waiting_client_then_it_serves_again(start_server) -> None:
    """Oracle: an error for all 12 clients within 5 s, /ready 503, then 200 and a whole answer."""
    policy = RestartPolicy(first=0.7, max_failures=5)
    with start_server(FakeStart(step_s=0.01), policy=policy) as running, running.http() as http:

        async def one(client: httpx.AsyncClient, stream: bool) -> str:
            async with client.stream("POST", "/v1/completions", json={**ENDLESS, "stream": stream}) as answer:
                lines = [line async for line in answer.aiter_lines() if line]
            error = json.loads(lines[-1].removeprefix("data: "))["error"]
            assert answer.status_code == (200 if stream else 503)
            return str(error["code"])

        async def load() -> tuple[list[str], float, httpx.Response]:
            async with httpx.AsyncClient(base_url=running.base, timeout=30) as client:
                waiting = [asyncio.create_task(one(client, bool(i % 2))) for i in range(12)]
                while running.services.traffic.in_flight < 12:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.1)
                os.kill(running.services.engine.engine_pid, signal.SIGKILL)
                killed = time.monotonic()
                codes = await asyncio.gather(*waiting)
                return codes, time.monotonic() - killed, await client.get("/ready")

        codes, took_s, ready = asyncio.run(load())
        assert codes == ["engine_dead"] * 12
        assert took_s < 5
        assert ready.status_code == 503
        assert "SIGKILL" in ready.json()["reason"]
        refused = http.post("/v1/completions", json=ENDLESS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")
        assert http.get("/health").json()["status"] in ("restarting", "loading")
        limit = time.monotonic() + 15
        while http.get("/ready").status_code != 200:
            assert time.monotonic() < limit, "it did not come back"
            time.sleep(0.02)
        assert (
            http.post("/v1/completions", json={"prompt": "a", "max_tokens": 5}).json()["choices"][0]["text"] == "Hello"
        )
        assert http.get("/health").json()["restarts"] == 1
        assert running.services.traffic.in_flight == 0


def test_a_request_that_kills_the_engine_is_answered(start_server) -> None:
    """Oracle: the status of the request that did it."""
    with start_server() as running, running.http() as http:
        answer = http.post("/v1/completions", json={"prompt": "DIE"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")


@pytest.mark.parametrize(("start", "reason"), [("crash", "exit code 7; 3 failures"), ("refuse", "99 GiB")])
def test_health_says_so_when_the_engine_is_given_up(start: str, reason: str) -> None:
    """Oracle: 503 and the reason, from the app alone: the server of ``freetoken serve`` ends at this point."""
    with TestClient(build_app(fake_services(FakeStart(start=start)))) as http:
        limit = time.monotonic() + 15
        while (health := http.get("/health")).status_code == 200:
            assert time.monotonic() < limit, "it was never given up"
        assert (health.status_code, health.json()["status"]) == (503, "dead")
        assert reason in health.json()["reason"]
        assert http.get("/ready").status_code == 503
        refused = http.post("/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")
        assert reason in refused.json()["error"]["message"]
