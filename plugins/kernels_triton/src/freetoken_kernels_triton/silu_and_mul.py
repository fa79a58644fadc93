"""``silu_and_mul``: the gated activation of a dense MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetoken.ops.dependent_launch import dependent
from freetoken.ops.triton_launch import memoised
from freetoken.plugin.protocols import KernelSetup, LoadedKernel
from freetoken.vocab.hardware import Device
from freetoken.vocab.launch import StepPoint, TensorArg, TritonLaunch
from freetoken.vocab.ops import OpShape
from freetoken_kernels_triton.tiles import blocks, next_power_of_2

if TYPE_CHECKING:
    from torch import Tensor

KERNEL = "freetoken_kernels_triton.silu_and_mul_kernel:silu_and_mul_kernel"
MAX_BLOCK = 1024


def width(shape: OpShape) -> int:
    """The number of output columns, wherever the family wrote it."""
    return shape.intermediate or shape.cols // 2


def launch(rows: int, x_stride: int, shape: OpShape, cols: int, device: Device) -> TritonLaunch:
    """The one launch: ``rows`` of ``cols`` outputs each."""
    block = min(next_power_of_2(cols), MAX_BLOCK)
    tensor = TensorArg(shape.dtype)
    made = TritonLaunch(
        kernel=KERNEL,
        args=(("x", tensor), ("out", tensor), ("x_stride", x_stride)),
        constexprs=(("N", cols), ("BLOCK_N", block)),
        grid=(rows, blocks(cols, block), 1),
    )
    return dependent(made, device)


def launches(point: StepPoint, shape: OpShape, device: Device) -> tuple[TritonLaunch, ...]:
    """What one call on a step's tokens starts."""
    return (launch(point.tokens, 2 * width(shape), shape, width(shape), device),)


def load(setup: KernelSetup) -> LoadedKernel:
    import torch

    shape, device = setup.shape, setup.device
    bound = memoised(lambda rows, stride, cols: launch(rows, stride, shape, cols, device))

    def silu_and_mul(x: Tensor) -> Tensor:
        """``x [T, 2I]`` → ``[T, I]``."""
        rows, cols = x.shape[0], x.shape[1] // 2
        out = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
        if rows:
            bound(rows, x.stride(0), cols)(x, out)
        return out

    return LoadedKernel(call=silu_and_mul)
