"""Which of three forms the experts' products take, and their tiles: a pure table of shape and device."""

from __future__ import annotations

from attrs import frozen

from freetoken.vocab.hardware import Device
from freetoken.vocab.ops import OpShape
from freetoken_kernels_triton.tiles import GemmTile, fit_stages, next_power_of_2, power_of_2_divisor

PAIR_TOKENS = 4
"""Up to here tokens rarely share an expert, so every pair reads its own: no sorting, no padding to a tile."""

SLOT_PAIRS = 512
"""Up to here each program finds its slot's pairs by looking at all of them."""

FEW_ROWS, SOME_ROWS = 12, 96
"""Mean pairs an expert up to which 16, then 64 rows make a tile; beyond, 128."""


@frozen
class Form:
    """How ``tokens`` tokens are computed: ``"pair"``, ``"slot"`` or ``"tile"``, with the tiles of both products."""

    name: str
    up: GemmTile
    down: GemmTile


def choose_form(tokens: int, shape: OpShape, device: Device) -> Form:
    """The form for a step of ``tokens`` tokens."""
    if tokens <= PAIR_TOKENS:
        return Form("pair", *_pair_tiles(shape))
    if tokens * shape.top_k <= SLOT_PAIRS:
        return Form("slot", *_gemm_tiles(16, shape, device))
    mean = tokens * shape.top_k / shape.experts
    rows = 16 if mean <= FEW_ROWS else 64 if mean <= SOME_ROWS else 128
    if shape.dtype == "float32":
        rows = min(rows, 64)  # exact products keep both operands in registers
    return Form("tile", *_gemm_tiles(rows, shape, device))


def _pair_tiles(shape: OpShape) -> tuple[GemmTile, GemmTile]:
    """``n`` counts inner columns of the first product (each is two rows of gate_up) and outputs of the second."""
    up_k = min(next_power_of_2(shape.cols), 2048)
    down_k = power_of_2_divisor(shape.intermediate, 512)
    if down_k < 128:
        down_k = min(next_power_of_2(shape.intermediate), 512)
    up = GemmTile(1, max(1, 4096 // up_k), up_k, num_warps=4, num_stages=1)
    return up, GemmTile(1, max(1, 2048 // down_k), down_k, num_warps=4, num_stages=1)


_TABLE = {
    16: GemmTile(16, 64, 128, num_warps=4, num_stages=4),
    64: GemmTile(64, 128, 64, num_warps=4, num_stages=4),
    128: GemmTile(128, 128, 64, num_warps=8, num_stages=4),
}
_EXACT = GemmTile(16, 32, 64, num_warps=4, num_stages=2)


def _gemm_tiles(rows: int, shape: OpShape, device: Device) -> tuple[GemmTile, GemmTile]:
    base = _TABLE[rows]
    if shape.dtype == "float32":
        base = GemmTile(min(rows, 64), _EXACT.n, _EXACT.k, _EXACT.num_warps, _EXACT.num_stages)
    return _cut(base, shape.cols, shape.dtype, device), _cut(base, shape.intermediate, shape.dtype, device)


def _cut(tile: GemmTile, depth: int, dtype: str, device: Device) -> GemmTile:
    """``tile`` no deeper than a product over ``depth`` needs."""
    k = min(tile.k, max(16, next_power_of_2(depth)))
    return fit_stages(GemmTile(tile.m, tile.n, k, tile.num_warps, tile.num_stages), dtype, device)
