"""``POST /warmup/profile``. Oracle: a scripted engine behind the real pipe that counts the requests between."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest
from serve_bench import serve, wait_until
from serve_fake_worker import TARGET, FakeStart

from freetoken.serve.supervisor import EngineUnavailable, RestartPolicy, Supervisor

ON, OFF = {"on": True}, {"on": False}


def test_a_record_is_begun_and_ended_through_the_engine() -> None:
    with serve(profile_endpoint=True) as served, served.http() as http:
        assert http.post("/warmup/profile", json=ON).json() == {"on": True, "events": {}, "seen": 0}
        again = http.post("/warmup/profile", json=ON)
        assert (again.status_code, again.json()["why"]) == (200, "one is under way already")
        for _ in range(2):
            assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
        found = http.post("/warmup/profile", json=OFF).json()
        assert found == {"on": False, "events": {"Lazy Function Loading": 2}, "seen": 100}


def test_a_server_that_was_not_told_to_offer_it_does_not() -> None:
    with serve() as served, served.http() as http:
        answer = http.post("/warmup/profile", json=ON)
        assert answer.status_code == 404
        assert "--profile-endpoint" in answer.json()["error"]["message"]


@pytest.mark.parametrize("body", [{}, {"on": "maybe"}, {"on": True, "off": 1}])
def test_other_bodies_are_refused(body: dict[str, object]) -> None:
    with serve(profile_endpoint=True) as served, served.http() as http:
        assert http.post("/warmup/profile", json=body).status_code == 400


def test_the_key_is_wanted_as_everywhere() -> None:
    with serve(profile_endpoint=True, api_key="k") as served, served.http() as http:
        assert http.post("/warmup/profile", json=ON).status_code == 401


def test_an_engine_that_dies_before_it_answers_is_told() -> None:
    """The engine is stopped, asked, and killed."""

    async def ask() -> None:
        supervisor = Supervisor(TARGET, FakeStart(), RestartPolicy(first=0.05, longest=0.2, max_failures=3))
        supervisor.start()
        while not supervisor.serving:
            await asyncio.sleep(0.01)
        pid = supervisor.engine_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
        with pytest.raises(EngineUnavailable, match="amid a record"):
            await supervisor.profile(True)
        await supervisor.stop()
        with pytest.raises(EngineUnavailable):
            await supervisor.profile(False)

    asyncio.run(asyncio.wait_for(ask(), 30))


def test_the_server_goes_on_after_a_record() -> None:
    with serve(profile_endpoint=True) as served, served.http() as http:
        for body in (ON, OFF, ON, OFF):
            assert "why" not in http.post("/warmup/profile", json=body).json()
        wait_until(lambda: served.services.engine.serving)
