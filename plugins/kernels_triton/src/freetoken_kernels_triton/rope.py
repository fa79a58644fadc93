"""``rope``: queries and keys of a step in one launch, partial rotation included."""

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

KERNEL = "freetoken_kernels_triton.rope_kernel:rope_kernel"


def accepts(shape: OpShape) -> Availability:
    """Heads whose rows are aligned, rotated in an even number of dims."""
    if shape.head_dim % row_multiple(shape.dtype):
        return Availability.no(f"head size {shape.head_dim} is not a multiple of {row_multiple(shape.dtype)}")
    if shape.rotary_dim % 2 or not 0 < shape.rotary_dim <= shape.head_dim:
        return Availability.no(f"rotary size {shape.rotary_dim} is odd or not within head size {shape.head_dim}")
    return Availability.yes()


def launch(tokens: int, strides: tuple[int, int, int, int], shape: OpShape, device: Device) -> TritonLaunch:
    """The one launch; ``strides`` are q's token and head strides, then k's, in elements."""
    heads = min(next_power_of_2(max(shape.q_heads, shape.kv_heads)), max(1, 2048 // next_power_of_2(shape.head_dim)))
    q_blocks, k_blocks = blocks(shape.q_heads, heads), blocks(shape.kv_heads, heads)
    rest = shape.head_dim - shape.rotary_dim
    tensor = TensorArg(shape.dtype)
    made = TritonLaunch(
        kernel=KERNEL,
        args=(
            ("q", tensor), ("k", tensor), ("positions", TensorArg("int64")), ("cos_sin", TensorArg("float32")),
            ("q_out", tensor), ("k_out", tensor),
            ("q_stride", strides[0]), ("q_head_stride", strides[1]),
            ("k_stride", strides[2]), ("k_head_stride", strides[3]),
        ),
        constexprs=(
            ("Q_HEADS", shape.q_heads), ("K_HEADS", shape.kv_heads), ("D", shape.head_dim), ("R", shape.rotary_dim),
            ("BLOCK_HEADS", heads), ("BLOCK_HALF", next_power_of_2(shape.rotary_dim // 2)),
            ("BLOCK_REST", next_power_of_2(rest) if rest else 0),
        ),
        grid=(tokens, q_blocks + k_blocks, 1),
    )  # fmt: skip
    return dependent(made, device)


def launches(point: StepPoint, shape: OpShape, device: Device) -> tuple[TritonLaunch, ...]:
    """What one call on a step's tokens starts."""
    dim = shape.head_dim
    return (launch(point.tokens, (shape.q_heads * dim, dim, shape.kv_heads * dim, dim), shape, device),)


def load(setup: KernelSetup) -> LoadedKernel:
    import torch

    shape, device = setup.shape, setup.device
    bound = memoised(lambda tokens, strides: launch(tokens, strides, shape, device))

    def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """``q [T, Hq, D]``, ``k [T, Hkv, D]``, strided or not → contiguous rotated copies."""
        q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
        if q.shape[0]:
            strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1))
            bound(q.shape[0], strides)(q, k, positions, cos_sin, q_out, k_out)
        return q_out, k_out

    return LoadedKernel(call=rope)
