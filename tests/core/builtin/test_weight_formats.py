"""The built-in weight formats; oracle: the `gguf` and `safetensors` packages' own tables and dequantisers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from freetoken.builtin.weight_formats import freetoken_weight_formats
from freetoken.plugin.specs import WeightFormatSpec
from freetoken.vocab.weight import StoredTensor

FORMATS = {spec.name: spec for spec in freetoken_weight_formats()}


def test_the_offer() -> None:
    assert {"float32", "bfloat16", "float16", "gguf.q4_1", "gguf.q8_0", "gguf.q5_0", "gguf.q4_k", "gguf.q6_k"} <= set(
        FORMATS
    )
    numbers = [spec.ggml_type for spec in FORMATS.values()]
    assert len(numbers) == len(set(numbers))
    assert all(spec.summary for spec in FORMATS.values())


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_sizes_equal_the_gguf_packages(name: str) -> None:
    spec = FORMATS[name]
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(spec.ggml_type)]
    assert spec.block == block
    assert spec.num_bytes((3, 5, 2 * block)) == 30 * block_bytes


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_plain_dtypes_are_named_as_safetensors_names_them(name: str, tmp_path: Path) -> None:
    data = torch.randn(2, 3).to(getattr(torch, name))
    save_file({"t": data}, tmp_path / "t.safetensors")
    with safe_open(tmp_path / "t.safetensors", "pt") as file:
        assert file.get_slice("t").get_dtype() == FORMATS[name].safetensors_dtype
    stored = StoredTensor("t", name, (2, 3), {"data": data}, "t.safetensors")
    assert torch.equal(FORMATS[name].codec().dequantise(stored), data.float())


@pytest.mark.parametrize("spec", [s for s in FORMATS.values() if s.name.startswith("gguf.")], ids=lambda s: s.name)
def test_codecs_dequantise_as_the_gguf_package(spec: WeightFormatSpec) -> None:
    kind = gguf.GGMLQuantizationType(spec.ggml_type)
    shape = (4, 2 * spec.block)
    raw = np.random.default_rng(5).integers(0, 120, (4, spec.num_bytes((1, shape[1]))), dtype=np.uint8)
    stored = StoredTensor("t", spec.name, shape, {"data": torch.from_numpy(raw)}, "f")
    np.testing.assert_array_equal(spec.codec().dequantise(stored).numpy(), gguf.dequantize(raw, kind))


def test_the_module_imports_no_torch() -> None:
    """Oracle: `sys.modules` of a fresh process."""
    code = "import sys; from freetoken.builtin.weight_formats import freetoken_weight_formats as offer; offer()"
    code += "; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
