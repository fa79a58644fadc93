"""Rotary position embedding, halves layout (Su et al. 2021, arXiv:2104.09864)."""

from __future__ import annotations

import torch
from torch import Tensor


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first ``R`` dims of ``q [T, Hq, D]`` and ``k [T, Hkv, D]``; the rest passes through.

    ``positions [T] i64`` picks rows of ``cos_sin [C, R] f32``: ``R/2`` cosines, then ``R/2`` sines. Dim ``i`` is paired
    with dim ``i + R/2``.
    """
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)  # each [T, 1, R/2]
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    out = torch.empty_like(x)
    out[..., :half] = first * cos - second * sin
    out[..., half : 2 * half] = second * cos + first * sin
    out[..., 2 * half :] = x[..., 2 * half :]
    return out
