"""The configuration keys of hybrids: layers of gated delta net between layers of gated attention."""

from __future__ import annotations

from freetoken.models.attention_block import Attention
from freetoken.models.config_reader import ConfigReader
from freetoken.models.decoder import DecoderLayer
from freetoken.models.gated_delta_block import GatedDelta
from freetoken.models.llama_config import read_attention, read_qwen_mlps

_INHERITED = ("architectures", "tie_word_embeddings", "eos_token_id", "bos_token_id")
"""Keys that a multimodal configuration may hold at its top alone."""

_FULL, _LINEAR = "full_attention", "linear_attention"


def read_text_config(config: ConfigReader) -> ConfigReader:
    """The keys of the text part: those under ``text_config`` where there is one."""
    return config.child("text_config", inherit=_INHERITED) if config.has("text_config") else config


def read_hybrid_layers(
    config: ConfigReader, *, renormalise: bool, sparse_everywhere: bool = False, by_key_head: bool = False
) -> tuple[DecoderLayer, ...]:
    """The layers in order; norms are stored as an offset from one.

    ``sparse_everywhere`` says that every layer has experts, whatever the keys of dense layers hold. ``by_key_head``:
    the files keep the projections of a gated delta net key head by key head.
    """
    attention, delta = _read_gated_attention(config), _read_gated_delta(config, by_key_head)
    mlps = read_qwen_mlps(config, renormalise=renormalise, shared=True, sparse_everywhere=sparse_everywhere)
    mixers: dict[str, Attention | GatedDelta] = {_FULL: attention, _LINEAR: delta}
    return tuple(DecoderLayer(mixers[kind], mlp) for kind, mlp in zip(_layer_kinds(config), mlps, strict=True))


def _read_gated_delta(config: ConfigReader, by_key_head: bool) -> GatedDelta:
    """Sizes of the gated delta nets; raises ``CheckpointError`` where the heads do not fit each other."""
    config.refuse_unless("hidden_act", "silu", default="silu")
    k_heads, v_heads = config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")
    if v_heads % k_heads:
        raise config.refusal("linear_num_value_heads", f"it is no multiple of the {k_heads} key heads")
    return GatedDelta(
        config.integer("hidden_size"),
        k_heads,
        v_heads,
        config.integer("linear_key_head_dim"),
        config.integer("linear_value_head_dim"),
        config.integer("linear_conv_kernel_dim", 4, minimum=2),
        config.number("rms_norm_eps", 1e-6),
        by_key_head,
    )


def _read_gated_attention(config: ConfigReader) -> Attention:
    config.refuse_unless("attn_output_gate", True, default=True)
    bias = config.flag("attention_bias", False)
    return read_attention(
        config,
        default_head_dim=256,
        default_rotary_share=0.25,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        output_gate=True,
        norm_offset=1.0,
    )


def _layer_kinds(config: ConfigReader) -> tuple[str, ...]:
    layers, kinds = config.integer("num_hidden_layers"), config.strings("layer_types")
    if not kinds:
        interval = config.integer("full_attention_interval", 4)
        return tuple(_LINEAR if (i + 1) % interval else _FULL for i in range(layers))
    if len(kinds) != layers:
        raise config.refusal("layer_types", f"it has {len(kinds)} entries for {layers} layers")
    unknown = set(kinds) - {_FULL, _LINEAR}
    if unknown:
        raise config.refusal("layer_types", f"{', '.join(sorted(unknown))} is not implemented")
    return kinds
