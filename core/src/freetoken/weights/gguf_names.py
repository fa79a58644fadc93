"""The names llama.cpp gives to tensors, as Hugging Face names: one table for every architecture."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

_TOP: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}

_BLOCK: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}

# A block that has both norms around the feed-forward part names the one before it differently.
_NORM_BEFORE_FFN = "pre_feedforward_layernorm"

# Tensors that hold configuration; ``gguf_config`` reads them, and they are no parameters.
CONFIG_TENSORS = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})

_PER_EXPERT = re.compile(r"(ffn_(?:gate|up|down))\.(\d+)")


def hf_names(names: Collection[str]) -> dict[str, str]:
    """GGUF name → Hugging Face name. A name the table lacks stands for itself, so that it is reported as it is."""
    return {name: _hf_name(name, names) for name in names if name not in CONFIG_TENSORS}


def _hf_name(name: str, names: Collection[str]) -> str:
    stem, dot, suffix = name.rpartition(".")
    if not dot or suffix not in ("weight", "bias"):
        return name
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    match = re.fullmatch(r"blk\.(\d+)\.(.+)", stem)
    if match is None:
        return name
    layer, part = match[1], match[2]
    if part == "ffn_norm" and f"blk.{layer}.post_attention_norm.weight" in names:
        return f"model.layers.{layer}.{_NORM_BEFORE_FFN}.{suffix}"
    if part == "exp_probs_b":
        return f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
    expert = _PER_EXPERT.fullmatch(part)
    if expert is not None:
        projection = _BLOCK[expert[1]].removeprefix("mlp.")
        return f"model.layers.{layer}.mlp.experts.{expert[2]}.{projection}.{suffix}"
    return f"model.layers.{layer}.{_BLOCK[part]}.{suffix}" if part in _BLOCK else name
