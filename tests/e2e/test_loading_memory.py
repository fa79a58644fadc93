"""Peak memory while a model is loaded, in a process of its own. Oracle: resident pages as the kernel counts them.

A tiny model is loaded first, so that libraries and their first allocations are not counted; then the kernel's
high-water mark is set back and the model in question is loaded by ``LLM``, as the engine process does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from attrs import frozen

from freetoken.models import llama, qwen3_5_moe, qwen3_moe
from freetoken.plugin.specs import ModelFamilySpec
from freetoken.testing.checkpoints import write_tiny

SMALL_BYTES = 8 * 2**20  # the caches, torch's own allocations, and mapped pages beside the piece that is being read

LOAD = """
import gc, json, sys
from freetoken import LLM, SamplingParams
from freetoken.weights.mapped_file import MappedFile

small, large, release = sys.argv[1], sys.argv[2], int(sys.argv[3])
if not release:
    MappedFile.release = lambda *_: None
options = dict(
    dtype="float32", threads=1, max_seq_len=64, max_running_requests=1, max_prefill_tokens=16, kv_tokens=64,
    snapshot_bytes=0,
)

def resident(key):
    lines = dict(line.split(":") for line in open("/proc/self/status"))
    return int(lines[key].split()[0]) * 1024

LLM(small, **options).generate([[1, 2, 3]], SamplingParams(max_tokens=2))
gc.collect()
before = resident("VmRSS")
with open("/proc/self/clear_refs", "w") as peak:
    peak.write("5")  # sets the high-water mark back to what is resident now
assert resident("VmHWM") - before < 1 << 20
llm = LLM(large, **options)
print(json.dumps({"loaded": resident("VmRSS") - before, "peak": resident("VmHWM") - before}))
"""


@frozen
class Case:
    """A family with a configuration of about 100 MB in float32, its experts' layout, and the dtype of its files."""

    family: ModelFamilySpec
    config: Mapping[str, object]
    experts: str | None = None
    dtype: str = "float32"

    def write(self, directory: Path) -> tuple[Path, Path, int]:
        """A tiny twin, the model, and the bytes its parameters take in float32."""
        small = write_tiny(self.family, directory / "small", experts=self.experts, dtype=self.dtype)
        large = write_tiny(self.family, directory / "large", config=self.config, experts=self.experts, dtype=self.dtype)
        stored = sum(file.stat().st_size for file in large.glob("*.safetensors"))
        return small, large, stored * (2 if self.dtype == "bfloat16" else 1)


def experts_config(tiny: Mapping[str, object], layers: int) -> dict[str, object]:
    sizes = {"num_experts": 32, "moe_intermediate_size": 512, "hidden_size": 256, "num_hidden_layers": layers}
    text = tiny.get("text_config")
    if not isinstance(text, Mapping):
        return {**tiny, **sizes}
    kinds = ["linear_attention"] * (layers - 1) + ["full_attention"]
    return {**tiny, "text_config": {**text, **sizes, "layer_types": kinds}}


WIDE = {"hidden_size": 768, "intermediate_size": 2560, "num_hidden_layers": 4, "num_attention_heads": 12}
CASES = {
    "dense": Case(llama.FAMILY, {**llama.FAMILY.tiny(), **WIDE}),
    "an expert a tensor, bf16": Case(qwen3_moe.FAMILY, experts_config(qwen3_moe.FAMILY.tiny(), 2), None, "bfloat16"),
    "stacked experts": Case(qwen3_moe.FAMILY, experts_config(qwen3_moe.FAMILY.tiny(), 2), "stacked"),
    "stacked apart, bf16": Case(
        qwen3_moe.FAMILY, experts_config(qwen3_moe.FAMILY.tiny(), 2), "stacked-apart", "bfloat16"
    ),
    "hybrid, stacked transposed": Case(
        qwen3_5_moe.FAMILY, experts_config(qwen3_5_moe.FAMILY.tiny(), 2), "stacked-transposed"
    ),
}


def load(small: Path, large: Path, release: bool = True) -> dict[str, int]:
    command = [sys.executable, "-c", LOAD, str(small), str(large), str(int(release))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_peak_is_within_1_3_times_the_loaded_size(name: str, tmp_path: Path) -> None:
    small, large, loaded_bytes = CASES[name].write(tmp_path)
    assert loaded_bytes > 80e6
    found = load(small, large)
    assert found["loaded"] > 0.9 * loaded_bytes, "it really is in memory"
    assert found["peak"] <= 1.3 * loaded_bytes + SMALL_BYTES


def test_the_measure_sees_a_checkpoint_that_is_held_twice(tmp_path: Path) -> None:
    """The control: with mapped pages never given back, the same measure exceeds the bound."""
    small, large, loaded_bytes = CASES["stacked experts"].write(tmp_path)
    assert load(small, large, release=False)["peak"] > 1.3 * loaded_bytes + SMALL_BYTES
