"""The Qwen3.5-MoE and Qwen3.6-MoE family: gated delta nets in three of four layers, small experts and a shared one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from freetoken.models import chatml, decoder
from freetoken.models.config_reader import ConfigReader
from freetoken.models.hybrid_config import read_hybrid_layers, read_text_config
from freetoken.models.llama_config import read_decoder
from freetoken.plugin.markers import hookimpl
from freetoken.plugin.specs import ModelFamilySpec
from freetoken.vocab.model_spec import ModelSpec

NAME = "qwen3.5-moe"

PREFIXES = ("model.language_model.", "model.")
"""Where the text part lies: in a multimodal checkpoint, and alone."""

_OTHER_PARTS = (r"^mtp\.", r"^(model\.)?visual\.")
"""Multi-token prediction, the vision tower: parts that text generation does not use."""


def read_config(config: Mapping[str, object], dtype: str) -> ModelSpec:
    """The text part of a multimodal checkpoint, or a checkpoint of that part alone.

    Raises ``CheckpointError`` for values that the layers do not implement.
    """
    reader = read_text_config(ConfigReader(config))
    layers = read_hybrid_layers(reader, renormalise=True, sparse_everywhere=True)
    return read_decoder(reader, dtype, NAME, layers, norm_offset=1.0, prefixes=PREFIXES)


def tiny() -> Mapping[str, object]:
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_5_moe_text",
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
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
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
        },
    }


FAMILY = ModelFamilySpec(
    name=NAME,
    summary="Qwen3.5-MoE and Qwen3.6-MoE, text part: hybrid of gated delta nets and gated attention, shared expert",
    architectures=("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
    read_config=read_config,
    weights=decoder.weights,
    op_shapes=decoder.op_shapes,
    build=decoder.build,
    tiny=tiny,
    chat=chatml.THINKING,
    ignored_tensors=(*decoder.IGNORED_TENSORS, *_OTHER_PARTS),
)


@hookimpl
def freetoken_model_families() -> Sequence[ModelFamilySpec]:
    return (FAMILY,)
