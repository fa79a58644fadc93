"""A checkpoint as a model on plain torch kernels, without options or plan: weights, kernels, attention and experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from freetoken.builtin import attention_torch, kernels_torch, moe_resident
from freetoken.builtin.weight_formats import freetoken_weight_formats
from freetoken.ops.table import OpTable
from freetoken.plugin.protocols import (
    AttentionLimits,
    AttentionSetup,
    ExpertLayer,
    KernelSetup,
    LoadedKernel,
    Model,
    ModelParts,
    MoESetup,
    MoEStrategy,
)
from freetoken.plugin.specs import ModelFamilySpec
from freetoken.vocab.hardware import Device
from freetoken.vocab.model_spec import ModelSpec
from freetoken.vocab.ops import OpShape
from freetoken.vocab.weight import StoredTensor, WeightSlot
from freetoken.weights.checkpoint import Checkpoint, open_checkpoint
from freetoken.weights.stream import load_weights

PAGE_TOKENS = 16


@frozen(eq=False)
class MiniModel:
    """A built model, with what it was read from and built from."""

    spec: ModelSpec
    slots: tuple[WeightSlot, ...]
    parts: ModelParts
    model: Model


def load_mini_model(family: ModelFamilySpec, path: Path, *, dtype: str = "float32", dummy: bool = False) -> MiniModel:
    """The model in ``path``, a Hugging Face directory or a GGUF file, on the CPU.

    Raises ``CheckpointError`` as the family, the reader and the loader do.
    """
    with open_checkpoint(path, tuple(freetoken_weight_formats()), dummy=dummy) as checkpoint:
        spec = family.read_config(checkpoint.config, dtype)
        slots = family.weights(spec, checkpoint.index)
        table = OpTable(_kernels(family, spec, checkpoint, dtype))  # type: ignore[arg-type]
        moe = _strategy(spec, table, dtype)
        weights: dict[str, Any] = {}
        deliver = partial(_deliver, weights, table, moe, dtype)
        load_weights(checkpoint, slots, deliver, dtype=dtype, ignored=family.ignored_tensors)
    if moe is not None:
        moe.seal()
    attention = {
        group.name: attention_torch.create(AttentionSetup(group, Device(), dtype, _limits(spec)))
        for group in spec.attention
    }
    parts = ModelParts(weights, table, attention, moe, Device(), dtype)
    return MiniModel(spec, slots, parts, family.build(spec, parts))


def _kernels(
    family: ModelFamilySpec, spec: ModelSpec, checkpoint: Checkpoint, dtype: str
) -> Mapping[OpShape, LoadedKernel]:
    kernels = {kernel.op: kernel for kernel in kernels_torch.freetoken_kernels()}

    def dequantise(tensor: StoredTensor) -> Tensor:
        return checkpoint.codec(tensor.format).dequantise(tensor)

    shapes = {shape for _, part in family.op_shapes(spec, dtype) for shape in part}
    return {shape: kernels[shape.op].load(KernelSetup(shape, Device(), dtype, dequantise)) for shape in shapes}


def _strategy(spec: ModelSpec, table: OpTable, dtype: str) -> MoEStrategy | None:
    if spec.moe is None:
        return None
    shape = next(s for s in table.kernels if s.op == "experts")
    layout = kernels_torch.expert_layout(shape)
    layers = tuple(ExpertLayer(layer, layout, table.bind(shape)) for layer in spec.moe.layers)
    return moe_resident.ResidentExperts(MoESetup(spec.moe, layers, Device(), dtype, 4096, 16, 1 << 40, 1 << 40))


def _deliver(
    weights: dict[str, Any],
    table: OpTable,
    moe: MoEStrategy | None,
    dtype: str,
    slot: WeightSlot,
    tensors: Sequence[StoredTensor],
) -> None:
    """Hand one slot to what computes with it, as the engine's loader does."""
    if slot.kind == "vector":
        (stored,) = tensors
        wide = stored.parts["data"].float() + slot.add
        weights[slot.name] = wide.to(getattr(torch, slot.dtype or dtype), copy=True)
        return
    kernel = _kernel_of(slot, table)
    assert kernel.pack is not None, f"the kernel of {slot.kind} packs nothing"
    packed = kernel.pack(tensors)
    if slot.kind != "experts":
        weights[slot.name] = partial(_with_packed, kernel.call, packed)
        return
    assert moe is not None, "experts without a MoE shape"
    assert slot.layer is not None, f"{slot.name} has no layer"
    assert slot.expert is not None, f"{slot.name} has no expert"
    moe.accept(slot.layer, slot.expert, packed)


def _kernel_of(slot: WeightSlot, table: OpTable) -> LoadedKernel:
    """The kernel the family declared for a slot's sizes; ``StopIteration`` would be a size it forgot in op_shapes."""
    sizes = (slot.shape[1], slot.shape[0]) if slot.kind != "experts" else slot.shape

    def fits(shape: OpShape) -> bool:
        found = (shape.cols, shape.intermediate) if slot.kind == "experts" else (shape.cols, shape.rows)
        return shape.op == slot.kind and found == sizes

    matching = [shape for shape in table.kernels if fits(shape)]
    assert matching, f"op_shapes has no {slot.kind} for {slot.name} {slot.shape}"
    return table.kernel(matching[0])


def _with_packed(call: Any, packed: Any, x: Tensor) -> Any:
    return call(x, packed)


def _limits(spec: ModelSpec) -> AttentionLimits:
    return AttentionLimits(PAGE_TOKENS, spec.max_context_tokens, 16, 4096)
