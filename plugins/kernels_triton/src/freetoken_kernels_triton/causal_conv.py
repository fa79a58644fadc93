"""``causal_conv``: varlen prefill and one-token decode, the state updated in the same launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetoken.ops.dependent_launch import dependent
from freetoken.ops.triton_launch import memoised
from freetoken.plugin.protocols import KernelSetup, LoadedKernel
from freetoken.vocab.availability import Availability
from freetoken.vocab.hardware import Device
from freetoken.vocab.launch import StepPoint, TensorArg, TritonLaunch
from freetoken.vocab.ops import OpShape
from freetoken_kernels_triton.tiles import blocks, next_power_of_2, row_multiple

if TYPE_CHECKING:
    from torch import Tensor

MODULE = "freetoken_kernels_triton.causal_conv_kernel:"
BLOCK_TOKENS = 32
BLOCK_CHANNELS = 128
SEQUENCES_AT_ONCE = 64


def accepts(shape: OpShape) -> Availability:
    """Aligned rows of channels, and a width that fits a block of tokens."""
    if shape.rows % row_multiple(shape.dtype):
        return Availability.no(f"{shape.rows} channels are not a multiple of {row_multiple(shape.dtype)}")
    if not 2 <= shape.width <= BLOCK_TOKENS:
        return Availability.no(f"width {shape.width} is not between 2 and {BLOCK_TOKENS}")
    return Availability.yes()


def launch(tokens: int, sequences: int, stride: int, shape: OpShape, device: Device) -> TritonLaunch:
    """The one launch; one token for each sequence is decode. ``stride`` between x's rows in elements."""
    data, f32, i32, i64 = (TensorArg(d) for d in (shape.dtype, "float32", "int32", "int64"))
    cols = min(BLOCK_CHANNELS, next_power_of_2(shape.rows))
    sizes = (("C", shape.rows), ("W", shape.width))
    if tokens == sequences:
        rows = 4
        decode = TritonLaunch(
            kernel=MODULE + "conv_decode_kernel",
            args=(
                ("x", data), ("weight", data), ("state", f32), ("state_slots", i64), ("prefix_lens", i32),
                ("out", data), ("x_stride", stride), ("sequences", sequences),
            ),
            constexprs=(*sizes, ("BLOCK_B", rows), ("BLOCK_C", cols)),
            grid=(blocks(sequences, rows), blocks(shape.rows, cols), 1),
        )  # fmt: skip
        return dependent(decode, device)
    return TritonLaunch(
        kernel=MODULE + "conv_prefill_kernel",
        args=(
            ("x", data), ("weight", data), ("state", f32), ("query_starts", i32), ("state_slots", i64),
            ("prefix_lens", i32), ("out", data), ("x_stride", stride), ("sequences", sequences),
        ),
        constexprs=(*sizes, ("BLOCK_T", BLOCK_TOKENS), ("BLOCK_C", cols), ("BLOCK_B", SEQUENCES_AT_ONCE)),
        grid=(tokens // BLOCK_TOKENS + sequences, blocks(shape.rows, cols), 1),
    )  # fmt: skip


def launches(point: StepPoint, shape: OpShape, device: Device) -> tuple[TritonLaunch, ...]:
    """What one call on a step starts."""
    return (launch(point.tokens, point.sequences, shape.rows, shape, device),)


def load(setup: KernelSetup) -> LoadedKernel:
    import torch

    shape, device = setup.shape, setup.device
    bound = memoised(lambda tokens, sequences, stride: launch(tokens, sequences, stride, shape, device))

    def causal_conv(
        x: Tensor, weight: Tensor, state: Tensor, query_starts: Tensor, state_slots: Tensor, prefix_lens: Tensor
    ) -> Tensor:
        """``x [T, C]``, strided or not → contiguous ``[T, C]``; ``state`` is updated in place."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        tokens, sequences = x.shape[0], state_slots.shape[0]
        if not tokens:
            return out
        run = bound(tokens, sequences, x.stride(0))
        if tokens == sequences:
            run(x, weight, state, state_slots, prefix_lens, out)
        else:
            run(x, weight, state, query_starts, state_slots, prefix_lens, out)
        return out

    return LoadedKernel(call=causal_conv)
