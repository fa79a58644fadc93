"""Families in GGUF files: the same model as in safetensors, under llama.cpp's names, row order and metadata."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from freetoken.models import llama, mixtral, qwen2, qwen3, qwen3_moe
from freetoken.plugin.specs import ModelFamilySpec
from freetoken.testing.checkpoints import random_tensors, write_tiny
from freetoken.testing.mini_runner import MiniRunner

TOKENS = list(range(70, 99))

# family that wrote it, llama.cpp's word, family that reads it
CASES = [
    (llama.FAMILY, "llama", llama.FAMILY),
    (mixtral.FAMILY, "llama", llama.FAMILY),
    (qwen2.FAMILY, "qwen2", qwen2.FAMILY),
    (qwen3.FAMILY, "qwen3", qwen3.FAMILY),
    (qwen3_moe.FAMILY, "qwen3moe", qwen3_moe.FAMILY),
]


@pytest.mark.parametrize(("written", "word", "read"), CASES, ids=[f"{c[0].name}-as-{c[1]}" for c in CASES])
def test_gguf_gives_the_same_logits(written, word, read, tmp_path):
    """Second way: the same tensors in safetensors. Names come from the ``gguf`` package's own map."""
    assert word in read.gguf_architectures
    want = MiniRunner.open(written, write_tiny(written, tmp_path / "hf")).logits(TOKENS)
    write_gguf(written, word, tmp_path / "tiny.gguf")
    got = MiniRunner.open(read, tmp_path / "tiny.gguf").logits(TOKENS)
    assert (got - want).abs().max() < 1e-5


def write_gguf(family: ModelFamilySpec, word: str, path: Path) -> None:
    config = family.tiny()
    tensors = random_tensors(
        family.read_config(config, "float32"), experts="stacked-apart" if "num_experts_per_tok" in config else None
    )
    writer = gguf.GGUFWriter(path, word)
    _add_sizes(writer, config)
    architecture = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == word)
    names = gguf.get_tensor_name_map(architecture, int(config["num_hidden_layers"]))
    for name, tensor in tensors.items():
        stem, _, suffix = name.rpartition(".")
        renamed = names.get_name(stem)
        assert renamed, f"llama.cpp has no name for {stem}"
        writer.add_tensor(f"{renamed}.{suffix}", _reordered(name, tensor, word, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: gguf.GGUFWriter, config: Mapping[str, object]) -> None:
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if "num_experts_per_tok" in config:
        writer.add_expert_count(config.get("num_experts", config.get("num_local_experts")))
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _reordered(name: str, tensor: Tensor, word: str, config: Mapping[str, object]) -> np.ndarray:
    """Q and K of the ``llama`` architecture go from rotary halves to rotary pairs, as llama.cpp keeps them."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    part = name.split(".")[-2]
    if word == "llama" and part in heads:
        rows, cols = tensor.shape
        halves = tensor.view(heads[part], 2, rows // heads[part] // 2, cols)
        tensor = halves.transpose(1, 2).reshape(rows, cols)
    return tensor.to(torch.float32).contiguous().numpy()
