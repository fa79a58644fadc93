"""``linear``: up to 16 rows by kernels that read the matrix at memory speed, more by the library."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from freetoken.ops.dependent_launch import dependent
from freetoken.ops.triton_launch import memoised
from freetoken.plugin.protocols import KernelSetup, LoadedKernel
from freetoken.vocab.availability import Availability
from freetoken.vocab.hardware import Device
from freetoken.vocab.launch import Launch, LibraryCall, StepPoint, TensorArg, TritonLaunch
from freetoken.vocab.ops import OpShape
from freetoken_kernels_triton.tiles import GemmTile, blocks, dot_precision, fit_stages, next_power_of_2, row_multiple

if TYPE_CHECKING:
    from torch import Tensor

    from freetoken.vocab.weight import StoredTensor

GEMV = "freetoken_kernels_triton.linear_kernel:gemv_kernel"
SKINNY = "freetoken_kernels_triton.linear_kernel:skinny_gemm_kernel"
SKINNY_ROWS = 16
"""Up to here a product reads little but the matrix; beyond, the library's tiles are as good."""


MAX_LIBRARY_ROWS = 1 << 20


def padded_rows(rows: int) -> int:
    """The rows a library product of ``rows`` is padded to: multiples of 16, from 512 on 16 an octave.

    A library picks kernels by the exact number of rows. Padding (at most 6 % from 256 on) leaves 95 numbers up to 8192,
    so that a sweep touches every one of them; before, a prompt of 719 tokens met a kernel that no sweep had loaded, for
    13 ms on an H200.
    """
    step = max(16, 1 << max(0, (rows - 1).bit_length() - 5))
    return blocks(rows, step) * step


@cache
def library_rows() -> tuple[int, ...]:
    """Every number of rows that a padded product can have, ascending."""
    counts, rows = [], SKINNY_ROWS
    while rows < MAX_LIBRARY_ROWS:
        rows = padded_rows(rows + 1)
        counts.append(rows)
    return tuple(counts)


def accepts(shape: OpShape) -> Availability:
    """A matrix whose rows are aligned."""
    if shape.cols % row_multiple(shape.dtype):
        return Availability.no(f"{shape.cols} columns are not a multiple of {row_multiple(shape.dtype)}")
    return Availability.yes()


GEMV_VARIANT = "four-rows"
"""Which of ``GEMV_VARIANTS`` is used; the others are there to be measured (``benchmarks/gpu_decode.py --variants``)."""

GEMV_VARIANTS = {"four-rows": (8192, 4), "two-rows": (4096, 2), "eight-rows": (16384, 8), "half": (4096, 4)}
"""Weights a program, and its warps. For 2048 → 5120 on 132 multiprocessors: 1280 programs of 16 KB whose threads have 8
loads of 16 bytes in flight; about 80 registers a thread let six stand on a multiprocessor, 792 at once, 1.6 rounds.
``two-rows`` and ``eight-rows`` cut the same 128 bytes a thread into smaller and larger programs, which changes the last
round alone. ``half`` has 64 bytes a thread, ten programs a multiprocessor and 1.9 rounds: fewer loads in flight, more
threads to hide them. All are asked for before the predecessor has ended, as far as the first round holds them."""


