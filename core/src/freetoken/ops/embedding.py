"""Rows of a packed embedding matrix. In the ``dense`` packing that matrix is ``[V, H]`` in the compute dtype."""

from __future__ import annotations

from torch import Tensor


def embedding(tokens: Tensor, packed: Tensor) -> Tensor:
    """``tokens [T] i64``, ``packed [V, H]`` → ``[T, H]``."""
    return packed.index_select(0, tokens)
