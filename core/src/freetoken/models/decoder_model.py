"""A decoder-only model as it runs: the layers between the embedding and the head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from freetoken.models.attention_block import Attention
from freetoken.models.decoder import Decoder, layer_names
from freetoken.models.gated_delta_block import GatedDelta, PrefixLens
from freetoken.models.moe_block import MoEBlock
from freetoken.plugin.protocols import ModelParts, Step
from freetoken.vocab.batch import Batch
from freetoken.vocab.model_spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor


class _Mixer(Protocol):
    def forward(self, x: Tensor, step: Step) -> Tensor: ...


class _MLP(Protocol):
    def begin(self, x: Tensor) -> Callable[[Tensor], Tensor]: ...


class LayerBlock:
    """One layer as it runs."""

    def __init__(
        self, decoder: Decoder, i: int, parts: ModelParts, cos_sin: Tensor | None, prefixes: PrefixLens
    ) -> None:
        layer, names = decoder.layers[i], layer_names(i)
        self.eps = decoder.eps
        self.input_norm = parts.weights[names.slot + "input_norm"]
        self.post_norm = parts.weights[names.slot + "post_norm"]
        self.norm = parts.ops.bind(decoder.norm_shape(parts.dtype))
        self.add_norm = parts.ops.bind(decoder.add_norm_shape(parts.dtype))
        self.mixer: _Mixer
        if isinstance(layer.mixer, Attention):
            assert cos_sin is not None, "attention needs the rotary table"
            self.mixer = layer.mixer.build(names, parts, cos_sin)
        else:
            self.mixer = layer.mixer.build(names, parts, prefixes)
        self.mlp: _MLP = layer.mlp.build(names, parts)

    def forward(self, hidden: Tensor, step: Step) -> Tensor:
        """``[T, H] → [T, H]``."""
        return self.begin(hidden, step)()

    def begin(self, hidden: Tensor, step: Step) -> Callable[[], Tensor]:
        """Everything up to where experts are waited for; the call that returns ends the layer."""
        mixed = self.mixer.forward(self.norm(hidden, self.input_norm, self.eps), step)
        normed, summed = self.add_norm(mixed, hidden, self.post_norm, self.eps)
        return partial(self.mlp.begin(normed), summed)

    def foresee(self, hidden: Tensor) -> tuple[int, Tensor] | None:
        """The experts that this layer would choose if nothing were added to ``hidden [T, H]`` before; ``None`` without
        experts. The residual stream changes little from layer to layer, so most tokens' choices are among them."""
        if not isinstance(self.mlp, MoEBlock):
            return None
        return self.mlp.foresee(self.norm(hidden, self.post_norm, self.eps))


class DecoderModel:
    """The sequence of layers between the embedding and the head."""

    def __init__(self, spec: ModelSpec, decoder: Decoder, parts: ModelParts) -> None:
        self.eps = decoder.eps
        self.embedding, self.lm_head = parts.weights["embed"], parts.weights["lm_head"]
        self.final_norm = parts.weights["final_norm"]
        self.norm = parts.ops.bind(decoder.norm_shape(parts.dtype))
        cos_sin = _cos_sin(spec, decoder, parts)
        self._prefixes = PrefixLens()
        self._recurrent = any(isinstance(layer.mixer, GatedDelta) for layer in decoder.layers)
        made = (LayerBlock(decoder, i, parts, cos_sin, self._prefixes) for i in range(len(decoder.layers)))
        self._layers = tuple(made)

    @property
    def layers(self) -> Sequence[LayerBlock]:
        return self._layers

    def embed(self, batch: Batch) -> Tensor:
        """``[T, H]`` in the compute dtype."""
        if self._recurrent:
            self._prefixes.begin(batch)
        hidden: Tensor = self.embedding(batch.tokens)
        return hidden

    def head(self, rows: Tensor) -> Tensor:
        """``[R, H] → [R, V]`` logits, float32."""
        logits: Tensor = self.lm_head(self.norm(rows, self.final_norm, self.eps))
        return logits.float()


def _cos_sin(spec: ModelSpec, decoder: Decoder, parts: ModelParts) -> Tensor | None:
    if decoder.attention is None:
        return None
    return decoder.attention.rope.table(spec.max_context_tokens, parts.device)
