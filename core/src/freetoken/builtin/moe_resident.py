"""The MoE strategy ``resident``: every expert of every layer stays on the compute device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, cast

from freetoken.plugin.markers import hookimpl
from freetoken.plugin.protocols import Bank, ExpertLayer, MoESetup, MoEStats, Pending
from freetoken.plugin.specs import MoEStrategySpec
from freetoken.vocab.batch import Batch
from freetoken.vocab.dtypes import itemsize_bytes
from freetoken.vocab.errors import CheckpointError, EngineError
from freetoken.vocab.memory import MemoryClaim

if TYPE_CHECKING:
    from torch import Tensor


def bank_bytes(layer: ExpertLayer, experts: int) -> int:
    """Bytes of one layer's bank of ``experts`` experts."""
    return sum(prod(part.shape) * itemsize_bytes(part.dtype) for part in layer.layout) * experts


def budget(setup: MoESetup) -> tuple[MemoryClaim, ...]:
    """All banks, exactly; packed experts in flight belong to the weight stream."""
    total = sum(bank_bytes(layer, setup.shape.experts) for layer in setup.layers)
    layers, experts = len(setup.layers), setup.shape.experts
    return (MemoryClaim("resident", f"{experts} experts of each of {layers} layers", total, total),)


class ResidentExperts:
    """Implements ``plugin.protocols.MoEStrategy``. Slot ids are expert ids; nothing moves after ``seal``."""

    def __init__(self, setup: MoESetup) -> None:
        import torch

        self._setup = setup
        self._layers = {layer.layer: layer for layer in setup.layers}
        experts = setup.shape.experts
        with torch.inference_mode(False):  # so that the weight stream may write in either mode
            self._banks: dict[int, Bank] = {
                layer.layer: {
                    part.name: torch.zeros(
                        experts, *part.shape, dtype=getattr(torch, part.dtype), device=setup.device.torch_name
                    )
                    for part in layer.layout
                }
                for layer in setup.layers
            }
        self._accepted: set[tuple[int, int]] = set()
        self._filled_bytes = 0
        self._sealed = False

    def accept(self, layer: int, expert: int, packed: Mapping[str, Tensor]) -> None:
        """Copy one packed expert into its bank. Raises ``EngineError`` for an expert that is unknown, came already,
        comes after ``seal``, or is not laid out as its kernel declared."""
        self._check(layer, expert, packed)
        for name, part in packed.items():
            self._banks[layer][name][expert].copy_(part)
            self._filled_bytes += part.numel() * part.element_size()
        self._accepted.add((layer, expert))

    def seal(self) -> None:
        """Raises ``CheckpointError`` naming the first (layer, expert) that never came."""
        for layer in sorted(self._layers):
            for expert in range(self._setup.shape.experts):
                if (layer, expert) not in self._accepted:
                    total = len(self._layers) * self._setup.shape.experts
                    raise CheckpointError(
                        f"expert {expert} of layer {layer}",
                        f"it never came: {len(self._accepted)} of {total} experts are in",
                        "the checkpoint may be incomplete; download it again",
                    )
        self._sealed = True

    def begin_step(self, batch: Batch) -> None:
        """Nothing to prepare: all experts are in place."""

    def end_step(self) -> None:
        """Nothing to settle."""

    def start(self, layer: int, hidden: Tensor, weights: Tensor, experts: Tensor) -> Pending:
        """Computes at once; the pending value is the result."""
        call = self._layers[layer].call
        if call is None:
            raise EngineError(f"experts of layer {layer}", "the strategy was made without the kernel's bound call")
        return call(hidden, weights, experts, self._banks[layer])

    def finish(self, pending: Pending) -> Tensor:
        """``[T, H]`` in hidden's dtype."""
        return cast("Tensor", pending)

    def hint(self, layer: int, experts: Tensor) -> None:
        """Ignored: nothing is ever fetched."""

    @contextmanager
    def rehearse(self) -> Iterator[None]:
        """Changes nothing: the kernels always launch on the banks as they stand."""
        yield

    def stats(self) -> MoEStats:
        """Only the fill moves bytes; every choice is a hit by construction and is not counted."""
        return MoEStats(moved_bytes={"fill": self._filled_bytes, "prefill": 0, "decode": 0})

    def _check(self, layer: int, expert: int, packed: Mapping[str, Tensor]) -> None:
        asked = f"expert {expert} of layer {layer}"
        known = self._layers.get(layer)
        if known is None or not 0 <= expert < self._setup.shape.experts:
            raise EngineError(
                asked, f"there are {self._setup.shape.experts} experts in the layers {sorted(self._layers)}"
            )
        if self._sealed:
            raise EngineError(asked, "it came after the experts were sealed")
        if (layer, expert) in self._accepted:
            raise EngineError(asked, "it came twice", "two tensors of the checkpoint map to one expert")
        wanted = {part.name: (part.dtype, part.shape) for part in known.layout}
        got = {name: (str(part.dtype).removeprefix("torch."), tuple(part.shape)) for name, part in packed.items()}
        if got != wanted:
            raise EngineError(asked, f"its kernel declared {wanted} but packed {got}")


@hookimpl
def freetoken_moe_strategies() -> tuple[MoEStrategySpec, ...]:
    return (
        MoEStrategySpec(
            name="resident",
            summary="all experts on the compute device",
            devices=frozenset({"cpu", "cuda"}),
            budget=budget,
            create=ResidentExperts,
            graphs=True,
        ),
    )
