"""Opening checkpoints; oracles: what was written, and the rule each refusal states."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from attrs import frozen
from safetensors.torch import save_file

from freetoken.plugin.specs import PartShapes, WeightFormatSpec
from freetoken.vocab.errors import CheckpointError
from freetoken.vocab.weight import Source, StoredTensor, TensorInfo
from freetoken.weights.checkpoint import open_checkpoint

Formats = tuple[WeightFormatSpec, ...]
Write = Callable[..., Path]
Q8_0 = gguf.GGMLQuantizationType.Q8_0


def test_a_folder_is_read_as_written(write_folder: Write, formats: Formats) -> None:
    """Oracle: the tensors and JSON written."""
    weight = torch.randn(4, 6).to(torch.bfloat16)
    folder = write_folder({"model.w.weight": weight}, config={"architectures": ["A", "B"], "hidden_size": 6})
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (folder / "tokenizer.json").write_text("{}")
    with open_checkpoint(folder, formats) as checkpoint:
        assert (checkpoint.kind, checkpoint.index.container) == ("safetensors", "safetensors")
        assert checkpoint.architectures == ("A", "B")
        assert checkpoint.gguf_architecture == ""
        assert checkpoint.config["hidden_size"] == 6
        assert checkpoint.generation_config == {"eos_token_id": [1, 2]}
        assert checkpoint.tokenizer.files == {"tokenizer.json": folder / "tokenizer.json"}
        file = str(folder / "model.safetensors")
        assert checkpoint.index.tensors == {
            "model.w.weight": TensorInfo("model.w.weight", "bfloat16", (4, 6), 48, file)
        }
        assert checkpoint.num_bytes == 48
        stored = checkpoint.read("model.w.weight")
        assert (stored.format, stored.shape, stored.file) == ("bfloat16", (4, 6), file)
        assert torch.equal(stored.parts["data"], weight)
        with pytest.raises(CheckpointError, match=r"(?s)tensor nothing .* no such tensor"):
            checkpoint.read("nothing")


def test_a_gguf_file_is_read_as_written(
    write_gguf: Write, tiny_llama: Callable[[gguf.GGUFWriter], None], formats: Formats
) -> None:
    """Oracle: the arrays written, quantised by the `gguf` package; stacked experts keep their leading axis."""
    rng = np.random.default_rng(0)
    embedding, experts = rng.standard_normal((7, 64), np.float32), rng.standard_normal((3, 5, 64), np.float32)
    norm = rng.standard_normal(64, np.float32)
    path = write_gguf(
        {
            "token_embd.weight": (embedding, Q8_0),
            "blk.0.ffn_gate_exps.weight": (experts, Q8_0),
            "blk.0.attn_norm.weight": norm,
        },
        tiny_llama,
    )
    checkpoint = open_checkpoint(path, formats)
    assert (checkpoint.kind, checkpoint.architectures, checkpoint.gguf_architecture) == ("gguf", (), "llama")
    assert checkpoint.config["vocab_size"] == 7
    assert checkpoint.tokenizer.gguf is not None
    assert list(checkpoint.tokenizer.gguf["tokenizer.ggml.tokens"]) == ["a", "b", "é"]
    assert {n: (i.format, i.shape) for n, i in checkpoint.index.tensors.items()} == {
        "model.embed_tokens.weight": ("gguf.q8_0", (7, 64)),
        "model.layers.0.mlp.experts.gate_proj.weight": ("gguf.q8_0", (3, 5, 64)),
        "model.layers.0.input_layernorm.weight": ("float32", (64,)),
    }
    for name, want in (
        ("model.embed_tokens.weight", gguf.dequantize(gguf.quantize(embedding, Q8_0), Q8_0)),
        ("model.layers.0.mlp.experts.gate_proj.weight", gguf.dequantize(gguf.quantize(experts, Q8_0), Q8_0)),
        ("model.layers.0.input_layernorm.weight", norm),
    ):
        stored = checkpoint.read(name)
        got = checkpoint.codec(stored.format).dequantise(stored)
        assert got.shape == stored.shape == want.shape
        assert np.array_equal(got.numpy(), want)


def test_reading_warns_of_nothing_and_copies_nothing(
    write_gguf: Write, tiny_llama: Callable[[gguf.GGUFWriter], None], formats: Formats, recwarn: pytest.WarningsRecorder
) -> None:
    path = write_gguf({"token_embd.weight": (np.ones((7, 64), np.float32), Q8_0)}, tiny_llama)
    checkpoint = open_checkpoint(path, formats)
    first, again = (checkpoint.read("model.embed_tokens.weight").parts["data"] for _ in range(2))
    assert first.data_ptr() == again.data_ptr()
    assert not [w for w in recwarn if "writable" in str(w.message)]


def test_a_dummy_needs_the_configuration_alone(tmp_path: Path, formats: Formats) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["A"], "quantization_config": {"quant_method": "fp8"}}')
    checkpoint = open_checkpoint(tmp_path, formats, dummy=True)
    assert (checkpoint.kind, checkpoint.index.container, len(checkpoint.index.tensors)) == ("dummy", "dummy", 0)
    with pytest.raises(CheckpointError, match="fp8"):
        open_checkpoint(tmp_path, formats)


@pytest.mark.parametrize(
    ("quantisation", "says"),
    [
        ({"quant_method": "fp8", "fmt": "e4m3"}, r"fp8 \(e4m3\)"),
        ({"quant_method": "gptq", "bits": 4}, r"gptq \(4 bits\)"),
        ({"quant_method": "awq", "w_bit": 4}, r"awq \(4 bits\)"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
        ({"bits": 8}, "unnamed method"),
    ],
)
def test_unknown_quantisation_is_refused_by_name(
    write_folder: Write, formats: Formats, quantisation: object, says: str
) -> None:
    for at, config in enumerate(
        ({"quantization_config": quantisation}, {"text_config": {"quantization_config": quantisation}})
    ):
        folder = write_folder({"w": torch.ones(2)}, config=config, name=f"m{at}")
        with pytest.raises(CheckpointError, match=rf"(?s){says}.*known format: bfloat16, float16.*gguf\.q8_0"):
            open_checkpoint(folder, formats)


def test_modelopts_own_file_counts_as_quantisation(write_folder: Write, formats: Formats) -> None:
    folder = write_folder({"w": torch.ones(2)})
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    with pytest.raises(CheckpointError, match=r"modelopt \(NVFP4\)"):
        open_checkpoint(folder, formats)


def test_a_float_dtype_without_a_format_is_refused_and_integers_are_kept(write_folder: Write, formats: Formats) -> None:
    folder = write_folder({"ids": torch.arange(3), "w": torch.ones(2)})
    assert open_checkpoint(folder, formats).index.tensors["ids"].format == "int64"
    folder = write_folder({"scaled": torch.ones(2).to(torch.float8_e4m3fn)}, name="fp8")
    with pytest.raises(CheckpointError, match=r"(?s)tensor scaled .*F8_E4M3.*bfloat16, float16, float32"):
        open_checkpoint(folder, formats)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b"[1]", "a list, not an object"),
        (b"[" * 100_000, "not usable JSON"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "not usable JSON"),
        (b'{"quantization_config": 3}', "not an object"),
    ],
)
def test_a_damaged_config_is_named(write_folder: Write, formats: Formats, raw: bytes, says: str) -> None:
    folder = write_folder({"w": torch.ones(2)})
    (folder / "config.json").write_bytes(raw)
    with pytest.raises(CheckpointError, match=rf"(?s)config\.json.*{says}"):
        open_checkpoint(folder, formats)


def test_a_folder_without_config_and_a_damaged_generation_config(write_folder: Write, formats: Formats) -> None:
    folder = write_folder({"w": torch.ones(2)})
    (folder / "generation_config.json").write_text("nonsense")
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        open_checkpoint(folder, formats)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_checkpoint(folder, formats)


def test_gguf_types_and_data_that_cannot_be_read_are_named(
    write_gguf: Write, tiny_llama: Callable[[gguf.GGUFWriter], None], formats: Formats
) -> None:
    path = write_gguf({"token_embd.weight": (np.ones((7, 64), np.float32), Q8_0)}, tiny_llama)
    plain = [spec for spec in formats if spec.ggml_type != 8]
    with pytest.raises(CheckpointError, match=rf"(?s)token_embd\.weight of {path}.*Q8_0.*gguf\.q4_1"):
        open_checkpoint(path, plain)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=rf"(?s)token_embd\.weight of {path}.*truncated"):
        open_checkpoint(path, formats)


@frozen
class ScaledCodec:
    """The test's own two-part format: int8 codes and one scale a row."""

    def dequantise(self, tensor: StoredTensor) -> torch.Tensor:
        return tensor.parts["codes"].float() * tensor.parts["scale"][:, None]

    def take(self, tensor: StoredTensor, source: Source) -> StoredTensor:
        return tensor


