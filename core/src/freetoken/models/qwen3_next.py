"""The Qwen3-Next family: the hybrid that Qwen3.5 grew out of, its projections stored key head by key head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from freetoken.models import chatml, decoder
from freetoken.models.config_reader import ConfigReader
from freetoken.models.hybrid_config import read_hybrid_layers
from freetoken.models.llama_config import read_decoder
from freetoken.plugin.markers import hookimpl
from freetoken.plugin.specs import ModelFamilySpec
from freetoken.vocab.model_spec import ModelSpec

NAME = "qwen3-next"


def read_config(config: Mapping[str, object], dtype: str) -> ModelSpec:
    """Raises ``CheckpointError`` for values that Qwen3-Next's layers do not implement."""
    reader = ConfigReader(config)
    layers = read_hybrid_layers(reader, renormalise=reader.flag("norm_topk_prob", True), by_key_head=True)
    return read_decoder(reader, dtype, NAME, layers, norm_offset=1.0)


def tiny() -> Mapping[str, object]:
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "vocab_size": 264,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "intermediate_size": 192,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.25,
    }


FAMILY = ModelFamilySpec(
    name=NAME,
    summary="Qwen3-Next: hybrid of gated delta nets and gated attention, shared expert",
    architectures=("Qwen3NextForCausalLM",),
    read_config=read_config,
    weights=decoder.weights,
    op_shapes=decoder.op_shapes,
    build=decoder.build,
    tiny=tiny,
    chat=chatml.PLAIN,
    ignored_tensors=(*decoder.IGNORED_TENSORS, r"^mtp\."),
)


@hookimpl
def freetoken_model_families() -> Sequence[ModelFamilySpec]:
    return (FAMILY,)
