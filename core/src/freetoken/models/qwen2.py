"""The Qwen2 family (Yang et al. 2024, arXiv:2407.10671), Qwen2.5 too: dense, with a bias on Q, K and V."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from freetoken.models import chatml, decoder
from freetoken.models.config_reader import ConfigReader
from freetoken.models.llama_config import read_attention, read_decoder, read_dense_mlp, refuse_sliding_window
from freetoken.plugin.markers import hookimpl
from freetoken.plugin.specs import ModelFamilySpec
from freetoken.vocab.model_spec import ModelSpec

NAME = "qwen2"


def read_config(config: Mapping[str, object], dtype: str) -> ModelSpec:
    """Raises ``CheckpointError`` for values that Qwen2's layers do not implement."""
    reader = ConfigReader(config)
    refuse_sliding_window(reader, by_default=False)
    layer = decoder.DecoderLayer(read_attention(reader, qkv_bias=True), read_dense_mlp(reader))
    return read_decoder(reader, dtype, NAME, [layer] * reader.integer("num_hidden_layers"))


def tiny() -> Mapping[str, object]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
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
        "tie_word_embeddings": True,
        "bos_token_id": 256,
        "eos_token_id": 257,
    }


FAMILY = ModelFamilySpec(
    name=NAME,
    summary="Qwen2 and Qwen2.5: dense, biased Q, K and V",
    architectures=("Qwen2ForCausalLM",),
    gguf_architectures=("qwen2",),
    read_config=read_config,
    weights=decoder.weights,
    op_shapes=decoder.op_shapes,
    build=decoder.build,
    tiny=tiny,
    chat=chatml.PLAIN,
    ignored_tensors=decoder.IGNORED_TENSORS,
)


@hookimpl
def freetoken_model_families() -> Sequence[ModelFamilySpec]:
    return (FAMILY,)
