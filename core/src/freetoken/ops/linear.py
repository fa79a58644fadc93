"""Products with a packed matrix. In the ``dense`` packing that matrix is ``[O, I]`` in the compute dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SLICED_BYTES = 16 << 20  # a matrix from here on does not stay in a CPU's caches between two passes over it
SLICED_TOKENS = 64
SLICE_ROWS = 2048


def linear(x: Tensor, packed: Tensor) -> Tensor:
    """``x [T, I]``, ``packed [O, I]`` → ``x · Wᵀ`` ``[T, O]`` in x's dtype; the library accumulates in float32.

    On a CPU a large matrix, such as a head, meets a few rows slice by slice: the library would pass over all of it
    several times.
    """
    few = 1 < x.shape[0] <= SLICED_TOKENS
    if few and x.device.type == "cpu" and packed.numel() * packed.element_size() >= SLICED_BYTES:
        return _by_slices(x, packed)
    return F.linear(x, packed)


def _by_slices(x: Tensor, packed: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], packed.shape[0])
    for rows, columns in zip(torch.split(packed, SLICE_ROWS), torch.split(out, SLICE_ROWS, dim=1), strict=True):
        torch.mm(x, rows.t(), out=columns)
    return out
