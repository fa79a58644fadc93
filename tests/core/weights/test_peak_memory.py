"""Peak memory while loading, in a process of its own; oracle: resident pages as the kernel counts them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

EXPERTS, HIDDEN, INTERMEDIATE, LAYERS = 16, 256, 640, 4
LOADED_BYTES = LAYERS * EXPERTS * 3 * HIDDEN * INTERMEDIATE * 2
SMALL_BYTES = 8 * 2**20  # torch's own allocations, and mapped pages beside the piece that is being read

LOAD = """
import json, sys
import torch
from pathlib import Path
from freetoken.builtin.weight_formats import freetoken_weight_formats
from freetoken.vocab.weight import Source, WeightSlot
from freetoken.weights.checkpoint import open_checkpoint
from freetoken.weights.mapped_file import MappedFile
from freetoken.weights.stream import load_weights

folder, experts, hidden, inner, layers, release = sys.argv[1], *map(int, sys.argv[2:])
if not release:
    MappedFile.release = lambda *_: None

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

slots = [
    WeightSlot(
        f"{l}.{e}", "experts",
        (Source(f"{l}.gate_up", e, (0, inner)), Source(f"{l}.gate_up", e, (inner, 2 * inner)), Source(f"{l}.down", e)),
        (hidden, inner), layer=l, expert=e,
    )
    for l in range(layers) for e in range(experts)
]
kept, peak = [torch.ones(1).clone()], 0

def deliver(slot, tensors):
    global peak
    kept.extend(t.parts["data"].clone() for t in tensors)
    peak = max(peak, resident())

checkpoint = open_checkpoint(Path(folder), freetoken_weight_formats())
before = resident()
load_weights(checkpoint, slots, deliver, dtype="bfloat16")
print(json.dumps({"loaded": sum(t.nbytes for t in kept), "peak": max(peak, resident()) - before}))
"""


@pytest.fixture(scope="module")
def prestacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of experts stacked in one tensor a layer and projection, about 60 MB."""
    folder = tmp_path_factory.mktemp("prestacked")
    tensors = {}
    for layer in range(LAYERS):
        tensors[f"{layer}.gate_up"] = torch.ones(EXPERTS, 2 * INTERMEDIATE, HIDDEN, dtype=torch.bfloat16)
        tensors[f"{layer}.down"] = torch.ones(EXPERTS, HIDDEN, INTERMEDIATE, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def loaded(folder: Path, release: bool) -> dict[str, int]:
    sizes = [str(n) for n in (EXPERTS, HIDDEN, INTERMEDIATE, LAYERS, int(release))]
    out = subprocess.run([sys.executable, "-c", LOAD, str(folder), *sizes], check=True, capture_output=True, text=True)
    result: dict[str, int] = json.loads(out.stdout)
    assert LOADED_BYTES <= result["loaded"] < LOADED_BYTES + 1000
    return result


def test_prestacked_experts_load_within_1_3_times_their_size(prestacked: Path) -> None:
    assert loaded(prestacked, release=True)["peak"] <= 1.3 * LOADED_BYTES + SMALL_BYTES


def test_the_measure_sees_a_checkpoint_that_is_held_twice(prestacked: Path) -> None:
    """The control: with pages never given back, the same measure exceeds the bound."""
    assert loaded(prestacked, release=False)["peak"] > 1.3 * LOADED_BYTES + SMALL_BYTES
