"""The real engine process is killed, or dies on every start. Oracle: what each client, /ready and the exit code say."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from attrs import field, frozen

from freetoken.models import llama
from freetoken.testing.checkpoints import write_tiny
from freetoken.testing.plugin_files import write_plugin

CLIENTS = 16
ENDLESS = {"prompt": [1, 2, 3, 4], "max_tokens": 30_000, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a context so long that no answer ends by itself."""
    config = {**llama.FAMILY.tiny(), "max_position_embeddings": 40_000}
    return write_tiny(llama.FAMILY, tmp_path_factory.mktemp("tiny"), config=config)


@pytest.fixture(scope="module")
def server(serve: Any, model: Path) -> Any:
    return serve("--model", str(model), "--threads", "1", "--max-running-requests", "8")


def engine_pid(server: Any) -> int:
    """The server's child that runs the engine."""
    for task in Path(f"/proc/{server.process.pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    raise AssertionError("the server has no engine process")


class Killing:
    """Clients that wait for endless answers, streamed and whole, running and queued, while the engine is killed."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.started = 0

    async def client(self, http: httpx.AsyncClient, stream: bool) -> str:
        async with http.stream("POST", "/v1/completions", json={**ENDLESS, "stream": stream}) as answer:
            lines = []
            async for line in answer.aiter_lines():
                if line:
                    lines.append(line)
                    self.started += len(lines) == 1
        # A stream's status stands with its first token; whole answers and those in the queue have none yet.
        assert answer.status_code == (200 if stream and len(lines) > 1 else 503)
        return str(json.loads(lines[-1].removeprefix("data: "))["error"]["code"])

    async def run(self) -> tuple[list[str], float, httpx.Response, httpx.Response]:
        limits = httpx.Limits(max_connections=CLIENTS + 1)
        async with httpx.AsyncClient(base_url=self.server.url, timeout=60, limits=limits) as http:
            clients = [asyncio.create_task(self.client(http, bool(i % 2))) for i in range(CLIENTS)]
            while self.started < 4:  # the others stream nothing: they are whole answers, or wait in the queue
                await asyncio.sleep(0.02)
            os.kill(engine_pid(self.server), signal.SIGKILL)
            killed = time.monotonic()
            codes = await asyncio.gather(*clients)
            took_s = time.monotonic() - killed
            return codes, took_s, await http.get("/ready"), await http.post("/v1/completions", json=ENDLESS)


def test_kill_9_under_load_answers_everybody_and_the_engine_comes_back(server: Any) -> None:
    codes, took_s, ready, refused = asyncio.run(Killing(server).run())
    assert codes == ["engine_dead"] * CLIENTS
    assert took_s < 5
    assert ready.status_code == 503
    assert "SIGKILL" in ready.json()["reason"]
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")
    assert int(refused.headers["retry-after"]) > 0
    limit = time.monotonic() + 60
    while server.get("/ready")[0] != 200:
        assert time.monotonic() < limit, "it did not come back"
        time.sleep(0.1)
    body = {"prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
    assert answer.json()["usage"]["completion_tokens"] == 5
    report = server.get("/health")[1]
    assert (report["status"], report["restarts"]) == ("ok", 1)
    assert "Traceback" not in server.text()


CRASHES = {
    "raises": 'raise RuntimeError("the moon is in the wrong phase")',
    "dies": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
}
REASONS = {
    "raises": "freetoken_plan_resolved raised RuntimeError: the moon is in the wrong phase",
    "dies": "the engine process was killed by SIGSEGV",
}


@frozen
class Unlucky:
    """A server whose engine never starts, and what it said about that."""

    way: str
    server: Any
    states: set[int] = field(factory=set)
    reasons: set[str] = field(factory=set)

    def ask(self) -> bool:
        """Ask how it is; ``False`` once it has ended."""
        with contextlib.suppress(OSError):  # not yet listening, or no more
            self.states.add(self.server.get("/ready")[0])
            self.reasons.add(self.server.get("/health")[1].get("reason", ""))
        return self.server.process.poll() is None


@pytest.mark.slow
def test_an_engine_that_never_starts_is_given_up_with_the_reason(serve: Any, model: Path, tmp_path: Path) -> None:
    """Five starts, further and further apart; /ready never says 200; then the server ends and says why."""
    unlucky = []
    for way, crash in CRASHES.items():
        source = f"from freetoken import hookimpl\n\n\n@hookimpl\ndef freetoken_plan_resolved(plan):\n    {crash}\n"
        site = write_plugin(tmp_path / way, "unlucky", source)
        server = serve("--model", str(model), "--threads", "1", ready=False, PYTHONPATH=str(site))
        unlucky.append(Unlucky(way, server))
    while [one for one in unlucky if one.ask()]:
        time.sleep(0.2)
    for one in unlucky:
        reason, log = REASONS[one.way], one.server.text()
        assert one.states == {503}
        assert any(reason in found for found in one.reasons)
        assert one.server.process.returncode == 1
        end = log[log.rindex("the engine has stopped") :]
        assert reason in end
        assert "5 failures" in end
        assert log.count("starting it again in") == 4
        assert [f"in {seconds:.1f} s" in log for seconds in (1, 2, 4, 8)] == [True] * 4
