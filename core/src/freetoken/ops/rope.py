"""Rotary position embedding, halves layout (Su et al. 2021, arXiv:2104.09864)."""

from __future__ import annotations

import torch
from torch import Tensor


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first ``R`` dims of ``q [T, Hq, D]`` and ``k [T, Hkv, D]``; the rest passes through.

    ``positions [T] i64`` picks rows of ``cos_sin [C, R] f32``: ``R/2`` cosines, then ``R/2`` sines. Dim ``i`` is paired
    with dim ``i + R/2``. The results are views of one tensor ``[T, Hq + Hkv, D]``.
    """
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)  # each [T, 1, R/2]
    half, heads = cos.shape[-1], q.shape[1]
    # Both at once: for one token it is the number of operations that costs, 34 against 64 µs on a CPU.
    x = torch.cat((q, k), dim=1).float()
    first, second = x[..., :half], x[..., half : 2 * half]
    parts = [torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)]
    if 2 * half < x.shape[-1]:
        parts.append(x[..., 2 * half :])
    turned = torch.cat(parts, dim=-1).to(q.dtype)
    return turned[:, :heads], turned[:, heads:]
