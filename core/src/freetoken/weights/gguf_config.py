"""GGUF metadata as the keys of a Hugging Face ``config.json``, without asking which architecture it is.

Rope scaling of the Llama 3 kind lies in GGUF as a tensor of factors, one for each rotary frequency; the formula that
made them is recovered and checked against every factor.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence

from freetoken.vocab.errors import CheckpointError
from freetoken.weights.gguf import GGUFFile

# GGUF key after the architecture's prefix → the keys of config.json it becomes.
_KEYS: Mapping[str, tuple[str, ...]] = {
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_eps",),
    "attention.sliding_window": ("sliding_window",),
    "feed_forward_length": ("intermediate_size",),
    "context_length": ("max_position_embeddings",),
    "rope.freq_base": ("rope_theta",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_shared_count": ("n_shared_experts",),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "leading_dense_block_count": ("first_k_dense_replace",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
}

_REQUIRED = ("embedding_length", "block_count", "attention.head_count")

# Llama 3's own constants; GGUF keeps only the factors they lead to.
_LOW_FREQ_FACTOR, _HIGH_FREQ_FACTOR, _ORIGINAL_CONTEXT = 1.0, 4.0, 8192


def config_from_gguf(gguf: GGUFFile) -> dict[str, object]:
    """The configuration. Raises ``CheckpointError`` for a missing architecture or size, or an unknown rope scaling."""
    architecture = gguf.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise _refused(gguf, "general.architecture is missing", "convert the model again with a current converter")
    _refuse_split(gguf)
    known = {
        key: _uniform(gguf.metadata[f"{architecture}.{key}"])
        for key in _KEYS
        if f"{architecture}.{key}" in gguf.metadata
    }
    for key in _REQUIRED:
        if key not in known:
            raise _refused(gguf, f"{architecture}.{key} is missing", "convert the model again with a current converter")
    config: dict[str, object] = {"model_type": architecture, "gguf_architecture": architecture, "architectures": []}
    for key, value in known.items():
        config.update(dict.fromkeys(_KEYS[key], value))
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("rope_theta", 10000.0)
    _add_head_dim(config)
    config["vocab_size"] = _vocab_size(gguf, architecture)
    config["tie_word_embeddings"] = "output.weight" not in gguf.tensors
    config |= _partial_rotary(gguf, architecture, config)
    config["rope_scaling"] = _rope_scaling(gguf, architecture, config)
    return config | _token_ids(gguf)


def _refused(gguf: GGUFFile, found: str, fix: str) -> CheckpointError:
    return CheckpointError(f"read the configuration in {gguf.path}", found, fix)


def _refuse_split(gguf: GGUFFile) -> None:
    parts = gguf.metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise _refused(gguf, f"it is one of {parts} parts", "join them first: llama-gguf-split --merge FIRST_PART OUT")


def _uniform(value: object) -> object:
    """A per-layer list whose entries agree is one value; a float32 is the shortest decimal that stands for it."""
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        entries = [_uniform(entry) for entry in value]
        return entries[0] if all(entry == entries[0] for entry in entries) else entries
    return _shortest(value) if isinstance(value, float) else value


def _shortest(value: float) -> float:
    for digits in range(6, 10):
        candidate = float(f"{value:.{digits}g}")
        if not math.isfinite(value) or struct.pack("<f", candidate) == struct.pack("<f", value):
            return candidate
    return value


def _add_head_dim(config: dict[str, object]) -> None:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if "head_dim" not in config and isinstance(hidden, int) and isinstance(heads, int) and heads:
        config["head_dim"] = hidden // heads


def _vocab_size(gguf: GGUFFile, architecture: str) -> int:
    """Rows of the embedding: what the model really has, whatever the metadata say."""
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is not None and len(embedding.shape) == 2:
        return embedding.shape[0]
    stated = gguf.metadata.get(f"{architecture}.vocab_size")
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    if isinstance(stated, int):
        return stated
    if isinstance(tokens, Sequence):
        return len(tokens)
    raise _refused(gguf, "no token_embd.weight and no vocabulary", "give a file that holds a language model")


def _partial_rotary(gguf: GGUFFile, architecture: str, config: Mapping[str, object]) -> dict[str, object]:
    rotary, head_dim = gguf.metadata.get(f"{architecture}.rope.dimension_count"), config.get("head_dim")
    if isinstance(rotary, int) and isinstance(head_dim, int) and 0 < rotary < head_dim:
        return {"partial_rotary_factor": rotary / head_dim}
    return {}


def _rope_scaling(gguf: GGUFFile, architecture: str, config: Mapping[str, object]) -> dict[str, object] | None:
    if "rope_freqs.weight" in gguf.tensors:
        return _llama3_scaling(gguf, config)
    prefix = f"{architecture}.rope."
    kind = gguf.metadata.get(prefix + "scaling.type", "none")
    factor = gguf.metadata.get(prefix + "scaling.factor", gguf.metadata.get(prefix + "scale_linear"))
    if kind == "none" and (factor is None or factor == 1.0):
        return None
    scaling: dict[str, object] = {"rope_type": "linear" if kind == "none" else kind, "factor": _uniform(factor)}
    for key, name in (
        ("scaling.original_context_length", "original_max_position_embeddings"),
        ("scaling.attn_factor", "attention_factor"),
        ("scaling.yarn_beta_fast", "beta_fast"),
        ("scaling.yarn_beta_slow", "beta_slow"),
    ):
        if prefix + key in gguf.metadata:
            scaling[name] = _uniform(gguf.metadata[prefix + key])
    for tensor, name in (("rope_factors_long.weight", "long_factor"), ("rope_factors_short.weight", "short_factor")):
        if tensor in gguf.tensors:
            scaling[name] = [_shortest(value) for value in _floats(gguf, tensor)]
    return scaling


def _llama3_scaling(gguf: GGUFFile, config: Mapping[str, object]) -> dict[str, object]:
    factors = _floats(gguf, "rope_freqs.weight")
    factor = float(f"{max(factors):.5g}")  # converters may have computed it in float32
    theta = config["rope_theta"]
    assert isinstance(theta, int | float), "rope.freq_base is a number or absent"
    expected = llama3_factors(len(factors), float(theta), factor)
    if any(abs(a - b) > 1e-3 * b for a, b in zip(factors, expected, strict=True)):
        raise _refused(
            gguf,
            "rope_freqs.weight holds factors of no known scaling; Llama 3's are known",
            "use the safetensors files",
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW_FREQ_FACTOR,
        "high_freq_factor": _HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": _ORIGINAL_CONTEXT,
    }


def llama3_factors(count: int, theta: float, factor: float) -> list[float]:
    """What each of ``count`` rotary frequencies is divided by under Llama 3.1's scaling (Meta's reference code)."""
    out = []
    for i in range(count):
        wavelength = 2 * math.pi * theta ** (i / count)
        if wavelength < _ORIGINAL_CONTEXT / _HIGH_FREQ_FACTOR:
            out.append(1.0)
        elif wavelength > _ORIGINAL_CONTEXT / _LOW_FREQ_FACTOR:
            out.append(factor)
        else:
            smooth = (_ORIGINAL_CONTEXT / wavelength - _LOW_FREQ_FACTOR) / (_HIGH_FREQ_FACTOR - _LOW_FREQ_FACTOR)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return out


def _floats(gguf: GGUFFile, name: str) -> tuple[float, ...]:
    """A small float32 tensor, read without torch."""
    info = gguf.tensors[name]
    count = math.prod(info.shape)
    if info.type != 0 or count == 0 or info.offset + 4 * count > gguf.file.size_bytes:
        raise _refused(gguf, f"{name} is not a list of float32 inside the file", "download the file again")
    return struct.unpack_from(f"<{count}f", gguf.file.buffer, info.offset)


def _token_ids(gguf: GGUFFile) -> dict[str, object]:
    ids: dict[str, object] = {}
    for key, name in (("bos", "bos_token_id"), ("padding", "pad_token_id")):
        value = gguf.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(value, int):
            ids[name] = value
    ends = [gguf.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    distinct = list(dict.fromkeys(end for end in ends if isinstance(end, int)))
    if distinct:
        ids["eos_token_id"] = distinct[0] if len(distinct) == 1 else distinct
    return ids
