"""How the reference packs weights: dequantised to the compute dtype, plain row-major."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from freetoken.vocab.errors import CheckpointError
from freetoken.vocab.weight import StoredTensor

Dequantise = Callable[[StoredTensor], Tensor]


def pack_dense(
    tensors: Sequence[StoredTensor], dequantise: Dequantise, dtype: torch.dtype, device: str | torch.device
) -> Tensor:
    """The matrices stacked along their rows, ``[O, I]`` in ``dtype``: a copy that refers to no file.

    Raises ``CheckpointError`` where they are not matrices of one width.
    """
    shapes = [t.shape for t in tensors]
    if not shapes or any(len(s) != 2 or s[1] != shapes[0][-1] for s in shapes):
        names = ", ".join(f"{t.name} {list(t.shape)}" for t in tensors) or "nothing"
        raise CheckpointError(f"one matrix of {names}", "only matrices of equal width can be stacked by rows")
    out = torch.empty(sum(s[0] for s in shapes), shapes[0][1], dtype=dtype, device=device)
    row = 0
    for tensor in tensors:
        out[row : row + tensor.shape[0]].copy_(dequantise(tensor))
        row += tensor.shape[0]
    return out


def pack_expert(
    tensors: Sequence[StoredTensor], dequantise: Dequantise, dtype: torch.dtype, device: str | torch.device
) -> dict[str, Tensor]:
    """Gate ``[I, H]``, up ``[I, H]`` and down ``[H, I]`` of one expert, in that order → ``{"gate_up": [2I, H],
    "down": [H, I]}`` in ``dtype``. Raises ``CheckpointError`` for another number or shapes that do not fit."""
    shapes = [t.shape for t in tensors]
    if len(shapes) != 3 or shapes[0] != shapes[1] or shapes[2] != shapes[0][::-1]:
        names = ", ".join(f"{t.name} {list(t.shape)}" for t in tensors) or "nothing"
        raise CheckpointError(f"one expert of {names}", "gate [I, H], up [I, H] and down [H, I] are wanted")
    return {
        "gate_up": pack_dense(tensors[:2], dequantise, dtype, device),
        "down": pack_dense(tensors[2:], dequantise, dtype, device),
    }
