"""The server as a newcomer meets it. Oracles: the official `openai` client, and the in-process engine."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import openai
import pytest

pytestmark = [pytest.mark.model, pytest.mark.slow]
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server(serve: Any) -> Any:
    return serve("--max-seq-len", "1024", "--dtype", "float32")


@pytest.fixture(scope="module")
def client(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def test_a_sensible_answer_streams(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="smollm2", messages=QUESTION, stream=True, temperature=0, max_tokens=32,
        stream_options={"include_usage": True},
    )  # fmt: skip
    text, usage, finish = "", None, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert text == "The capital of France is Paris."
    assert finish == "stop"
    assert usage is not None
    assert usage.prompt_tokens == 37
    assert usage.completion_tokens == 8


def test_whole_and_streamed_answers_are_one(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "smollm2", "messages": QUESTION, "seed": 11, "max_tokens": 24}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    pieces = [c.choices[0].delta.content or "" for c in client.chat.completions.create(**asked, stream=True)]
    assert "".join(pieces) == whole


def test_the_wheel_is_served_without_naming_it(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["smollm2"]


def test_an_abandoned_stream_frees_its_pages(server: Any, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="smollm2", messages=QUESTION, stream=True, max_tokens=900, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    limit = time.monotonic() + 20
    while time.monotonic() < limit:
        stats = server.get("/health")[1]
        if stats.get("running") == 0 and stats.get("kv_pages_used") == 0:
            return
        time.sleep(0.2)
    raise AssertionError(f"pages are still held: {server.get('/health')}")


def test_a_taken_port_is_a_clear_error(server: Any) -> None:
    port = server.url.rpartition(":")[2]
    done = subprocess.run(
        [sys.executable, "-m", "freetoken", "serve", "--port", port], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert port in done.stderr
    assert "Traceback" not in done.stderr


def test_generate_prints_the_answer(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "freetoken", "generate", "smollm2", "What is the capital of France?",
         "--temperature", "0", "--max-tokens", "16", "--max-seq-len", "256"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout == "The capital of France is Paris.\n", done.stderr