def is_scaled(config: Mapping[str, object]) -> bool:
    return config.get("quant_method") == "scaled"


def test_a_format_of_several_parts_comes_from_a_plugin_alone(tmp_path: Path, formats: Formats) -> None:
    """Oracle: the weights before they were split in codes and scales; the stored codes are half as wide as said."""
    scaled = WeightFormatSpec(
        name="scaled", summary="", num_bytes=lambda shape: 0, codec=ScaledCodec, detect=is_scaled,
        parts=PartShapes(
            suffixes={"codes": "", "scale": "_scale"}, logical_shape=lambda shapes: shapes["codes"][:1] + (1,) * 2,
        ),
    )  # fmt: skip
    codes, scale = torch.randint(-9, 9, (4, 6), dtype=torch.int8), torch.rand(4)
    save_file({"a": codes, "a_scale": scale, "norm": torch.ones(6)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "scaled"}}))
    checkpoint = open_checkpoint(tmp_path, (*formats, scaled))
    infos = checkpoint.index.tensors
    assert {n: (i.format, i.shape, i.num_bytes) for n, i in infos.items()} == {
        "a": ("scaled", (4, 1, 1), 24 + 16), "norm": ("float32", (6,), 24),
    }  # fmt: skip
    stored = checkpoint.read("a")
    assert torch.equal(checkpoint.codec("scaled").dequantise(stored), codes.float() * scale[:, None])


def test_opening_imports_no_torch(write_folder: Write, write_gguf: Write, tiny_llama: object) -> None:
    """The process that serves HTTP reads configurations without torch. Oracle: `sys.modules` of a fresh process."""
    folder = write_folder({"w": torch.ones(2)})
    path = write_gguf({"token_embd.weight": (np.ones((7, 64), np.float32), Q8_0)}, tiny_llama)
    code = """
import sys
from pathlib import Path
from freetoken.builtin.weight_formats import freetoken_weight_formats
from freetoken.weights import locate
from freetoken.weights.checkpoint import open_checkpoint
for path in sys.argv[1:]:
    checkpoint = open_checkpoint(locate.locate(path).path, freetoken_weight_formats())
    assert checkpoint.index.tensors
locate.installed_models()
loaded = {"torch", "numpy", "safetensors", "gguf", "huggingface_hub"} & set(sys.modules)
sys.exit(f"imported {loaded}" if loaded else 0)
"""
    subprocess.run([sys.executable, "-c", code, str(folder), str(path)], check=True)
