"""``sigmoid_gate``: attention's output gate, one kernel for every number of rows."""

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

KERNEL = "freetoken_kernels_triton.gates_kernel:sigmoid_gate_kernel"


def launch(x: Rows, gate: Rows, shape: OpShape, device: Device) -> TritonLaunch:
    """The one launch: rows of ``shape.cols`` elements of ``x`` and of ``gate``."""
    tile, tensor = row_tile(shape.cols), TensorArg(shape.dtype)
    made = TritonLaunch(
        kernel=KERNEL,
        args=(
            ("x", tensor), ("gate", tensor), ("out", tensor), ("rows", x.count), ("groups", x.groups),
            ("x_stride", x.stride), ("x_group_stride", x.group_stride), ("gate_stride", gate.stride),
            ("gate_group_stride", gate.group_stride),
        ),
        constexprs=(("N", shape.cols), ("BLOCK_ROWS", tile.rows), ("BLOCK_N", tile.cols)),
        grid=(blocks(x.count, tile.rows), 1, 1),
        num_warps=tile.num_warps,
    )  # fmt: skip
    return dependent(made, device)


def launches(point: StepPoint, shape: OpShape, device: Device) -> tuple[TritonLaunch, ...]:
    """What one call on a step's tokens starts."""
    rows = Rows.packed(point.tokens, shape.cols, shape.q_heads)
    return (launch(rows, rows, shape, device),)


def load(setup: KernelSetup) -> LoadedKernel:
    import torch

    shape, device = setup.shape, setup.device
    bound = memoised(lambda x, gate: launch(x, gate, shape, device))

    def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
        """``x``, ``gate [T, Hq, D]``, strided or not → contiguous, same shape."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel():
            bound(Rows.of(x), Rows.of(gate))(x, gate, out)
        return out

    return LoadedKernel(call=sigmoid_gate)
