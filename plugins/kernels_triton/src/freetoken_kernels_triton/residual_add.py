"""``residual_add``: what a layer's feed-forward part adds to the residual stream, a gated shared expert included."""

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

KERNEL = "freetoken_kernels_triton.gates_kernel:residual_add_kernel"
BLOCK_COLS = 1024
Strides = tuple[int, int, int, int]
"""Between rows of x, the residual, the shared expert's output and its gate, in elements."""


def launch(rows: int, strides: Strides, shape: OpShape, device: Device) -> TritonLaunch:
    """The one launch. ``shape.rows`` is 1 where there is a shared expert, else 0."""
    tensor, block = TensorArg(shape.dtype), min(next_power_of_2(shape.cols), BLOCK_COLS)
    extra = tensor if shape.rows else None
    made = TritonLaunch(
        kernel=KERNEL,
        args=(
            ("x", tensor), ("residual", tensor), ("shared", extra), ("gate", extra), ("out", tensor),
            ("x_stride", strides[0]), ("residual_stride", strides[1]), ("shared_stride", strides[2]),
            ("gate_stride", strides[3]),
        ),
        constexprs=(("N", shape.cols), ("BLOCK_N", block), ("SHARED", shape.rows > 0)),
        grid=(rows, blocks(shape.cols, block), 1),
    )  # fmt: skip
    return dependent(made, device)


def launches(point: StepPoint, shape: OpShape, device: Device) -> tuple[TritonLaunch, ...]:
    """What one call on a step's tokens starts."""
    return (launch(point.tokens, (shape.cols, shape.cols, shape.cols, 1), shape, device),)


def load(setup: KernelSetup) -> LoadedKernel:
    import torch

    shape, device = setup.shape, setup.device
    bound = memoised(lambda rows, strides: launch(rows, strides, shape, device))

    def residual_add(x: Tensor, residual: Tensor, shared: Tensor | None, gate: Tensor | None) -> Tensor:
        """``x``, ``residual``, ``shared [T, N]``, ``gate [T, 1]`` → contiguous ``[T, N]``."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if not x.shape[0]:
            return out
        if shared is None or gate is None:
            bound(x.shape[0], (x.stride(0), residual.stride(0), 0, 0))(x, residual, out)
        else:
            strides = (x.stride(0), residual.stride(0), shared.stride(0), gate.stride(0))
            bound(x.shape[0], strides)(x, residual, shared, gate, out)
        return out

    return LoadedKernel(call=residual_add)
