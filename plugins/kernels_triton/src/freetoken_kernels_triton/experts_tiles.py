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
    ranks: int = 1  # of the form "pair": experts that the second product reads side by side


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


PAIR_VARIANT = "ranks"
"""Which of ``PAIR_VARIANTS`` is used; the others are there to be measured (``benchmarks/gpu_decode.py --variants``)."""


@frozen
class PairTiles:
    """Sizes for one token: inner columns and warps of the first product; experts at a time, outputs and warps of the
    second. Both take ``*_elements`` weights a program at a time."""

    up_elements: int
    up_warps: int
    ranks: int
    down_outputs: int
    down_warps: int


PAIR_VARIANTS = {
    "ranks": PairTiles(up_elements=8192, up_warps=4, ranks=8, down_outputs=2, down_warps=4),
    "ranks-fine": PairTiles(up_elements=4096, up_warps=2, ranks=8, down_outputs=1, down_warps=2),
    "ranks-wide": PairTiles(up_elements=16384, up_warps=8, ranks=8, down_outputs=4, down_warps=8),
    "one-by-one": PairTiles(up_elements=8192, up_warps=4, ranks=1, down_outputs=8, down_warps=4),
}
"""The arithmetic, for 8 experts of [2·768, 2048] and [2048, 768] at 2 bytes, and 132 multiprocessors, each of which
must have 30 KB in flight to reach 4.3 TB/s at 0.9 µs of latency:

- ``ranks``: first product 384 × 8 = 3072 programs of 16 KB, 8 loads of 16 bytes in flight in each thread; at six
  programs a multiprocessor 3.9 rounds. Second: 1024 programs of 8 × 2 × 768 · 2 = 24 KB in three steps of 8 KB that do
  not wait for each other; 7.8 programs a multiprocessor, 1.3 to 1.6 rounds.
- ``ranks-fine``: the same bytes in twice as many programs of half the size, for a shorter last round: 6144 and 2048.
- ``ranks-wide``: half as many programs, 1536 and 512: the least overhead a byte, the longest last round.
- ``one-by-one``: the second product waits for each expert's slot, then for its rows, eight times in a row. So it was
  when it took 14 µs, of which the bytes are 6.

Qwen3.6-35B-A3B has [2·512, 2048]: 2048 and 1024 programs, 2.6 and 1.3 rounds."""


def _pair_tiles(shape: OpShape) -> tuple[GemmTile, GemmTile, int]:
    """``n`` counts inner columns of the first product (each is two rows of gate_up) and outputs of the second; last how
    many experts the second product reads side by side."""
    sizes = PAIR_VARIANTS[PAIR_VARIANT]
    up_k = min(next_power_of_2(shape.cols), 2048)
    down_k = power_of_2_divisor(shape.intermediate, 256)
    if down_k < 128:
        down_k = min(next_power_of_2(shape.intermediate), 256)
    up = GemmTile(1, max(1, sizes.up_elements // (2 * up_k)), up_k, num_warps=sizes.up_warps, num_stages=1)
    down = GemmTile(1, sizes.down_outputs, down_k, num_warps=sizes.down_warps, num_stages=1)
    return up, down, sizes.ranks


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
