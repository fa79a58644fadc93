"""The Qwen3-MoE family (Yang et al. 2025, arXiv:2505.09388): Qwen3's attention, many small experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from freetoken.models import chatml, decoder
from freetoken.models.config_reader import ConfigReader
from freetoken.models.llama_config import read_attention, read_decoder, read_qwen_mlps, refuse_sliding_window
from freetoken.plugin.markers import hookimpl
from freetoken.plugin.specs import ModelFamilySpec
from freetoken.vocab.model_spec import ModelSpec

NAME = "qwen3-moe"


def read_config(config: Mapping[str, object], dtype: str) -> ModelSpec:
    """Raises ``CheckpointError`` for values that Qwen3-MoE's layers do not implement.

    A layer is dense where ``mlp_only_layers`` names it or ``decoder_sparse_step`` passes over it.
    """
    reader = ConfigReader(config)
    refuse_sliding_window(reader, by_default=False)
    bias = reader.flag("attention_bias", False)
    attention = read_attention(reader, qkv_bias=bias, o_bias=bias, qk_norm=True)
    # llama.cpp always renormalises, and its files do not say so.
    renormalise = reader.flag("norm_topk_prob", reader.has("gguf_architecture"))
    mlps = read_qwen_mlps(reader, renormalise=renormalise)
    layers = [decoder.DecoderLayer(attention, mlp) for mlp in mlps]
    return read_decoder(reader, dtype, NAME, layers)


def tiny() -> Mapping[str, object]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
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
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


FAMILY = ModelFamilySpec(
    name=NAME,
    summary="Qwen3-MoE (Qwen3-30B-A3B and relatives): Qwen3's attention, many small experts",
    architectures=("Qwen3MoeForCausalLM",),
    gguf_architectures=("qwen3moe",),
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
