"""The Llama family (Touvron et al. 2023, arXiv:2302.13971): Llama 2 and 3, SmolLM2 and all that share their layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from freetoken.models import decoder
from freetoken.models.config_reader import ConfigReader
from freetoken.models.llama_config import (
    read_attention,
    read_decoder,
    read_dense_mlp,
    read_mixtral_moe,
    refuse_sliding_window,
)
from freetoken.plugin.markers import hookimpl
from freetoken.plugin.specs import ModelFamilySpec
from freetoken.vocab.model_spec import ModelSpec

NAME = "llama"


def read_config(config: Mapping[str, object], dtype: str) -> ModelSpec:
    """Raises ``CheckpointError`` for values that Llama's layers do not implement.

    GGUF files call Mixtral ``llama`` too; they are told by their experts.
    """
    reader = ConfigReader(config)
    refuse_sliding_window(reader)
    bias = reader.flag("attention_bias", False)
    attention = read_attention(reader, qkv_bias=bias, o_bias=bias)
    sparse = reader.integer("num_local_experts", 0, minimum=0) > 0
    mlp = read_mixtral_moe(reader) if sparse else read_dense_mlp(reader)
    layer = decoder.DecoderLayer(attention, mlp)
    return read_decoder(reader, dtype, NAME, [layer] * reader.integer("num_hidden_layers"))


def tiny() -> Mapping[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 264,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
    }


FAMILY = ModelFamilySpec(
    name=NAME,
    summary="Llama 2 and 3, SmolLM2 and relatives: dense, grouped-query attention",
    architectures=("LlamaForCausalLM",),
    gguf_architectures=("llama",),
    read_config=read_config,
    weights=decoder.weights,
    op_shapes=decoder.op_shapes,
    build=decoder.build,
    tiny=tiny,
    ignored_tensors=decoder.IGNORED_TENSORS,
)


@hookimpl
def freetoken_model_families() -> Sequence[ModelFamilySpec]:
    return (FAMILY,)
