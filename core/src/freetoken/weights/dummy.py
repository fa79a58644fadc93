"""Weights made up for ``--load-format dummy``: right in shape and scale, the same on every start."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from freetoken.vocab.weight import StoredTensor, WeightSlot
from freetoken.weights.slots import EXPERT_PROJECTIONS, slot_shapes

if TYPE_CHECKING:
    from torch import Tensor

DUMMY_FILE = "(made up)"
STANDARD_DEVIATION = 0.02


def dummy_weights(
    slots: Sequence[WeightSlot], *, dtype: str, device: str = "cpu", seed: int = 0
) -> Iterator[tuple[WeightSlot, tuple[StoredTensor, ...]]]:
    """Each slot with its tensors, made on ``device`` one slot at a time, in the order of ``slots``.

    Matrices are N(0, 0.02) in ``dtype``. Vectors of one axis are what makes them neutral: ``1 − slot.add`` for a
    norm, 0 for a bias. A slot's numbers depend on its name and ``seed`` alone, not on what else the model has.
    """
    for slot in slots:
        shapes = slot_shapes(slot)
        parts = EXPERT_PROJECTIONS if slot.kind == "experts" else ("",)
        tensors = []
        for part, shape in zip(parts, shapes, strict=True):
            name = f"{slot.name}.{part}" if part else slot.name
            data = _made_up(slot, name, shape, dtype, device, seed)
            tensors.append(StoredTensor(name, _name_of(data), shape, {"data": data}, DUMMY_FILE))
        yield slot, tuple(tensors)


def _made_up(slot: WeightSlot, name: str, shape: tuple[int, ...], dtype: str, device: str, seed: int) -> Tensor:
    import torch

    out = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
    if slot.kind == "vector" and len(shape) == 1:
        return out.fill_(0.0 if name.endswith("bias") else 1.0 - slot.add)
    generator = torch.Generator(device=device).manual_seed(seed ^ zlib.crc32(name.encode()))
    return out.normal_(0.0, STANDARD_DEVIATION, generator=generator)


def _name_of(data: Tensor) -> str:
    return str(data.dtype).removeprefix("torch.")
