"""``delta_gates``: the gated delta rule's strength and decay, one kernel for every number of rows."""

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

KERNEL = "freetoken_kernels_triton.gates_kernel:delta_gates_kernel"
BLOCK_ELEMENTS = 256


def launch(rows: int, stride: int, shape: OpShape, device: Device) -> TritonLaunch:
    """The one launch: ``rows`` of strengths and decays of ``shape.kv_heads`` heads, ``stride`` elements apart."""
    f32, heads = TensorArg("float32"), next_power_of_2(shape.kv_heads)
    block = max(1, BLOCK_ELEMENTS // heads)
    made = TritonLaunch(
        kernel=KERNEL,
        args=(
            ("ba", TensorArg(shape.dtype)), ("rate", f32), ("dt_bias", f32), ("beta", f32), ("decay", f32),
            ("rows", rows), ("ba_stride", stride),
        ),
        constexprs=(("HEADS", shape.kv_heads), ("BLOCK_ROWS", block), ("BLOCK_H", heads)),
        grid=(blocks(rows, block), 1, 1),
        num_warps=2,
    )  # fmt: skip
    return dependent(made, device)


def launches(point: StepPoint, shape: OpShape, device: Device) -> tuple[TritonLaunch, ...]:
    """What one call on a step's tokens starts."""
    return (launch(point.tokens, 2 * shape.kv_heads, shape, device),)


def load(setup: KernelSetup) -> LoadedKernel:
    import torch

    shape, device = setup.shape, setup.device
    bound = memoised(lambda rows, stride: launch(rows, stride, shape, device))

    def delta_gates(ba: Tensor, rate: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        """``ba [T, 2 Hv]``, ``rate``, ``dt_bias [Hv] f32`` → contiguous ``(beta, decay) [T, Hv] f32``."""
        beta = torch.empty((ba.shape[0], shape.kv_heads), dtype=torch.float32, device=ba.device)
        decay = torch.empty_like(beta)
        if ba.shape[0]:
            bound(ba.shape[0], ba.stride(0))(ba, rate, dt_bias, beta, decay)
        return beta, decay

    return LoadedKernel(call=delta_gates)
