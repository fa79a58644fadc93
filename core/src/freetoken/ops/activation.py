"""The gated activation of a feed-forward block."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(x: Tensor) -> Tensor:
    """``x [T, 2I]`` → ``silu(x[:, :I]) · x[:, I:]``, ``[T, I]`` in x's dtype, computed in float32."""
    gate, up = x.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float()).to(x.dtype)
