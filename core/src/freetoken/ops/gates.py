"""Small elementwise ops between a layer's larger ones, each one launch on a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def residual_add(x: Tensor, residual: Tensor, shared: Tensor | None, gate: Tensor | None) -> Tensor:
    """``residual + (x + shared · sigmoid(gate))`` in x's dtype, computed in float32 and rounded once.

    ``x``, ``residual [T, N]``; ``shared [T, N]`` and ``gate [T, 1]`` are a shared expert's output and its gate, or
    ``None``.
    """
    if shared is None or gate is None:
        return x + residual  # one addition rounds once in any dtype
    return (residual.float() + (x.float() + shared.float() * gate.float().sigmoid())).to(x.dtype)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """``x · sigmoid(gate)``, both ``[T, Hq, D]``, in x's dtype, computed in float32."""
    return (x.float() * gate.float().sigmoid()).to(x.dtype)


def delta_gates(ba: Tensor, rate: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """The gated delta rule's strength and decay (Yang et al. 2024, arXiv:2412.06464; the form of Dao & Gu 2024).

    ``ba [T, 2 Hv]`` holds ``b``, then ``a``; ``rate``, ``dt_bias [Hv] f32``. → ``beta = sigmoid(b)`` and the decay's
    logarithm ``rate · softplus(a + dt_bias)``, ``[T, Hv] f32`` each.
    """
    b, a = torch.chunk(ba.float(), 2, dim=-1)
    return b.sigmoid(), rate * F.softplus(a + dt_bias)
