"""Column ranges of a fused product, as views."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def split_columns(x: Tensor, *widths: int) -> tuple[Tensor, ...]:
    """``x [T, Σ widths]`` → one view ``[T, width]`` for each width; rows of a view lie ``Σ widths`` apart."""
    views: tuple[Tensor, ...] = x.split_with_sizes(widths, dim=-1)  # ``split`` costs 10 µs more, in Python
    return views
