"""``gated_rms_norm``: the gated delta net's output norm, one kernel for every number of rows."""

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

KERNEL = "freetoken_kernels_triton.gated_rms_norm_kernel:gated_rms_norm_kernel"


def launch(x: Rows, gate: Rows, eps: float, shape: OpShape, dim: int, device: Device) -> TritonLaunch:
    """The one launch: rows of ``dim`` elements of ``x`` and of ``gate``."""
    tile = row_tile(dim)
    tensor = TensorArg(shape.dtype)
    made = TritonLaunch(
        kernel=KERNEL,
        args=(
            ("x", tensor), ("gate", tensor), ("weight", tensor), ("out", tensor),
            ("rows", x.count), ("groups", x.groups), ("x_stride", x.stride), ("x_group_stride", x.group_stride),
            ("gate_stride", gate.stride), ("gate_group_stride", gate.group_stride), ("eps", eps),
        ),
        constexprs=(("N", dim), ("BLOCK_ROWS", tile.rows), ("BLOCK_N", tile.cols)),
        grid=(blocks(x.count, tile.rows), 1, 1),
        num_warps=tile.num_warps,
    )  # fmt: skip
    return dependent(made, device)


def launches(point: StepPoint, shape: OpShape, device: Device) -> tuple[TritonLaunch, ...]:
    """What one call on a step's tokens starts."""
    rows = Rows.packed(point.tokens, norm_dim(shape), shape.kv_heads or 1)
    return (launch(rows, rows, 1e-6, shape, norm_dim(shape), device),)


def norm_dim(shape: OpShape) -> int:
    """The length of a row, wherever the family wrote it."""
    return shape.cols or shape.v_dim or shape.head_dim


def load(setup: KernelSetup) -> LoadedKernel:
    import torch

    shape, device = setup.shape, setup.device
    bound = memoised(lambda x, gate, eps, dim: launch(x, gate, eps, shape, dim, device))

    def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``x``, ``gate [T, Hv, D]`` (or ``[T, D]``), strided or not → contiguous, same shape."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel():
            bound(Rows.of(x), Rows.of(gate), eps, x.shape[-1])(x, gate, weight, out)
        return out

    return LoadedKernel(call=gated_rms_norm)
