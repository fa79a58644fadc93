"""llama.cpp's tensor names as Hugging Face names; oracle: the `gguf` package's own map, which goes the other way."""

from __future__ import annotations

import gguf
import pytest

from freetoken.weights.gguf_names import hf_names

ARCHITECTURES = {
    "LLAMA": ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"),
    "QWEN2": ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"),
    "QWEN3": ("attn_norm", "attn_q", "attn_q_norm", "attn_k", "attn_k_norm", "attn_v", "attn_output", "ffn_norm"),
    "QWEN3MOE": ("attn_norm", "ffn_norm", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
    "QWEN2MOE": ("ffn_gate_inp_shexp", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"),
    "GEMMA3": ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "ffn_gate", "ffn_up", "ffn_down"),
}


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_every_name_goes_back_to_where_it_came_from(architecture: str) -> None:
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture], 4)
    stored = [f"blk.3.{part}.weight" for part in ARCHITECTURES[architecture]]
    stored += ["token_embd.weight", "output_norm.weight", "output.weight"]
    names = hf_names(stored)
    for name in stored:
        assert names[name] != name
        assert table.get_name(names[name], try_suffixes=(".weight",)) == name


def test_biases_and_single_experts() -> None:
    names = hf_names(["blk.0.attn_q.bias", "blk.1.ffn_down.7.weight", "blk.2.exp_probs_b.bias"])
    assert list(names.values()) == [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.1.mlp.experts.7.down_proj.weight",
        "model.layers.2.mlp.gate.e_score_correction_bias",
    ]


def test_unknown_names_stay_and_configuration_goes() -> None:
    names = hf_names(["blk.0.ssm_a", "blk.0.strange.weight", "rope_freqs.weight", "mm.0.weight"])
    assert names == {n: n for n in ("blk.0.ssm_a", "blk.0.strange.weight", "mm.0.weight")}
