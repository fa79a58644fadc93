"""The Mixtral family (Jiang et al. 2024, arXiv:2401.04088): Llama's attention, eight large experts a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from freetoken.models import decoder
from freetoken.models.config_reader import ConfigReader
from freetoken.models.llama_config import read_attention, read_decoder, read_mixtral_moe, refuse_sliding_window
from freetoken.plugin.markers import hookimpl
from freetoken.plugin.specs import ModelFamilySpec
from freetoken.vocab.model_spec import ModelSpec

NAME = "mixtral"


def read_config(config: Mapping[str, object], dtype: str) -> ModelSpec:
    """Raises ``CheckpointError`` for values that Mixtral's layers do not implement."""
    reader = ConfigReader(config)
    refuse_sliding_window(reader)
    attention = read_attention(reader, default_eps=1e-5, default_theta=1e6)
    layer = decoder.DecoderLayer(attention, read_mixtral_moe(reader))
    return read_decoder(reader, dtype, NAME, [layer] * reader.integer("num_hidden_layers"), default_eps=1e-5)


def tiny() -> Mapping[str, object]:
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": 264,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }


FAMILY = ModelFamilySpec(
    name=NAME,
    summary="Mixtral 8x7B and 8x22B: Llama's attention, a few large experts",
    architectures=("MixtralForCausalLM",),
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
