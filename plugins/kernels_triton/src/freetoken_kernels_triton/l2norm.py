"""``l2norm``: the token count is a plain run-time integer, so one compiled kernel serves every length."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetoken.ops.dependent_launch import dependent
from freetoken.ops.triton_launch import memoised
from freetoken.plugin.protocols import KernelSetup, LoadedKernel
from freetoken.vocab.hardware import Device
from freetoken.vocab.launch import StepPoint, TensorArg, TritonLaunch
from freetoken.vocab.ops import OpShape
from freetoken_kernels_triton.rows import Rows
from freetoken_kernels_triton.tiles import blocks, row_tile

if TYPE_CHECKING:
    from torch import Tensor

KERNEL = "freetoken_kernels_triton.l2norm_kernel:l2norm_kernel"


def launch(rows: Rows, eps: float, shape: OpShape, dim: int, device: Device) -> TritonLaunch:
    """The one launch: ``rows`` of ``dim`` elements."""
    tile = row_tile(dim)
    tensor = TensorArg(shape.dtype)
    made = TritonLaunch(
        kernel=KERNEL,
        args=(
            ("x", tensor), ("out", tensor), ("rows", rows.count), ("groups", rows.groups),
            ("x_stride", rows.stride), ("x_group_stride", rows.group_stride), ("eps", eps),
        ),
        constexprs=(("N", dim), ("BLOCK_ROWS", tile.rows), ("BLOCK_N", tile.cols)),
        grid=(blocks(rows.count, tile.rows), 1, 1),
        num_warps=tile.num_warps,
    )  # fmt: skip
    return dependent(made, device)


def launches(point: StepPoint, shape: OpShape, device: Device) -> tuple[TritonLaunch, ...]:
    """What one call on a step's tokens starts."""
    dim = norm_dim(shape)
    return (launch(Rows.packed(point.tokens, dim, shape.q_heads or 1), 1e-6, shape, dim, device),)


def norm_dim(shape: OpShape) -> int:
    """The length of a row, wherever the family wrote it."""
    return shape.head_dim or shape.cols


def load(setup: KernelSetup) -> LoadedKernel:
    import torch

    shape, device = setup.shape, setup.device
    bound = memoised(lambda rows, eps, dim: launch(rows, eps, shape, dim, device))

    def l2norm(x: Tensor, eps: float) -> Tensor:
        """``x [T, Hk, D]`` (or ``[T, D]``), strided or not → contiguous, same shape."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel():
            bound(Rows.of(x), eps, x.shape[-1])(x, out)
        return out

    return LoadedKernel(call=l2norm)
