"""``rms_norm``: one compiled kernel for every number of rows."""

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

KERNEL = "freetoken_kernels_triton.rms_norm_kernel:rms_norm_kernel"


def launch(rows: Rows, eps: float, shape: OpShape, device: Device) -> TritonLaunch:
    """The one launch: ``rows`` of ``shape.cols`` elements."""
    tile = row_tile(shape.cols)
    tensor = TensorArg(shape.dtype)
    made = TritonLaunch(
        kernel=KERNEL,
        args=(
            ("x", tensor), ("weight", tensor), ("out", tensor),
            ("rows", rows.count), ("groups", rows.groups), ("x_stride", rows.stride),
            ("x_group_stride", rows.group_stride), ("eps", eps),
        ),
        constexprs=(("N", shape.cols), ("BLOCK_ROWS", tile.rows), ("BLOCK_N", tile.cols)),
        grid=(blocks(rows.count, tile.rows), 1, 1),
        num_warps=tile.num_warps,
    )  # fmt: skip
    return dependent(made, device)


def launches(point: StepPoint, shape: OpShape, device: Device) -> tuple[TritonLaunch, ...]:
    """What a step starts: one norm of its tokens or, where the shape has heads, one of the queries' and one of the
    keys'."""
    groups = (shape.q_heads, shape.kv_heads) if shape.q_heads else (1,)
    return tuple(launch(Rows.packed(point.tokens, shape.cols, count), 1e-6, shape, device) for count in groups if count)


def load(setup: KernelSetup) -> LoadedKernel:
    import torch

    shape, device = setup.shape, setup.device
    bound = memoised(lambda rows, eps: launch(rows, eps, shape, device))

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``x [..., N]`` with at most one axis between tokens and N, strided or not → contiguous, same shape."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel():
            bound(Rows.of(x), eps)(x, weight, out)
        return out

    return LoadedKernel(call=rms_norm)
