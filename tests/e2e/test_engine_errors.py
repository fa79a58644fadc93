"""Errors of the real server through the official client. Oracle: the `openai` package's classes and their status.

A plugin brings a kernel that raises for one number of tokens, and the engine goes on after it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from freetoken.models import llama
from freetoken.testing.checkpoints import write_tiny
from freetoken.testing.plugin_files import write_plugin

UNLUCKY_TOKENS = 37  # so many tokens in one step make the kernel raise
KEY = "open sesame"

PLUGIN = f"""
from freetoken import hookimpl
from freetoken.plugin.protocols import LoadedKernel
from freetoken.plugin.specs import KernelSpec


def load(setup):
    from freetoken.ops.reference import REFERENCE

    def call(x):
        if len(x) == {UNLUCKY_TOKENS}:
            raise ZeroDivisionError("thirty-seven tokens")
        return REFERENCE["silu_and_mul"](x)

    return LoadedKernel(call=call)


@hookimpl
def freetoken_kernels():
    return [
        KernelSpec(
            op="silu_and_mul", name="superstitious", summary="raises for some lengths", devices=frozenset({{"cpu"}}),
            dtypes=frozenset({{"float32"}}), load=load, priority=1000,
        )
    ]
"""


@pytest.fixture(scope="module")
def server(serve: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One request at a time and one in the queue, bodies to 4 KB, and a key."""
    config = {**llama.FAMILY.tiny(), "max_position_embeddings": 40_000}
    model = write_tiny(llama.FAMILY, tmp_path_factory.mktemp("tiny"), config=config)
    site = write_plugin(tmp_path_factory.mktemp("site"), "superstitious", PLUGIN)
    return serve(
        "--model", str(model), "--served-model-name", "tiny", "--threads", "1", "--max-running-requests", "1",
        "--max-queue", "1", "--max-body-bytes", "4096", "--api-key", KEY, PYTHONPATH=str(site),
    )  # fmt: skip


@pytest.fixture(scope="module")
def client(server: Any) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60) as made:
        yield made


def complete(client: openai.OpenAI, **more: Any) -> Any:
    asked: dict[str, Any] = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 3, **more}
    return client.completions.create(**asked)


def test_200_and_the_plugins_kernel_is_in_use(server: Any, client: openai.OpenAI) -> None:
    assert complete(client, extra_body={"ignore_eos": True}).usage.completion_tokens == 3
    assert server.get("/health")[1]["plugins"]["superstitious"] == "1.0"


@pytest.mark.parametrize(
    ("wishes", "word"),
    [
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1] * 1500, "extra_body": {"max_tokens": 39_000}}, "39000"),
        ({"logit_bias": {"999999": 1}}, "999999"),
        ({"stop": ["a"] * 17}, "17 stop strings"),
        ({"extra_body": {"deadline": 1.0}}, "in the past"),
        ({"extra_body": {"min_tokens": 5}}, "min_tokens=5"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_400(client: openai.OpenAI, wishes: dict[str, Any], word: str) -> None:
    with pytest.raises(openai.BadRequestError, match=word) as refused:
        complete(client, **wishes)
    assert refused.value.status_code == 400


def test_401(server: Any) -> None:
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        complete(stranger)
    assert refused.value.status_code == 401
    assert server.get("/ready")[0] == 200, "probes need no key"


def test_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="tiny"):
        complete(client, model="another")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_413(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        complete(client, prompt="x" * 5000)
    assert refused.value.status_code == 413


def test_429_with_retry_after(server: Any, client: openai.OpenAI) -> None:
    """One runs, one waits, the third is refused; when the first two have gone there is room again."""
    endless = {"stream": True, "max_tokens": 30_000, "extra_body": {"ignore_eos": True}}
    running = complete(client, **endless)
    next(iter(running))
    waiting = threading.Thread(target=lambda: _until_closed(client, endless))
    waiting.start()
    limit = time.monotonic() + 20
    while server.get("/health")[1]["waiting"] != 1:
        assert time.monotonic() < limit
        time.sleep(0.05)
    with pytest.raises(openai.RateLimitError) as refused:
        complete(client)
    assert refused.value.status_code == 429
    assert 1 <= int(refused.value.response.headers["retry-after"]) <= 60
    running.close()
    waiting.join(20)
    assert not waiting.is_alive()
    assert complete(client, extra_body={"ignore_eos": True}).usage.completion_tokens == 3


def _until_closed(client: openai.OpenAI, endless: dict[str, Any]) -> None:
    stream = complete(client, **endless)
    next(iter(stream))
    stream.close()


@pytest.mark.parametrize("stream", [False, True])
def test_500_from_a_kernel_that_raises_and_the_engine_goes_on(server: Any, client: openai.OpenAI, stream: bool) -> None:
    prompt = [int(stream)] * UNLUCKY_TOKENS
    with pytest.raises(openai.InternalServerError, match="ZeroDivisionError: thirty-seven tokens") as broken:
        list(complete(client, prompt=prompt, stream=stream))
    assert broken.value.status_code == 500
    assert "Traceback" not in str(broken.value.body)
    assert "Traceback" in server.text(), "the log holds the cause"
    answer = complete(client, prompt=[*prompt, 5], extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 3
    assert server.get("/health")[1]["restarts"] == 0


def test_503_while_it_starts(serve: Any, tmp_path: Path) -> None:
    """A plugin makes the start last."""
    source = "import time\nfrom freetoken import hookimpl\n\n\n@hookimpl\ndef freetoken_plan_resolved(plan):\n"
    site = write_plugin(tmp_path / "site", "sleepy", source + "    time.sleep(4)\n")
    config = {**llama.FAMILY.tiny(), "max_position_embeddings": 40_000}
    model = write_tiny(llama.FAMILY, tmp_path / "tiny", config=config)
    slow = serve("--model", str(model), "--threads", "1", ready=False, PYTHONPATH=str(site))
    wait_for(lambda: slow.get("/ready")[0] == 503)
    with openai.OpenAI(base_url=f"{slow.url}/v1", api_key="any", max_retries=0, timeout=60) as client:
        with pytest.raises(openai.InternalServerError) as refused:
            complete(client, model=None)
        assert (refused.value.status_code, refused.value.code) == (503, "engine_starting")
        assert int(refused.value.response.headers["retry-after"]) > 0
        wait_for(lambda: slow.get("/ready")[0] == 200)
        assert complete(client, model=None, extra_body={"ignore_eos": True}).usage.completion_tokens == 3


def wait_for(condition: Any, timeout_s: float = 60.0) -> None:
    limit = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(OSError):  # not yet listening
            if condition():
                return
        assert time.monotonic() < limit
        time.sleep(0.05)


def test_a_body_cut_off_is_400_and_the_server_goes_on(server: Any, client: openai.OpenAI) -> None:
    key = {"Authorization": f"Bearer {KEY}"}
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        answer = httpx.post(server.url + path, content=b'{"prompt": "a", "max_tok', headers=key)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "invalid_json"
    assert complete(client).usage.completion_tokens > 0
