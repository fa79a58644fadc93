"""A decoder-only model as data: its layers out of blocks, and all that a family tells the core about them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from freetoken.models.attention_block import GROUP, Attention
from freetoken.models.dense_mlp import DenseMLP
from freetoken.models.expert_layout import ExpertLayout
from freetoken.models.gated_delta_block import GatedDelta
from freetoken.models.moe_block import MoE
from freetoken.models.weight_names import Names, Parameter, prefix_in, slots_of
from freetoken.plugin.protocols import ModelParts
from freetoken.vocab.model_spec import AttentionGroup, ModelSpec, MoEShape
from freetoken.vocab.ops import OpShape
from freetoken.vocab.weight import CheckpointIndex, WeightSlot

if TYPE_CHECKING:
    from freetoken.models.decoder_model import DecoderModel

IGNORED_TENSORS = (r"\.rotary_emb\.inv_freq$", r"^lm_head\.weight$")
"""Stored tensors that are no parameters: rotary frequencies, and the copy of a tied output matrix."""

_EMBEDDING = "embed_tokens.weight"


@frozen
class DecoderLayer:
    """One layer: ``x + mixer(norm(x))``, then ``x + mlp(norm(x))``."""

    mixer: Attention | GatedDelta
    mlp: DenseMLP | MoE


@frozen
class Decoder:
    """A whole decoder. ``prefixes`` are those under which a checkpoint may keep it, the usual one first.

    ``norm_offset`` is added to the stored weights of the layer norms and the final norm.
    """

    hidden: int
    vocab_size: int
    eps: float
    layers: tuple[DecoderLayer, ...]
    tied: bool
    norm_offset: float = 0.0
    prefixes: tuple[str, ...] = ("model.",)
    gguf_architecture: str = ""

    @property
    def attention(self) -> Attention | None:
        """The attention of the first layer that has one; all layers that have one are alike."""
        return next((layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention)), None)

    def norm_shape(self, dtype: str) -> OpShape:
        return OpShape("rms_norm", dtype, cols=self.hidden)

    def add_norm_shape(self, dtype: str) -> OpShape:
        return OpShape("add_rms_norm", dtype, cols=self.hidden)


def model_spec(
    decoder: Decoder,
    dtype: str,
    *,
    family: str,
    architecture: str,
    max_context_tokens: int,
    eos_token_ids: tuple[int, ...],
    bos_token_id: int | None,
) -> ModelSpec:
    """The facts about ``decoder`` that shared code may ask for."""
    return ModelSpec(
        family,
        architecture,
        len(decoder.layers),
        decoder.hidden,
        decoder.vocab_size,
        max_context_tokens,
        tuple(layer.mixer.cache(dtype) for layer in decoder.layers),
        _attention_groups(decoder, dtype),
        _num_parameters(decoder),
        _moe_shape(decoder),
        eos_token_ids,
        bos_token_id,
        decoder,
    )


def weights(spec: ModelSpec, index: CheckpointIndex) -> tuple[WeightSlot, ...]:
    """The slots in layer order, for the names and layouts that ``index`` shows."""
    decoder = _decoder(spec)
    prefix = prefix_in(index, decoder.prefixes, _EMBEDDING)
    permuted = index.container == "gguf" and decoder.gguf_architecture == "llama"
    slots = list(slots_of((_embedding(decoder, prefix),), permuted=False))
    for i, layer in enumerate(decoder.layers):
        layout = layer.mlp.layout(f"{prefix}layers.{i}.", index) if isinstance(layer.mlp, MoE) else None
        slots += slots_of(_layer_parameters(decoder, layer, i, prefix, layout), permuted=permuted)
        if isinstance(layer.mlp, MoE) and layout is not None:
            slots += layer.mlp.expert_slots(i, f"{prefix}layers.{i}.", layout)
    slots += slots_of(_head(decoder, prefix), permuted=False)
    return tuple(slots)


def op_shapes(spec: ModelSpec, dtype: str) -> tuple[tuple[str, tuple[OpShape, ...]], ...]:
    """The ops of each part in the order of their first call, each shape once a part."""
    decoder = _decoder(spec)
    rows, cols = decoder.vocab_size, decoder.hidden
    parts: list[tuple[str, tuple[OpShape, ...]]] = [("embed", (OpShape("embedding", dtype, rows=rows, cols=cols),))]
    for i, layer in enumerate(decoder.layers):
        norm, add_norm = decoder.norm_shape(dtype), decoder.add_norm_shape(dtype)
        shapes = (norm, *layer.mixer.op_shapes(dtype), add_norm, *layer.mlp.op_shapes(dtype))
        parts.append((f"layers.{i}", tuple(dict.fromkeys(shapes))))
    head = OpShape("linear", dtype, rows=rows, cols=cols)
    parts.append(("head", (decoder.norm_shape(dtype), head, OpShape("sample", "float32", rows=rows))))
    return tuple(parts)


def build(spec: ModelSpec, parts: ModelParts) -> DecoderModel:
    """The model out of loaded parts."""
    from freetoken.models.decoder_model import DecoderModel

    return DecoderModel(spec, _decoder(spec), parts)


def stored_parameters(spec: ModelSpec, layout: ExpertLayout | None = None) -> tuple[Parameter, ...]:
    """Every parameter but the experts under its usual name: what a writer of checkpoints needs to know.

    ``layout`` is how the experts will be stored, which decides the router's name; by default as is usual.
    """
    decoder = _decoder(spec)
    prefix = decoder.prefixes[0]
    found = [_embedding(decoder, prefix)]
    for i, layer in enumerate(decoder.layers):
        found += _layer_parameters(decoder, layer, i, prefix, layout)
    head = _head(decoder, prefix)
    return (*found, *(head[:1] if decoder.tied else head))


def _decoder(spec: ModelSpec) -> Decoder:
    assert isinstance(spec.details, Decoder), "the spec was read by another family"
    return spec.details


def _attention_groups(decoder: Decoder, dtype: str) -> tuple[AttentionGroup, ...]:
    attention = decoder.attention
    if attention is None:
        return ()
    layers = tuple(i for i, layer in enumerate(decoder.layers) if isinstance(layer.mixer, Attention))
    return (AttentionGroup(GROUP, layers, attention.q_heads, attention.cache(dtype), attention.scale),)


def _moe_shape(decoder: Decoder) -> MoEShape | None:
    blocks = {i: layer.mlp for i, layer in enumerate(decoder.layers) if isinstance(layer.mlp, MoE)}
    if not blocks:
        return None
    block = next(iter(blocks.values()))
    return MoEShape(tuple(blocks), block.experts, block.top_k, block.hidden, block.intermediate)


def _num_parameters(decoder: Decoder) -> int:
    count = decoder.hidden + decoder.vocab_size * decoder.hidden * (1 if decoder.tied else 2)
    for i, layer in enumerate(decoder.layers):
        count += sum(p.elements for p in _layer_parameters(decoder, layer, i, ""))
        if isinstance(layer.mlp, MoE):
            count += layer.mlp.expert_elements
    return count


# ---------------------------------------------------------------------------------------------------- parameters


def layer_names(i: int, prefix: str = "", block: str = "") -> Names:
    """Of layer ``i``, or of one of its blocks in the files."""
    return Names(f"layers.{i}.", f"{prefix}layers.{i}.{block}", i)


def _layer_parameters(
    decoder: Decoder, layer: DecoderLayer, i: int, prefix: str, layout: ExpertLayout | None = None
) -> tuple[Parameter, ...]:
    names, shape, add = layer_names(i, prefix), (decoder.hidden,), decoder.norm_offset
    if isinstance(layer.mlp, MoE):
        mlp_block = (layout or layer.mlp.usual_layout).block
    else:
        mlp_block = layer.mlp.stored_prefix
    return (
        names.vector("input_norm", "input_layernorm.weight", shape, add=add),
        *layer.mixer.parameters(layer_names(i, prefix, layer.mixer.stored_prefix)),
        names.vector("post_norm", "post_attention_layernorm.weight", shape, add=add),
        *layer.mlp.parameters(layer_names(i, prefix, mlp_block)),
    )


def _embedding(decoder: Decoder, prefix: str) -> Parameter:
    return Names("", prefix).matrix("embedding", "embed", _EMBEDDING, (decoder.vocab_size, decoder.hidden))


def _head(decoder: Decoder, prefix: str) -> tuple[Parameter, Parameter]:
    shape = (decoder.vocab_size, decoder.hidden)
    stored = prefix + _EMBEDDING if decoder.tied else "lm_head.weight"
    return (
        Names("", prefix).vector("final_norm", "norm.weight", (decoder.hidden,), add=decoder.norm_offset),
        Names("", "").matrix("linear", "lm_head", stored, shape),
    )
