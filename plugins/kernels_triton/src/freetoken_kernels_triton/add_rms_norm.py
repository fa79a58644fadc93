"""``add_rms_norm``: the residual stream's addition and the next norm, one kernel for every number of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetoken.ops.dependent_launch import dependent
from freetoken.ops.triton_launch import memoised
from freetoken.plugin.protocols import KernelSetup, LoadedKernel
from freetoken.vocab.hardware import Device
from freetoken.vocab.launch import StepPoint, TensorArg, TritonLaunch
from freetoken.vocab.ops import OpShape
from freetoken_kernels_triton.tiles import blocks, row_tile

if TYPE_CHECKING:
    from torch import Tensor

KERNEL = "freetoken_kernels_triton.add_rms_norm_kernel:add_rms_norm_kernel"


def launch(rows: int, x_stride: int, residual_stride: int, eps: float, shape: OpShape, device: Device) -> TritonLaunch:
    """The one launch: ``rows`` of ``shape.cols`` elements, strides in elements."""
    tile = row_tile(shape.cols)
    tensor = TensorArg(shape.dtype)
    made = TritonLaunch(
        kernel=KERNEL,
        args=(
            ("x", tensor), ("residual", tensor), ("weight", tensor), ("normed", tensor), ("summed", tensor),
            ("rows", rows), ("x_stride", x_stride), ("residual_stride", residual_stride), ("eps", eps),
        ),
        constexprs=(("N", shape.cols), ("BLOCK_ROWS", tile.rows), ("BLOCK_N", tile.cols)),
        grid=(blocks(rows, tile.rows), 1, 1),
        num_warps=tile.num_warps,
    )  # fmt: skip
    return dependent(made, device)


def launches(point: StepPoint, shape: OpShape, device: Device) -> tuple[TritonLaunch, ...]:
    """What one call on a step's tokens starts."""
    return (launch(point.tokens, shape.cols, shape.cols, 1e-6, shape, device),)


def load(setup: KernelSetup) -> LoadedKernel:
    import torch

    shape, device = setup.shape, setup.device
    bound = memoised(lambda rows, a, b, eps: launch(rows, a, b, eps, shape, device))

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """``x``, ``residual [T, N]`` → contiguous ``(normed, summed)``."""
        normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        summed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.shape[0]:
            bound(x.shape[0], x.stride(0), residual.stride(0), eps)(x, residual, weight, normed, summed)
        return normed, summed

    return LoadedKernel(call=add_rms_norm)
