"""Configurations that a family does not implement are refused by the key."""

from __future__ import annotations

import copy

import pytest

from freetoken.models import llama, mixtral, qwen2, qwen3, qwen3_5_moe, qwen3_moe, qwen3_next
from freetoken.vocab.errors import CheckpointError

ALL = (llama, qwen2, qwen3, mixtral, qwen3_moe, qwen3_5_moe, qwen3_next)
SPARSE = (mixtral, qwen3_moe, qwen3_5_moe, qwen3_next)
HYBRID = (qwen3_5_moe, qwen3_next)


class _Gone:
    """The key is taken out of the configuration."""

    NAME = "gone"


_GONE = _Gone()

CASES = [
    *((m, key, value) for m in ALL for key, value in (
        ("hidden_act", "gelu"),
        ("hidden_size", _GONE),
        ("hidden_size", "128"),
        ("hidden_size", 0),
        ("vocab_size", None),
        ("num_hidden_layers", True),
        ("num_key_value_heads", 3),
        ("rms_norm_eps", 0),
        ("eos_token_id", ["257"]),
        ("tie_word_embeddings", "yes"),
        ("max_position_embeddings", -1),
    )),
    *((m, "num_experts_per_tok", 9) for m in SPARSE),
    *((m, key, value) for m in HYBRID for key, value in (
        ("linear_num_value_heads", 3),
        ("layer_types", ["full_attention"]),
        ("layer_types", ["full_attention", "linear_attention", "linear_attention", "chunked_attention"]),
        ("attn_output_gate", False),
    )),
    (llama, "mlp_bias", True),
    (llama, "head_dim", 0),
    (mixtral, "sliding_window", 64),
    (qwen2, "use_sliding_window", "yes"),
    (qwen3, "layer_types", ["sliding_attention", "full_attention"]),
    (qwen3_moe, "moe_intermediate_size", _GONE),
]  # fmt: skip


@pytest.mark.parametrize(("module", "key", "value"), CASES, ids=lambda v: getattr(v, "NAME", None) or repr(v)[:30])
def test_a_value_that_is_not_implemented_is_refused_by_its_key(module, key, value):
    """Property: ``CheckpointError`` names the key; nothing else escapes."""
    config = copy.deepcopy(dict(module.FAMILY.tiny()))
    text = config.get("text_config", config)
    text.pop(key, None)
    if value is not _GONE:
        text[key] = value
    with pytest.raises(CheckpointError) as refused:
        module.FAMILY.read_config(config, "float32")
    assert key in str(refused.value)


def test_a_sliding_window_in_use_is_refused():
    """Property: Qwen2's window counts only where it is switched on and some layer lies behind ``max_window_layers``."""
    config = {**qwen2.FAMILY.tiny(), "sliding_window": 64, "max_window_layers": 1}
    qwen2.FAMILY.read_config(config, "float32")
    qwen2.FAMILY.read_config({**config, "use_sliding_window": True, "max_window_layers": 2}, "float32")
    with pytest.raises(CheckpointError, match="sliding_window = 64"):
        qwen2.FAMILY.read_config({**config, "use_sliding_window": True}, "float32")


def test_a_nested_key_is_named_with_its_path():
    config = copy.deepcopy(dict(qwen3_5_moe.FAMILY.tiny()))
    config["text_config"]["num_experts"] = 2.5
    with pytest.raises(CheckpointError, match=r"text_config\.num_experts = 2\.5"):
        qwen3_5_moe.FAMILY.read_config(config, "float32")


def test_ends_of_text_are_read_as_one_or_many():
    """Property: a number and a list are understood, at the top of a multimodal configuration too."""
    assert llama.FAMILY.read_config({**llama.FAMILY.tiny(), "eos_token_id": [5, 6]}, "float32").eos_token_ids == (5, 6)
    config = copy.deepcopy(dict(qwen3_5_moe.FAMILY.tiny()))
    del config["text_config"]["eos_token_id"]
    assert qwen3_5_moe.FAMILY.read_config({**config, "eos_token_id": 9}, "float32").eos_token_ids == (9,)
