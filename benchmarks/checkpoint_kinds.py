"""The checkpoints that can be made up: configurations with published dimensions, and small ones of the same make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = dict[str, Any]

_END = {"bos_token_id": 0, "eos_token_id": 1}


def qwen3(layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, inner: int, vocab: int) -> Config:
    """Qwen3, dense, with tied embeddings."""
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16",
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "intermediate_size": inner, "vocab_size": vocab,
        "hidden_act": "silu", "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "attention_bias": False, "tie_word_embeddings": True, **_END,
    }  # fmt: skip


def qwen3_moe(
    layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, inner: int, experts: int, top_k: int, vocab: int
) -> Config:
    """Qwen3-MoE: every layer has experts."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "bfloat16",
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "intermediate_size": 3 * hidden,
        "moe_intermediate_size": inner, "num_experts": experts, "num_experts_per_tok": top_k, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": vocab, "hidden_act": "silu",
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "attention_bias": False,
        "tie_word_embeddings": False, "use_sliding_window": False, "router_aux_loss_coef": 0.001, **_END,
    }  # fmt: skip


def qwen36_moe(
    layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, linear_dim: int, key_heads: int,
    value_heads: int, inner: int, experts: int, top_k: int, vocab: int,
) -> Config:  # fmt: skip
    """Qwen3.6-MoE: three of four layers are gated delta nets; a small vision tower, since the format has one."""
    rotary_pairs = head_dim // 8
    sections = [rotary_pairs - 2 * (rotary_pairs // 3), rotary_pairs // 3, rotary_pairs // 3]
    text = {
        "model_type": "qwen3_5_moe_text", "dtype": "bfloat16", "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "moe_intermediate_size": inner, "shared_expert_intermediate_size": inner, "num_experts": experts,
        "num_experts_per_tok": top_k, "norm_topk_prob": True,
        "layer_types": ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(layers)],
        "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": linear_dim,
        "linear_value_head_dim": linear_dim, "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads, "vocab_size": vocab, "hidden_act": "silu",
        "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "attention_bias": False, "attn_output_gate": True,
        "tie_word_embeddings": False, "mamba_ssm_dtype": "float32", "mlp_only_layers": [], **_END,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
            "mrope_section": sections,
        },
    }  # fmt: skip
    vision = {
        "model_type": "qwen3_5_moe", "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4,
        "out_hidden_size": hidden, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "num_position_embeddings": 2304, "in_channels": 3, "hidden_act": "gelu_pytorch_tanh",
        "deepstack_visual_indexes": [],
    }  # fmt: skip
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "text_config": text,
        "vision_config": vision, "tie_word_embeddings": False, "image_token_id": 5, "video_token_id": 6,
        "vision_start_token_id": 7, "vision_end_token_id": 8, **_END,
    }  # fmt: skip


TINY_VOCAB = 320

KINDS: Mapping[str, Config] = {
    "qwen3-0.6b": qwen3(28, 1024, 16, 8, 128, 3072, 151936),
    "qwen3-30b-a3b": qwen3_moe(48, 2048, 32, 4, 128, 768, 128, 8, 151936),
    "qwen3.6-35b-a3b": qwen36_moe(40, 2048, 16, 2, 256, 128, 16, 32, 512, 256, 8, 248320),
    "tiny-qwen3": qwen3(3, 128, 4, 2, 64, 256, TINY_VOCAB),
    "tiny-qwen3-moe": qwen3_moe(3, 128, 4, 2, 64, 64, 16, 4, TINY_VOCAB),
    "tiny-qwen3.6-moe": qwen36_moe(4, 128, 4, 2, 64, 32, 2, 4, 64, 16, 4, TINY_VOCAB),
}
"""Every kind by the name on the command line."""


def text_config(config: Config) -> Config:
    """The language model's part, which is all of it for a text model."""
    inner: Config = config.get("text_config", config)
    return inner


def with_layers(config: Config, layers: int | None) -> Config:
    """The same model with another number of layers."""
    if layers is None:
        return config
    text = {**text_config(config), "num_hidden_layers": layers}
    if "layer_types" in text:
        text["layer_types"] = ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(layers)]
    return {**config, "text_config": text} if "text_config" in config else text
