"""How much memory the weights and a step's activations will take, from shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from freetoken.config.facts import WeightNeeds
from freetoken.plugin.specs import KernelSpec
from freetoken.vocab.dtypes import itemsize_bytes
from freetoken.vocab.memory import MemoryClaim
from freetoken.vocab.model_spec import ModelSpec
from freetoken.vocab.ops import OpShape


def packed_weights_claim(
    needs: WeightNeeds, kernels: Mapping[OpShape, KernelSpec], dtype: str, loaders: int
) -> MemoryClaim:
    """All parameters outside the experts, as the chosen kernels keep them; the peak adds the largest one for each of
    the ``loaders``, as it is packed or in ``dtype``, whichever is more."""
    total = largest = 0
    shared: set[tuple[object, ...]] = set()
    for slot in needs.slots:
        if slot.kind == "experts":
            continue
        if slot.kind == "vector":
            size = prod(slot.shape) * itemsize_bytes(slot.dtype or dtype)
        else:
            shape = needs.shapes[slot.name]
            kernel = kernels[shape]
            size = kernel.packed_bytes(shape)
            largest = max(largest, shape.rows * shape.cols * itemsize_bytes(dtype))
            if kernel.packing:
                identity = (kernel.packing, slot.sources)
                if identity in shared:  # tied embeddings: one copy serves both
                    continue
                shared.add(identity)
        total += size
        largest = max(largest, size)
    return MemoryClaim("weights", "parameters outside the experts", total, total + loaders * largest)


def activation_claim(spec: ModelSpec, needs: WeightNeeds, tokens: int, rows: int, dtype: str) -> MemoryClaim:
    """A step's activations: the widest layer a few times over, and the logits in float32 with the sampler's copies.

    The head is no layer: it computes the ``rows`` that need logits, not the tokens.
    """
    layers = (shape for part, shapes in needs.parts if part != "head" for shape in shapes)
    widest = max((shape.rows + shape.cols for shape in layers if shape.op == "linear"), default=0)
    if spec.moe is not None:
        widest += spec.moe.top_k * (2 * spec.moe.intermediate + spec.moe.hidden)
    hidden = tokens * (4 * widest + 6 * spec.hidden) * itemsize_bytes(dtype)
    logits = rows * spec.vocab_size * 4 * 3
    return MemoryClaim("step", "activations and logits of the largest step", 0, hidden + logits)