def gemv_tile(shape: OpShape, device: Device) -> GemmTile:
    """Whole rows where they fit; enough programs for every multiprocessor."""
    elements, warps = GEMV_VARIANTS[GEMV_VARIANT]
    k = min(next_power_of_2(shape.cols), 4096 if shape.cols % 4096 == 0 else 2048)
    n = max(1, elements // k)
    while n > 1 and blocks(shape.rows, n) < 2 * (device.multiprocessors or 1):
        n //= 2
    return GemmTile(m=1, n=n, k=k, num_warps=warps, num_stages=1)


def skinny_tile(shape: OpShape, device: Device) -> GemmTile:
    """Narrow blocks of outputs while the matrix is small, so that all multiprocessors pull; deep pipelines."""
    n = 16
    while n < 64 and blocks(shape.rows, 2 * n) >= 4 * (device.multiprocessors or 1):
        n *= 2
    k = 256 if n <= 32 else 128
    return fit_stages(GemmTile(SKINNY_ROWS, n, min(k, max(16, next_power_of_2(shape.cols))), 4, 4), shape.dtype, device)


def launch(rows: int, x_stride: int, shape: OpShape, device: Device) -> TritonLaunch:
    """The one launch for ``rows ≤ SKINNY_ROWS``, ``x_stride`` elements apart."""
    tensor = TensorArg(shape.dtype)
    tensors = (("x", tensor), ("weight", tensor), ("out", tensor))
    if rows == 1:
        tile = gemv_tile(shape, device)
        gemv = TritonLaunch(
            kernel=GEMV,
            args=(*tensors, ("outputs", shape.rows)),
            constexprs=(("I", shape.cols), ("BLOCK_N", tile.n), ("BLOCK_K", tile.k)),
            grid=(blocks(shape.rows, tile.n), 1, 1),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        return dependent(gemv, device)
    tile = skinny_tile(shape, device)
    skinny = TritonLaunch(
        kernel=SKINNY,
        args=(*tensors, ("outputs", shape.rows), ("rows", rows), ("x_stride", x_stride)),
        constexprs=(
            ("I", shape.cols), ("BLOCK_M", tile.m), ("BLOCK_N", tile.n), ("BLOCK_K", tile.k),
            ("PRECISION", dot_precision(shape.dtype)),
        ),
        grid=(blocks(shape.rows, tile.n), 1, 1),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    return dependent(skinny, device)


def launches(point: StepPoint, shape: OpShape, device: Device) -> tuple[Launch, ...]:
    """What one call on a step's tokens starts."""
    if point.tokens <= SKINNY_ROWS:
        return (launch(point.tokens, shape.cols, shape, device),)
    return (library_call(shape, device),)


def library_call(shape: OpShape, device: Device) -> LibraryCall:
    """The library's product on this matrix's sizes, with scratch operands of its own."""
    name = f"linear {shape.rows}x{shape.cols} {shape.dtype}"

    def sweep(tokens: int) -> None:
        import torch
        import torch.nn.functional as F

        dtype = getattr(torch, shape.dtype)
        x = torch.empty((tokens, shape.cols), dtype=dtype, device=device.torch_name)
        F.linear(x, torch.empty((shape.rows, shape.cols), dtype=dtype, device=device.torch_name))

    return LibraryCall(name, sweep, library_rows())


def load(setup: KernelSetup) -> LoadedKernel:
    import torch
    import torch.nn.functional as F

    from freetoken.ops.packing import pack_dense

    shape, device = setup.shape, setup.device
    bound = memoised(lambda rows, stride: launch(rows, stride, shape, device))
    dtype = getattr(torch, setup.dtype)

    def linear(x: Tensor, packed: Tensor) -> Tensor:
        """``x [T, I]``, ``packed [O, I]`` → ``[T, O]``."""
        rows = x.shape[0]
        if rows > SKINNY_ROWS:
            padded = padded_rows(rows)
            if padded == rows:
                return F.linear(x, packed)
            whole = torch.empty((padded, shape.cols), dtype=x.dtype, device=x.device)
            whole[:rows].copy_(x)  # the rest is never read: row i of a product depends on row i alone
            return F.linear(whole, packed)[:rows]
        out = torch.empty((rows, shape.rows), dtype=x.dtype, device=x.device)
        if rows:
            bound(rows, x.stride(0))(x, packed, out)
        return out

    def pack(tensors: Sequence[StoredTensor]) -> Tensor:
        return pack_dense(tensors, setup.dequantise, dtype, device.torch_name)

    return LoadedKernel(call=linear, pack=pack)
