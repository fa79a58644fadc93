"""The strategy `offload` behind the real server on a CPU, where host memory stands in for the device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from freetoken.models import qwen3_moe, qwen3_next
from freetoken.testing.checkpoints import write_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
FLAGS = (
    "--device", "cpu", "--dtype", "float32", "--threads", "1", "--moe-strategy", "offload", "--moe-offload-slots", "9",
    "--max-seq-len", "96", "--max-prefill-tokens", "16", "--max-running-requests", "3", "--warmup-policy", "ladder",
)  # fmt: skip
LATER_PROBES = 24


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3_next"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = {"qwen3_moe": qwen3_moe, "qwen3_next": qwen3_next}[request.param].FAMILY
    config = {**family.tiny(), "vocab_size": 259}  # as the tokenizer's: any id of the model's may then be sent
    return write_tiny(family, tmp_path_factory.mktemp("offload") / request.param, config=config)


def moe_counters(server: Any) -> dict[str, float]:
    found = {}
    for line in httpx.get(f"{server.url}/metrics").text.splitlines():
        if line.startswith('freetoken_engine_events_total{name="moe_'):
            name, _, value = line.partition('"moe_')[2].partition('"} ')
            found[name] = float(value)
    return found


def test_a_start_moves_no_expert_but_those_that_fill_the_slots(serve: Any, model: Path, tmp_path: Path) -> None:
    """Oracle: nine experts' bytes, from the checkpoint's config. The warmup moves nothing and looks nothing up."""
    server = serve("--model", str(model), *FLAGS, "--cache-dir", str(tmp_path))
    config = json.loads((model / "config.json").read_text())
    expert_bytes = 3 * config["hidden_size"] * config["moe_intermediate_size"] * 4
    found = moe_counters(server)
    assert found.pop("moved_bytes_fill") == 9 * expert_bytes
    assert found
    assert not any(found.values()), found


def test_verify_finds_nothing_late_with_offload(model: Path, tmp_path: Path) -> None:
    """Oracle: the certificate, stored in the manifest of the server that was started with the same flags. Prompts of
    several chunks go through it in windows; what it says of times is not judged here, on a machine that is not idle."""
    command = [
        sys.executable, "-m", "freetoken", "warmup", "verify", str(model), *FLAGS, "--cache-dir", str(tmp_path),
        "--probes", str(LATER_PROBES), "--json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env={**os.environ}, check=False)
    assert done.stdout, done.stderr[-3000:]
    certificate = json.loads(done.stdout)
    assert certificate["probes"] == LATER_PROBES, certificate
    assert certificate["counters"]["late_compiles"] == certificate["counters"]["late_loads"] == 0
    assert certificate["up_to_tokens"] > 16
    of_time_and_number = ("slower than the same again", f"only {LATER_PROBES} probes")
    assert [f for f in certificate["failures"] if not any(words in f for words in of_time_and_number)] == []
    manifests = [json.loads(path.read_text()) for path in (tmp_path / "warmup").glob("*.json")]
    assert [m["certificate"]["fingerprint"] for m in manifests] == [certificate["fingerprint"]]


def test_answers_are_those_of_resident_and_the_uses_of_experts_are_noted(
    serve: Any, model: Path, tmp_path: Path
) -> None:
    """Oracle: `--moe-strategy resident` over the same HTTP; the notes are there once the server has stopped."""
    prompts = [[7 + (i * k) % 180 for i in range(n)] for k, n in ((3, 60), (5, 1), (11, 33))]

    def ask(server: Any) -> list[str]:
        body = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answers = [httpx.post(f"{server.url}/v1/completions", json={**body, "prompt": p}, timeout=60) for p in prompts]
        return [answer.json()["choices"][0]["text"] for answer in answers]

    resident = serve("--model", str(model), *FLAGS, "--moe-strategy", "resident", "--cache-dir", str(tmp_path / "a"))
    offload = serve("--model", str(model), *FLAGS, "--cache-dir", str(tmp_path / "b"))
    assert ask(offload) == ask(resident)
    counters = moe_counters(offload)
    assert counters["moved_bytes_prefill"] > 0
    offload.process.terminate()
    offload.process.wait(30)
    (notes,) = (tmp_path / "b" / "moe-offload").glob("*.json")
    assert json.loads(notes.read_text())["shares"]
