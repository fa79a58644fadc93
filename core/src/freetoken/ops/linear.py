"""Products with a packed matrix. In the ``dense`` packing that matrix is ``[O, I]`` in the compute dtype."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, packed: Tensor) -> Tensor:
    """``x [T, I]``, ``packed [O, I]`` → ``x · Wᵀ`` ``[T, O]`` in x's dtype; the library accumulates in float32."""
    return F.linear(x, packed)
