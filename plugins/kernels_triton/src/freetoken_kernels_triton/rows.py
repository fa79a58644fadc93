"""Rows of a tensor as a kernel sees them: how many, in which groups, how far apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from freetoken.vocab.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor


@frozen
class Rows:
    """Rows of a ``[count]`` or ``[tokens, groups]`` arrangement; strides in elements."""

    count: int
    groups: int
    stride: int
    group_stride: int

    @classmethod
    def packed(cls, tokens: int, cols: int, groups: int = 1) -> Rows:
        """Contiguous rows of ``cols`` elements."""
        return cls(tokens * groups, groups, groups * cols, cols)

    @classmethod
    def of(cls, x: Tensor) -> Rows:
        """The rows of ``x [T, N]`` or ``x [T, G, N]``. Raises ``EngineError`` when a row is not contiguous."""
        stride = x.stride()
        if stride[-1] != 1 and x.shape[-1] != 1:
            raise EngineError(
                f"a row kernel on strides {tuple(stride)}",
                "the last axis is not contiguous",
                "call .contiguous() first",
            )
        if x.ndim == 2:
            return cls(x.shape[0], 1, stride[0], 0)
        if x.ndim == 3:
            return cls(x.shape[0] * x.shape[1], x.shape[1], stride[0], stride[1])
        raise EngineError(f"a row kernel on shape {tuple(x.shape)}", "it takes [T, N] or [T, G, N]")
