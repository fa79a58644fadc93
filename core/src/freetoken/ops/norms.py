"""The normalisations: over the last axis, in float32, whatever the input's dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x [T, N]``, ``weight [N]`` → ``x / sqrt(mean(x²) + eps) · weight`` in x's dtype.

    Zhang & Sennrich 2019, arXiv:1910.07467. The product with the weight is rounded once, at the end.
    """
    return _rms_norm_f32(x, weight, eps).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``x [T, N]``, ``residual [T, N]`` → ``(rms_norm(summed), summed)``; the sum is rounded to x's dtype first."""
    summed = x + residual
    return rms_norm(summed, weight, eps), summed


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x [T, Hv, D]``, ``gate [T, Hv, D]``, ``weight [D]`` → ``rms_norm(x) · silu(gate)`` in x's dtype."""
    return (_rms_norm_f32(x, weight, eps) * F.silu(gate.float())).to(x.dtype)


def l2norm(x: Tensor, eps: float) -> Tensor:
    """``x [T, Hk, D]`` → ``x / sqrt(sum(x²) + eps)`` over ``D``, in x's dtype."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def _rms_norm_f32(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
