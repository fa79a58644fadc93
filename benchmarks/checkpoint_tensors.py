"""Every tensor of a made-up checkpoint: its name in the hub's layout, its shape, and what to draw it from.

Matrices are N(0, 1 / columns), so that outputs are as large as inputs; what is added to the residual stream is smaller
by 1 / sqrt(2 · layers), so that it does not grow with depth. Norms do nothing. A token's embedding is large, so that
routing follows the token and prompts differ; where it is also the head it is small, or every token would repeat itself.

**Routers.** A gate's row ``e`` times a random state is N(0, s_e²), and an expert is chosen when its logit is among the
``K`` largest, that is, above a threshold near ``t = z(1 - K/E)``, z being the normal quantile. So an expert is chosen
with probability ``p_e`` when its row is scaled by ``s_e = t / z(1 - p_e)``. ``uniform`` scales nothing; ``zipf:S``
makes ``p_e`` fall with the rank's power ``S``, ranks being dealt to the experts of each layer at random. No expert is
chosen for more than 45 % of tokens (above one half no scale does it); what is cut off goes to the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from statistics import NormalDist

import torch
from attrs import frozen
from checkpoint_kinds import Config, text_config

MAX_SHARE = 0.45


@frozen
class Tensor:
    """``fill`` draws the values in place, into a bf16 tensor on any device."""

    name: str
    shape: tuple[int, ...]
    fill: Callable[[torch.Tensor, torch.Generator], object]

    @property
    def num_bytes(self) -> int:
        return 2 * math.prod(self.shape)


def tensors(config: Config, zipf: float = 0.0) -> Iterator[Tensor]:
    """All of them, in the order of the layers."""
    text = text_config(config)
    multimodal = "text_config" in config
    prefix = "model.language_model." if multimodal else "model."
    vocab, hidden, tied = text["vocab_size"], text["hidden_size"], config["tie_word_embeddings"]
    yield Tensor(prefix + "embed_tokens.weight", (vocab, hidden), _normal(0.25 * hidden**-0.5 if tied else 1.0))
    for i in range(text["num_hidden_layers"]):
        yield from _layer(text, i, f"{prefix}layers.{i}.", _norm(text), zipf)
    yield Tensor(prefix + "norm.weight", (hidden,), _norm(text))
    if not tied:
        yield _matrix("lm_head", vocab, hidden)
    if multimodal:
        yield from _vision(config["vision_config"])


def _layer(text: Config, i: int, at: str, norm: Callable[..., object], zipf: float) -> Iterator[Tensor]:
    hidden = text["hidden_size"]
    yield Tensor(at + "input_layernorm.weight", (hidden,), norm)
    if text.get("layer_types", ["full_attention"] * (i + 1))[i] == "full_attention":
        yield from _attention(text, at + "self_attn.", norm)
    else:
        yield from _delta_net(text, at + "linear_attn.")
    yield Tensor(at + "post_attention_layernorm.weight", (hidden,), norm)
    yield from (
        _experts(text, at + "mlp.", zipf)
        if "num_experts" in text
        else _mlp(text, at + "mlp.", text["intermediate_size"])
    )


def _attention(text: Config, at: str, norm: Callable[..., object]) -> Iterator[Tensor]:
    hidden, dim = text["hidden_size"], text["head_dim"]
    q, kv = text["num_attention_heads"] * dim, text["num_key_value_heads"] * dim
    yield _matrix(at + "q_proj", q * (2 if text.get("attn_output_gate") else 1), hidden)
    yield _matrix(at + "k_proj", kv, hidden)
    yield _matrix(at + "v_proj", kv, hidden)
    yield _matrix(at + "o_proj", hidden, q, _residual(text))
    for name in ("q_norm", "k_norm"):
        yield Tensor(f"{at}{name}.weight", (dim,), norm)


def _delta_net(text: Config, at: str) -> Iterator[Tensor]:
    hidden, heads = text["hidden_size"], text["linear_num_value_heads"]
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    values = heads * text["linear_value_head_dim"]
    channels = 2 * keys + values
    yield _matrix(at + "in_proj_qkv", channels, hidden)
    yield _matrix(at + "in_proj_z", values, hidden)
    yield _matrix(at + "in_proj_b", heads, hidden)
    yield _matrix(at + "in_proj_a", heads, hidden)
    yield Tensor(at + "conv1d.weight", (channels, 1, text["linear_conv_kernel_dim"]), _normal(0.5))
    yield Tensor(at + "A_log", (heads,), _log_rates)
    yield Tensor(at + "dt_bias", (heads,), _normal(0.5))
    yield Tensor(at + "norm.weight", (text["linear_value_head_dim"],), _constant(1.0))
    yield _matrix(at + "out_proj", hidden, values, _residual(text))


def _mlp(text: Config, at: str, inner: int) -> Iterator[Tensor]:
    hidden = text["hidden_size"]
    yield _matrix(at + "gate_proj", inner, hidden)
    yield _matrix(at + "up_proj", inner, hidden)
    yield _matrix(at + "down_proj", hidden, inner, _residual(text))


def _experts(text: Config, at: str, zipf: float) -> Iterator[Tensor]:
    """One tensor an expert and matrix, or all stacked with gate above up: as each family is published."""
    hidden, inner, experts = text["hidden_size"], text["moe_intermediate_size"], text["num_experts"]
    shares = popularity(experts, text["num_experts_per_tok"], zipf)
    yield Tensor(at + "gate.weight", (experts, hidden), lambda out, g: fill_gate(out, g, shares))
    if text["model_type"] == "qwen3_moe":
        for expert in range(experts):
            yield from _mlp(text, f"{at}experts.{expert}.", inner)
        return
    yield Tensor(at + "experts.gate_up_proj", (experts, 2 * inner, hidden), _normal(hidden**-0.5))
    yield Tensor(at + "experts.down_proj", (experts, hidden, inner), _normal(inner**-0.5 * _residual(text)))
    yield from _mlp(text, at + "shared_expert.", text["shared_expert_intermediate_size"])
    yield _matrix(at + "shared_expert_gate", 1, hidden)


def _vision(vision: Config, at: str = "model.visual.") -> Iterator[Tensor]:
    """The tower's tensors, which loaders want to see; nothing here uses them."""
    wide, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    merged = wide * vision["spatial_merge_size"] ** 2
    kernel = (wide, vision["in_channels"], vision["temporal_patch_size"], patch, patch)
    shapes = {
        "patch_embed.proj.weight": kernel, "patch_embed.proj.bias": (wide,),
        "pos_embed.weight": (vision["num_position_embeddings"], wide),
        "merger.norm.weight": (wide,), "merger.norm.bias": (wide,),
        "merger.linear_fc1.weight": (merged, merged), "merger.linear_fc1.bias": (merged,),
        "merger.linear_fc2.weight": (vision["out_hidden_size"], merged),
        "merger.linear_fc2.bias": (vision["out_hidden_size"],),
    }  # fmt: skip
    for i in range(vision["depth"]):
        for name, shape in {
            "norm1.weight": (wide,), "norm1.bias": (wide,), "norm2.weight": (wide,), "norm2.bias": (wide,),
            "attn.qkv.weight": (3 * wide, wide), "attn.qkv.bias": (3 * wide,),
            "attn.proj.weight": (wide, wide), "attn.proj.bias": (wide,),
            "mlp.linear_fc1.weight": (inner, wide), "mlp.linear_fc1.bias": (inner,),
            "mlp.linear_fc2.weight": (wide, inner), "mlp.linear_fc2.bias": (wide,),
        }.items():  # fmt: skip
            shapes[f"blocks.{i}.{name}"] = shape
    for name, shape in shapes.items():
        yield Tensor(at + name, shape, _normal(0.02))


