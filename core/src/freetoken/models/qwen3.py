"""The Qwen3 family (Yang et al. 2025, arXiv:2505.09388): dense, with normalised query and key heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from freetoken.models import chatml, decoder
from freetoken.models.config_reader import ConfigReader
from freetoken.models.llama_config import read_attention, read_decoder, read_dense_mlp, refuse_sliding_window
from freetoken.plugin.markers import hookimpl
from freetoken.plugin.specs import ModelFamilySpec
from freetoken.vocab.model_spec import ModelSpec

NAME = "qwen3"


def read_config(config: Mapping[str, object], dtype: str) -> ModelSpec:
    """Raises ``CheckpointError`` for values that Qwen3's layers do not implement."""
    reader = ConfigReader(config)
    refuse_sliding_window(reader, by_default=False)
    bias = reader.flag("attention_bias", False)
    attention = read_attention(reader, qkv_bias=bias, o_bias=bias, qk_norm=True, default_head_dim=128)
    layer = decoder.DecoderLayer(attention, read_dense_mlp(reader))
    return read_decoder(reader, dtype, NAME, [layer] * reader.integer("num_hidden_layers"))


def tiny() -> Mapping[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 264,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "head_dim": 64,
    }


FAMILY = ModelFamilySpec(
    name=NAME,
    summary="Qwen3: dense, normalised query and key heads",
    architectures=("Qwen3ForCausalLM",),
    gguf_architectures=("qwen3",),
    read_config=read_config,
    weights=decoder.weights,
    op_shapes=decoder.op_shapes,
    build=decoder.build,
    tiny=tiny,
    chat=chatml.THINKING,
    ignored_tensors=decoder.IGNORED_TENSORS,
)


@hookimpl
def freetoken_model_families() -> Sequence[ModelFamilySpec]:
    return (FAMILY,)
