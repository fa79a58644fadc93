"""Dimensions of two published models: Qwen3-30B-A3B and Qwen3.6-35B-A3B, the latter three parts gated delta net."""

from __future__ import annotations

from typing import Any


def qwen3_moe(layers: int = 48) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "bfloat16",
        "hidden_size": 2048, "num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "vocab_size": 151936, "hidden_act": "silu", "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "attention_bias": False, "tie_word_embeddings": False, "bos_token_id": 0,
        "eos_token_id": 1, "use_sliding_window": False,
    }  # fmt: skip


def qwen3_6_moe(layers: int = 40) -> dict[str, Any]:
    kinds = ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(layers)]
    text = {
        "model_type": "qwen3_5_moe_text", "dtype": "bfloat16", "hidden_size": 2048, "num_hidden_layers": layers,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "layer_types": kinds, "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "vocab_size": 248320,
        "hidden_act": "silu", "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "attention_bias": False,
        "attn_output_gate": True, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
        "mamba_ssm_dtype": "float32", "mlp_only_layers": [],
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
    }  # fmt: skip
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "text_config": text,
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