def _matrix(name: str, rows: int, cols: int, factor: float = 1.0) -> Tensor:
    return Tensor(name + ".weight", (rows, cols), _normal(factor * cols**-0.5))


def _residual(text: Config) -> float:
    return float((2 * text["num_hidden_layers"]) ** -0.5)


def _norm(text: Config) -> Callable[..., object]:
    """A norm that does nothing; Qwen3.5 and 3.6 store the distance from one."""
    return _constant(0.0 if text["model_type"] == "qwen3_5_moe_text" else 1.0)


def _normal(std: float) -> Callable[..., object]:
    return lambda out, generator: out.normal_(0.0, std, generator=generator)


def _constant(value: float) -> Callable[..., object]:
    return lambda out, _generator: out.fill_(value)


def _log_rates(out: torch.Tensor, generator: torch.Generator) -> None:
    """Logarithms of rates of forgetting between 0.02 and 2 a token."""
    out.uniform_(0.02, 2.0, generator=generator).log_()


# ------------------------------------------------------------------------------------------- routers


def popularity(experts: int, top_k: int, zipf: float) -> list[float]:
    """The share of tokens that each rank is wanted for: falling, none above ``MAX_SHARE``, ``top_k`` in sum."""
    weights = [(rank + 1) ** -zipf for rank in range(experts)]
    low, high = 0.0, float(experts) ** (zipf + 1)
    for _ in range(200):
        middle = (low + high) / 2
        total = sum(min(MAX_SHARE, middle * w) for w in weights)
        low, high = (middle, high) if total < top_k else (low, middle)
    return [min(MAX_SHARE, low * w) for w in weights]


def row_scales(shares: list[float]) -> list[float]:
    """What each rank's row of the gate is multiplied by."""
    quantile = NormalDist().inv_cdf
    threshold = quantile(1 - sum(shares) / len(shares))
    return [threshold / quantile(1 - share) for share in shares]


def fill_gate(out: torch.Tensor, generator: torch.Generator, shares: list[float]) -> None:
    """Rows ``[E, H]`` whose scales are dealt to the experts at random."""
    experts, hidden = out.shape
    order = torch.randperm(experts, generator=generator, device=out.device)
    scales = torch.tensor(row_scales(shares), device=out.device)[order]
    rows = torch.empty(experts, hidden, device=out.device).normal_(0.0, hidden**-0.5, generator=generator)
    out.copy_(rows * scales[:, None])
