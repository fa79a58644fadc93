"""Stored tensors as plain ``torch`` tensors in memory: the index they make, and where a source points."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from freetoken.vocab.weight import CheckpointIndex, Source, TensorInfo

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


def index_of(tensors: Mapping[str, Tensor], container: str = "safetensors") -> CheckpointIndex:
    """What a family would see of a checkpoint that holds ``tensors``."""
    return CheckpointIndex(
        container,
        {
            name: TensorInfo(name, DTYPE_NAMES[t.dtype], tuple(t.shape), t.numel() * t.element_size(), "memory")
            for name, t in tensors.items()
        },
    )


def view_of(stored: Tensor, source: Source) -> Tensor:
    """The piece of ``stored`` that ``source`` names, as a view; expert, then transposition, then rows."""
    assert source.unpermute_heads == 0, "rows out of order are no view"
    view = stored if source.index is None else stored[source.index]
    if source.transpose:
        view = view.transpose(-1, -2)
    return view if source.rows is None else view[source.rows[0] : source.rows[1]]
