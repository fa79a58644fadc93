"""The configuration rebuilt from GGUF metadata; oracles: what was written, transformers' rope parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from freetoken.vocab.errors import CheckpointError
from freetoken.weights.gguf import GGUFFile
from freetoken.weights.gguf_config import config_from_gguf, llama3_factors

Fill = Callable[[gguf.GGUFWriter], None]
EMBEDDING = {"token_embd.weight": np.zeros((7, 64), dtype=np.float32)}


def config_of(path: Path) -> dict[str, object]:
    return config_from_gguf(GGUFFile(path))


def test_sizes_come_out_under_hugging_faces_names(write_gguf: Callable[..., Path], tiny_llama: Fill) -> None:
    """Oracle: the values the writer was given."""
    assert config_of(write_gguf(EMBEDDING, tiny_llama)) == {
        "model_type": "llama",
        "gguf_architecture": "llama",
        "architectures": [],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "vocab_size": 7,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def test_an_output_matrix_means_untied_embeddings(write_gguf: Callable[..., Path], tiny_llama: Fill) -> None:
    tensors = EMBEDDING | {"output.weight": np.zeros((7, 64), dtype=np.float32)}
    assert config_of(write_gguf(tensors, tiny_llama))["tie_word_embeddings"] is False


def test_experts_head_sizes_partial_rotary_and_second_end(write_gguf: Callable[..., Path], tiny_llama: Fill) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        tiny_llama(writer)
        writer.add_expert_count(8)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(24)
        writer.add_key_length(32)
        writer.add_rope_dimension_count(8)
        writer.add_eot_token_id(5)

    config = config_of(write_gguf(EMBEDDING, fill, architecture="qwen3moe"))
    assert config["gguf_architecture"] == "qwen3moe"
    assert (config["num_experts"], config["num_local_experts"], config["num_experts_per_tok"]) == (8, 8, 2)
    assert (config["moe_intermediate_size"], config["head_dim"]) == (24, 32)
    assert config["partial_rotary_factor"] == 0.25
    assert config["eos_token_id"] == [2, 5]


def test_linear_and_yarn_scaling_are_passed_on_by_name(write_gguf: Callable[..., Path], tiny_llama: Fill) -> None:
    def fill(kind: gguf.RopeScalingType) -> Fill:
        def add(writer: gguf.GGUFWriter) -> None:
            tiny_llama(writer)
            writer.add_rope_scaling_type(kind)
            writer.add_rope_scaling_factor(4.0)
            writer.add_rope_scaling_orig_ctx_len(128)

        return add

    for kind in (gguf.RopeScalingType.LINEAR, gguf.RopeScalingType.YARN):
        path = write_gguf(EMBEDDING, fill(kind), name=f"{kind.value}.gguf")
        assert config_of(path)["rope_scaling"] == {
            "rope_type": kind.value, "factor": 4.0, "original_max_position_embeddings": 128,
        }  # fmt: skip


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_scaling_is_recovered_from_its_factors(
    write_gguf: Callable[..., Path], tiny_llama: Fill, factor: float
) -> None:
    """Oracle: transformers' Llama 3 frequencies; the factors are plain ÷ scaled."""
    scaling = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = LlamaConfig(head_dim=128, max_position_embeddings=131072, rope_parameters={"rope_theta": 5e5} | scaling)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    factors = (1.0 / 5e5 ** (np.arange(64) / 64)) / scaled.numpy()
    assert llama3_factors(64, 5e5, factor) == pytest.approx(factors.tolist(), rel=1e-5)
    tensors = EMBEDDING | {"rope_freqs.weight": factors.astype(np.float32)}
    assert config_of(write_gguf(tensors, tiny_llama))["rope_scaling"] == scaling


def test_unknown_factors_a_split_file_and_missing_sizes_are_refused(
    write_gguf: Callable[..., Path], tiny_llama: Fill
) -> None:
    strange = EMBEDDING | {"rope_freqs.weight": np.linspace(1, 5, 8, dtype=np.float32)}
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        config_of(write_gguf(strange, tiny_llama))

    def split(writer: gguf.GGUFWriter) -> None:
        tiny_llama(writer)
        writer.add_uint16("split.count", 3)

    with pytest.raises(CheckpointError, match="one of 3 parts"):
        config_of(write_gguf(EMBEDDING, split, name="split.gguf"))
    with pytest.raises(CheckpointError, match=r"llama\.embedding_length is missing"):
        config_of(write_gguf(EMBEDDING, name="bare.gguf"))
