"""The configuration keys that Llama's relatives share, read into blocks."""

from __future__ import annotations

from collections.abc import Sequence

from freetoken.models.attention_block import Attention
from freetoken.models.config_reader import ConfigReader
from freetoken.models.decoder import Decoder, DecoderLayer, model_spec
from freetoken.models.dense_mlp import DenseMLP
from freetoken.models.expert_layout import ONE_EACH, ONE_EACH_MIXTRAL, ExpertLayout
from freetoken.models.moe_block import MoE
from freetoken.models.rope import read_rope
from freetoken.vocab.model_spec import ModelSpec


def read_attention(
    config: ConfigReader,
    *,
    default_eps: float = 1e-6,
    default_theta: float = 10000.0,
    default_head_dim: int = 0,
    default_rotary_share: float = 1.0,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: bool = False,
    output_gate: bool = False,
    norm_offset: float = 0.0,
) -> Attention:
    """Heads, sizes and rotary embedding; raises ``CheckpointError`` where they do not fit each other."""
    hidden, q_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", q_heads)
    if q_heads % kv_heads:
        raise config.refusal("num_key_value_heads", f"the {q_heads} query heads are no multiple of it")
    if not (config.has("head_dim") or default_head_dim) and hidden % q_heads:
        raise config.refusal(
            "num_attention_heads", f"hidden_size {hidden} is no multiple of it, and there is no head_dim"
        )
    head_dim = config.integer("head_dim", default_head_dim or hidden // q_heads)
    return Attention(
        hidden,
        q_heads,
        kv_heads,
        head_dim,
        read_rope(config, head_dim, default_theta, default_rotary_share),
        config.number("rms_norm_eps", default_eps),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        qk_norm=qk_norm,
        output_gate=output_gate,
        norm_offset=norm_offset,
    )


def read_dense_mlp(config: ConfigReader) -> DenseMLP:
    config.refuse_unless("hidden_act", "silu", default="silu")
    config.refuse_unless("mlp_bias", False, default=False)
    return DenseMLP(config.integer("hidden_size"), config.integer("intermediate_size"))


def read_moe(
    config: ConfigReader,
    *,
    experts_key: str,
    intermediate_key: str,
    renormalise: bool,
    shared_intermediate: int = 0,
    usual_layout: ExpertLayout = ONE_EACH,
) -> MoE:
    """The expert layers' sizes; raises ``CheckpointError`` where more experts are chosen than there are."""
    config.refuse_unless("hidden_act", "silu", default="silu")
    experts, top_k = config.integer(experts_key), config.integer("num_experts_per_tok")
    if top_k > experts:
        raise config.refusal("num_experts_per_tok", f"there are only {experts} experts")
    return MoE(
        config.integer("hidden_size"),
        config.integer(intermediate_key),
        experts,
        top_k,
        renormalise,
        shared_intermediate,
        usual_layout,
    )


def read_mixtral_moe(config: ConfigReader) -> MoE:
    """Experts of the size of a dense feed-forward block."""
    return read_moe(
        config,
        experts_key="num_local_experts",
        intermediate_key="intermediate_size",
        renormalise=True,
        usual_layout=ONE_EACH_MIXTRAL,
    )


def read_qwen_mlps(
    config: ConfigReader, *, renormalise: bool, shared: bool = False, sparse_everywhere: bool = False
) -> tuple[DenseMLP | MoE, ...]:
    """Experts in every layer but those that ``mlp_only_layers`` and ``decoder_sparse_step`` make dense.

    ``sparse_everywhere`` ignores those two keys.
    """
    experts_key = "num_experts" if config.has("num_experts") else "num_local_experts"
    moe = read_moe(
        config,
        experts_key=experts_key,
        intermediate_key="moe_intermediate_size",
        renormalise=renormalise,
        shared_intermediate=config.integer("shared_expert_intermediate_size") if shared else 0,
    )
    layers, dense = range(config.integer("num_hidden_layers")), config.integers("mlp_only_layers")
    step = config.integer("decoder_sparse_step", 1)
    if sparse_everywhere:
        return (moe,) * len(layers)
    return tuple(read_dense_mlp(config) if i in dense or (i + 1) % step else moe for i in layers)


def refuse_sliding_window(config: ConfigReader, *, by_default: bool = True) -> None:
    """Raise ``CheckpointError`` where a sliding window would cut the context short.

    ``by_default`` says whether a window is in use where ``use_sliding_window`` is absent.
    """
    window, layers = config.optional_integer("sliding_window"), config.integer("num_hidden_layers")
    in_use = config.flag("use_sliding_window", by_default) and config.integer("max_window_layers", 0, 0) < layers
    if in_use and window and window < config.integer("max_position_embeddings"):
        raise config.refusal("sliding_window", "sliding windows are not implemented")
    if "sliding_attention" in config.strings("layer_types"):
        raise config.refusal("layer_types", "sliding windows are not implemented")


def read_decoder(
    config: ConfigReader,
    dtype: str,
    family: str,
    layers: Sequence[DecoderLayer],
    *,
    default_eps: float = 1e-6,
    norm_offset: float = 0.0,
    prefixes: tuple[str, ...] = ("model.",),
) -> ModelSpec:
    """The model around ``layers``: vocabulary, context, end-of-text tokens, tied head."""
    architectures = config.strings("architectures")
    found = Decoder(
        config.integer("hidden_size"),
        config.integer("vocab_size"),
        config.number("rms_norm_eps", default_eps),
        tuple(layers),
        config.flag("tie_word_embeddings", False),
        norm_offset,
        prefixes,
        config.text("gguf_architecture", ""),
    )
    return model_spec(
        found,
        dtype,
        family=family,
        architecture=architectures[0] if architectures else found.gguf_architecture or family,
        max_context_tokens=config.integer("max_position_embeddings"),
        eos_token_ids=config.integers("eos_token_id"),
        bos_token_id=config.optional_integer("bos_token_id"),
    )
