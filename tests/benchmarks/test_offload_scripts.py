"""The scripts for offloaded experts on a GPU, tried at toy sizes on a CPU, so that they run right the first time."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import compare_monolith
import gpu_offload
import gpu_offload_cap
import pytest
from checkpoint_kinds import KINDS

from freetoken.vocab.units import GIB, MIB

TINY = "--kind tiny-qwen3-moe --device cpu --layers 2 --max-seq-len 256 --chunk 32 --prompt 100 --streams 2"


def run_offload(monkeypatch: pytest.MonkeyPatch, path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(sys, "argv", ["gpu_offload.py", "--device", "cpu", "--json", str(path), *arguments])
    return gpu_offload.main(), json.loads(path.read_text())


@pytest.mark.slow
def test_every_part_of_the_offload_script_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Oracle: what the parts themselves check: bit-equal outputs of one pass, tokens of resident; and all are there."""
    code, found = run_offload(monkeypatch, tmp_path / "r.json")
    assert code == 0
    assert found["failed"] == []
    assert {f"{part} took" for part in gpu_offload.PARTS} <= found["found"].keys()
    checks = [row for name, row in found["found"].items() if name.startswith("check ") and "slots" in name]
    assert all(row["equal"] == row["one_pass"] and row["close"] == row["several"] for row in checks)
    assert any(row["several"] for row in checks)
    assert any(row["one_pass"] for row in checks)


def test_a_part_without_time_is_named_and_one_that_takes_too_long_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Oracle: the report."""
    code, found = run_offload(monkeypatch, tmp_path / "a.json", "--limit", "1", "--parts", "zipf,link")
    assert code == 0
    assert {"zipf SKIPPED", "link SKIPPED"} <= found["found"].keys()
    monkeypatch.setattr(gpu_offload.Session, "link", lambda _: time.sleep(30))
    code, found = run_offload(monkeypatch, tmp_path / "b.json", "--part-limit", "0.2", "--parts", "link")
    assert code == 1
    assert found["found"]["link FAILED"]["error"].startswith("OutOfTimeError")


def test_the_other_server_is_started_as_it_wants(tmp_path: Path) -> None:
    """Oracle: the two command lines, written out; the other one's modules are on its own path alone."""
    given = compare_monolith.parse(["--peer-python", "python3", "--peer-pythonpath", "/peer", "--streams", "16,64"])
    ours, peer = compare_monolith.contenders(given, tmp_path)
    assert " ".join(peer.command) == (
        "python3 -m freetoken --model {model} --moe-strategy offload --moe-cache-rate 0.25 --attn triton"
        " --served-model-name m --max-seq-len-override 16384 --max-running-requests 64 --max-prefill-length 4096"
        " --port {port}"
    )
    assert peer.environment == {"PYTHONPATH": "/peer"}
    assert ours.environment == {}
    words = " ".join(ours.command)
    assert "freetoken serve --served-model-name m --model {model} --port {port} --moe-strategy offload" in words
    assert "--max-prefill-tokens 4096" in words


@pytest.mark.slow
def test_a_comparison_with_itself(tmp_path: Path) -> None:
    """Oracle: every figure of both servers is there, and bytes over the link for what was offloaded."""
    path = tmp_path / "r.json"
    flags = f"{TINY} --peer-self --decode-tokens 12 --load-tokens 4 --load-prompt 60 --routers zipf:1.0 --json {path}"
    assert compare_monolith.main(flags.split()) == 0
    rows = {(row["server"], row["what"]): row for row in json.loads(path.read_text())}
    for server in ("ours", "ours again"):
        assert rows[server, "start"]["ready_s"] > 0
        assert rows[server, "decode"]["decode_tok_s"] > 0
        assert rows[server, "prompt"]["ttft_tokens_first_again_s"][0][0] == 100
        assert rows[server, "streams 2"]["streams_2"]["out_tok_s"] > 0
        assert rows[server, "decode"]["link_gb"]["decode"] > 0


def test_as_many_layers_as_the_host_holds() -> None:
    """Oracle: 256 experts of three 2048 × 512 matrices in bfloat16 are 1.5 GiB a layer; in fours, of forty at most."""
    config = KINDS["qwen3.6-35b-a3b"]
    assert gpu_offload_cap.expert_bytes_a_layer(config) == 1536 * MIB
    assert gpu_offload_cap.choose_layers(config, 128 * GIB) == 40
    assert gpu_offload_cap.choose_layers(config, 31 * GIB) == 16
    assert gpu_offload_cap.choose_layers(config, 1 * GIB) == 4


def test_the_sampler_keeps_the_largest_of_each_phase() -> None:
    """Oracle: a memory whose use is known at every moment."""

    class Memory:
        how = "made up"
        used = 5

        def used_bytes(self) -> int:
            return self.used

    memory = Memory()
    sampler = gpu_offload_cap.Sampler(memory)
    sampler.start()
    for phase, used in (("start", 9), ("long", 7)):
        sampler.phase, memory.used = phase, used
        seen = sampler.samples
        while sampler.samples < seen + 2:
            time.sleep(0.005)
        memory.used = 0
    sampler.stop()
    assert sampler.largest["start"] == 9
    assert sampler.largest["long"] == 7


@pytest.mark.slow
def test_the_cap_script_without_a_gpu(tmp_path: Path) -> None:
    """Oracle: the prompt's own number of tokens, and the exit code."""
    flags = f"--kind tiny-qwen3.6-moe --device cpu --layers 4 --prompt 90 --kv-tokens 256 --json {tmp_path / 'c.json'}"
    assert gpu_offload_cap.main([*flags.split(), "--cap", "8GiB"]) == 0
    found = json.loads((tmp_path / "c.json").read_text())
    assert found["prompt long"]["tokens"] == 90
    assert found["cap"]["held"]
    assert found["used"]["samples"] > 10
