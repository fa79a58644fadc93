"""SmolLM2 with every feed-forward block copied into eight experts, two of them chosen at random for each token.

Oracle: dense SmolLM2, over the same HTTP. Routing weights sum to one, so the answers must be the same.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from freetoken.testing.upcycle import upcycle

Answers = list[tuple[str, int, str]]
pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]
QUESTIONS = (
    "What is the capital of France?",
    "List three prime numbers and explain why they are prime.",
    "Il était une fois une princesse qui",
    "def fibonacci(n):\n    ",
)
# Both in float32 from end to end: other kernels may keep the dense file's quantised blocks.
EXACT = ("--dtype", "float32", "--kernel", "linear=torch", "--kernel", "embedding=torch", "--max-seq-len", "512")


@pytest.fixture(scope="module")
def sparse(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = upcycle(smollm2_path, tmp_path_factory.mktemp("upcycled"), experts=8, top_k=2)
    yield directory
    shutil.rmtree(directory)  # 2.8 GB


def answers(server: Any) -> Answers:
    """Each question's answer, its length and why it ended; all asked at once."""

    def ask(question: str) -> tuple[str, int, str]:
        messages = [{"role": "user", "content": question}]
        body = {"messages": messages, "temperature": 0, "max_tokens": 32}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=300).json()
        choice = answer["choices"][0]
        return choice["message"]["content"], answer["usage"]["completion_tokens"], choice["finish_reason"]

    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        return list(pool.map(ask, QUESTIONS))


@pytest.fixture(scope="module")
def dense(serve: Any, smollm2_path: Path) -> Answers:
    """The answers of the dense model."""
    server = serve("--model", str(smollm2_path), *EXACT)
    found = answers(server)
    server.process.terminate()
    assert found[0] == ("The capital of France is Paris.", 8, "stop")
    return found


def test_experts_that_are_copies_answer_as_the_dense_model(serve: Any, dense: Answers, sparse: Path) -> None:
    server = serve("--model", str(sparse), *EXACT)
    assert answers(server) == dense
    assert answers(server) == dense, "and again, from the prefix cache"
    server.process.terminate()  # 3 GB
    server.process.wait(30)


def test_so_do_copies_that_lie_elsewhere(serve: Any, dense: Answers, sparse: Path) -> None:
    """Slots for half of the experts, so that they leave and come again; short chunks, so that prompts go through
    the layers in windows."""
    offload = ("--moe-strategy", "offload", "--moe-offload-slots", "120", "--max-prefill-tokens", "16")
    server = serve("--model", str(sparse), *EXACT, *offload)
    assert answers(server) == dense
    counters = httpx.get(f"{server.url}/metrics").text
    assert 'name="moe_misses"} 0.0' not in counters, "nothing was fetched"
