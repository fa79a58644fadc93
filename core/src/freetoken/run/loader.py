"""Brings the weight stream to the chosen kernels: each complete slot is packed once and put where it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any

import torch
from attrs import define, field

from freetoken.plugin.protocols import KernelSetup, LoadedKernel, MoEStrategy
from freetoken.plugin.specs import KernelSpec
from freetoken.vocab.errors import PluginError
from freetoken.vocab.hardware import Device
from freetoken.vocab.ops import OpShape
from freetoken.vocab.weight import StoredTensor, WeightSlot

OptionsOf = Callable[[type | None], object]
"""An instance of an owner's option class, with what was given; ``None`` for ``None``."""


def load_kernels(
    kernels: Mapping[OpShape, KernelSpec],
    device: Device,
    dtype: str,
    dequantise: Callable[[StoredTensor], torch.Tensor],
    threads: int,
    options_of: OptionsOf,
) -> dict[OpShape, LoadedKernel]:
    """Load every chosen kernel once for each shape it serves."""
    return {
        shape: spec.load(KernelSetup(shape, device, dtype, dequantise, threads, options_of(spec.options)))
        for shape, spec in kernels.items()
    }


@define
class WeightPacker:
    """Takes slots from the stream (``deliver``, from several threads at once) and collects ``weights`` by slot name.

    A matrix becomes a callable that is bound to its kernel; a vector becomes a tensor in its dtype; an expert goes to
    the MoE strategy. Kernels that share a packing share one copy of a matrix that feeds two slots (tied embeddings).
    """

    shapes: Mapping[str, OpShape]
    specs: Mapping[OpShape, KernelSpec]
    loaded: Mapping[OpShape, LoadedKernel]
    dequantise: Callable[[StoredTensor], torch.Tensor]
    device: torch.device
    dtype: torch.dtype
    moe: MoEStrategy | None
    weights: dict[str, Any] = field(factory=dict)
    _shared: dict[tuple[object, ...], Any] = field(factory=dict)
    _lock: Lock = field(factory=Lock)

    def deliver(self, slot: WeightSlot, tensors: Sequence[StoredTensor]) -> None:
        """One complete slot; its tensors are valid only during the call."""
        if slot.kind == "vector":
            self.weights[slot.name] = self._vector(slot, tensors)
            return
        shape = self.shapes[slot.name]
        kernel = self.loaded[shape]
        if kernel.pack is None:
            raise PluginError(f"kernel {self.specs[shape].name} for {shape.op}", "it brings no pack for its weights")
        if slot.kind == "experts":
            assert self.moe is not None
            assert slot.layer is not None
            assert slot.expert is not None
            packed = kernel.pack(tensors)
            with self._lock:  # a strategy is told one thing at a time
                self.moe.accept(slot.layer, slot.expert, packed)
            return
        self.weights[slot.name] = _bound(kernel.call, self._packed(slot, shape, kernel.pack, tensors))

    def _packed(
        self, slot: WeightSlot, shape: OpShape, pack: Callable[..., Any], tensors: Sequence[StoredTensor]
    ) -> Any:
        packing = self.specs[shape].packing
        if not packing:
            return pack(tensors)
        key = (packing, slot.sources)
        with self._lock:
            if key not in self._shared:
                self._shared[key] = pack(tensors)
            return self._shared[key]

    def _vector(self, slot: WeightSlot, tensors: Sequence[StoredTensor]) -> torch.Tensor:
        pieces = [self.dequantise(t).reshape(t.shape) for t in tensors]
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        dtype = self.dtype if slot.dtype is None else getattr(torch, slot.dtype)
        return (whole.float() + slot.add).to(device=self.device, dtype=dtype, copy=True).contiguous()

    def finish(self) -> dict[str, Any]:
        """All parameters; the sharing table is dropped."""
        self._shared.clear()
        if self.moe is not None:
            self.moe.seal()
        return self.weights


def _bound(call: Callable[..., Any], packed: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def apply(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = call(x, packed)
        return result

    return apply
