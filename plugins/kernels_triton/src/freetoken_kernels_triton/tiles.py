"""Tile sizes: pure arithmetic on shapes and device facts. Nothing here is measured at run time."""

from __future__ import annotations

from attrs import frozen

from freetoken.vocab.dtypes import itemsize_bytes
from freetoken.vocab.hardware import Device
from freetoken.vocab.units import ceil_div

ROW_BYTES = 16
"""Rows start at multiples of this; see the alignment contract in ``freetoken.vocab.launch``."""


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``; 1 for ``n`` below 1."""
    return 1 << max(n - 1, 0).bit_length()


def power_of_2_divisor(n: int, most: int) -> int:
    """The largest power of two that divides ``n``, at most ``most``."""
    return min(n & -n, most)


def row_multiple(dtype: str) -> int:
    """How many elements of ``dtype`` a row length must be a multiple of."""
    return ROW_BYTES // itemsize_bytes(dtype)


@frozen
class RowTile:
    """A block of whole rows: ``rows`` × ``cols`` elements, ``cols`` a power of two."""

    rows: int
    cols: int
    num_warps: int


def row_tile(cols: int, elements: int = 2048) -> RowTile:
    """Rows of ``cols`` elements, about ``elements`` of them in a program and 16 to a thread."""
    block = next_power_of_2(cols)
    rows = max(1, elements // block)
    return RowTile(rows, block, num_warps=min(max(next_power_of_2(rows * block) // 512, 1), 16))


@frozen
class GemmTile:
    """A block of a matrix product: ``m`` × ``n`` outputs, ``k`` deep, ``num_stages`` of it in flight."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int

    def shared_bytes(self, dtype: str) -> int:
        """Shared memory that the pipelined operand tiles take."""
        return (self.m + self.n) * self.k * itemsize_bytes(dtype) * self.num_stages


def fit_stages(tile: GemmTile, dtype: str, device: Device) -> GemmTile:
    """``tile`` with ``k`` halved for 4-byte types and with as many stages as the device's shared memory holds.

    One KiB is left for what Triton keeps beside the operands; at least two stages are kept, with a smaller ``k``.
    """
    k, stages = tile.k * 2 // itemsize_bytes(dtype), tile.num_stages
    limit = (device.shared_memory_bytes or 99 * 1024) - 1024
    while True:
        fitted = GemmTile(tile.m, tile.n, max(k, 16), tile.num_warps, stages)
        if fitted.shared_bytes(dtype) <= limit or (k <= 16 and stages <= 2):
            return fitted
        if stages > 2:
            stages -= 1
        else:
            k //= 2


def blocks(n: int, block: int) -> int:
    """How many blocks cover ``n``."""
    return ceil_div(n, block)


def dot_precision(dtype: str) -> str:
    """How ``tl.dot`` multiplies: float32 operands exactly, others as the tensor cores do anyway."""
    return "ieee" if dtype == "float32" else "tf32"
