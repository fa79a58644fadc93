"""Many clients at one server over HTTP, half of whom hang up. Oracle: each prompt alone, in this process."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from attrs import frozen

from freetoken.models import llama
from freetoken.testing.checkpoints import write_tiny
from freetoken.testing.plain_answers import PlainAnswers

CONTEXT = 512
CLIENTS = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(llama.FAMILY, tmp_path_factory.mktemp("tiny"), seed=4)


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[PlainAnswers]:
    with PlainAnswers(model, max_seq_len=CONTEXT, threads=1) as answers:
        yield answers


@pytest.fixture(scope="module")
def server(serve: Any, model: Path) -> Any:
    """Room for eight requests at once, and for the tokens of only about four."""
    return serve(
        "--model", str(model), "--threads", "1", "--max-seq-len", str(CONTEXT), "--max-running-requests", "8",
        "--kv-tokens", "1200", "--max-prefill-tokens", "64",
    )  # fmt: skip


@frozen
class Client:
    """``leaves_after`` chunks it hangs up; ``None``: it stays to the end."""

    prompt: list[int]
    tokens: int
    leaves_after: int | None

    def body(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt, "max_tokens": self.tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip


@frozen
class Heard:
    """What a client got."""

    text: str
    finish: str | None
    tokens: int
    whole: bool  # the stream ended with [DONE]


def crowd(seed: int) -> list[Client]:
    """Short and long prompts, half of them beginning alike; every other client leaves, some before the first token."""
    rng = random.Random(seed)
    stem = [rng.randrange(250) for _ in range(300)]
    clients = []
    for number in range(CLIENTS):
        shared = rng.choice((0, 0, 40, 290))
        own = [rng.randrange(250) for _ in range(rng.choice((3, 10, 60)))]
        leaves = rng.choice((0, 1, 3, 8)) if number % 2 else None
        clients.append(Client([*stem[:shared], *own], rng.randrange(10, 50), leaves))
    return clients


async def talk(http: httpx.AsyncClient, client: Client) -> Heard:
    text, finish, tokens, chunks = "", None, 0, 0
    async with http.stream("POST", "/v1/completions", json=client.body()) as answer:
        assert answer.status_code == 200
        if client.leaves_after == 0:
            return Heard(text, finish, tokens, whole=False)
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                return Heard(text, finish, tokens, whole=True)
            event = json.loads(line[6:])
            assert "error" not in event, event
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            for choice in event["choices"]:
                text += choice["text"]
                finish = choice["finish_reason"] or finish
                chunks += 1
            if client.leaves_after is not None and chunks >= client.leaves_after:
                return Heard(text, finish, tokens, whole=False)
    return Heard(text, finish, tokens, whole=False)


async def talk_all(url: str, clients: list[Client]) -> list[Heard]:
    limits = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        return list(await asyncio.gather(*(talk(http, client) for client in clients)))


def wait_until_free(server: Any, timeout_s: float = 20.0) -> None:
    """Nothing is held, and that for longer than the engine's reports are apart."""
    limit = time.monotonic() + timeout_s
    free_since = None
    while time.monotonic() < limit:
        report = server.get("/health")[1]
        if (report["running"], report["waiting"], report["kv_pages_used"]) != (0, 0, 0):
            free_since = None
        elif free_since is None:
            free_since = time.monotonic()
        elif time.monotonic() - free_since > 1.5:
            return
        time.sleep(0.1)
    raise AssertionError(f"pages are still held: {report}")


def test_the_rest_get_whole_answers_and_then_no_page_is_held(server: Any, plain: PlainAnswers) -> None:
    clients = crowd(seed=1)
    heard = asyncio.run(talk_all(server.url, clients))
    stayed = [(c, h) for c, h in zip(clients, heard, strict=True) if c.leaves_after is None]
    assert len(stayed) == CLIENTS // 2
    compared = 0
    for client, answer in stayed:
        assert (answer.whole, answer.finish, answer.tokens) == (True, "length", client.tokens)
        expected = plain.text(client.prompt, client.tokens)
        if expected is not None:
            assert answer.text == expected
            compared += 1
    assert compared > CLIENTS // 4
    for client, answer in zip(clients, heard, strict=True):
        assert answer.whole == (client.leaves_after is None or answer.tokens == client.tokens)
    wait_until_free(server)
    assert server.get("/health")[1]["kv_pages_cached"] > 0, "what was computed is kept for the next"


def test_when_everybody_leaves_nothing_is_held(server: Any) -> None:
    clients = [Client(c.prompt, 400 - len(c.prompt), number % 3) for number, c in enumerate(crowd(seed=2))]
    asyncio.run(talk_all(server.url, clients))
    wait_until_free(server)


@pytest.mark.parametrize("n", [2, 5])
def test_several_answers_to_one_prompt_are_the_plain_one(server: Any, plain: PlainAnswers, n: int) -> None:
    prompt, tokens = [(i * i + n) % 250 for i in range(50)], 20
    expected = plain.text(prompt, tokens)
    assert expected is not None
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "n": n}
    for _ in range(2):  # the second time from the cache
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        assert [choice["text"] for choice in answer["choices"]] == [expected] * n
        assert answer["usage"]["completion_tokens"] == n * tokens
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 48


def test_seeds_reproduce_over_http_whoever_else_is_there(server: Any) -> None:
    """Oracle: the same request alone; ``n`` answers differ from each other."""
    body = {"prompt": [5, 6, 7], "max_tokens": 24, "temperature": 1, "seed": 3, "n": 3, "ignore_eos": True}

    async def ask(count: int) -> list[list[str]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(count)))
        return [[choice["text"] for choice in answer.json()["choices"]] for answer in answers]

    alone = asyncio.run(ask(1))[0]
    assert len(set(alone)) == 3
    assert asyncio.run(ask(6)) == [alone] * 6
