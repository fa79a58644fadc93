"""``rope_write``: head norms, rotary embedding and the write into the pages in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetoken.ops.dependent_launch import dependent
from freetoken.ops.triton_launch import memoised
from freetoken.plugin.protocols import KernelSetup, LoadedKernel
from freetoken.vocab.availability import Availability
from freetoken.vocab.errors import EngineError
from freetoken.vocab.hardware import Device
from freetoken.vocab.launch import StepPoint, TensorArg, TritonLaunch
from freetoken.vocab.ops import OpShape
from freetoken_kernels_triton import rope, write_kv
from freetoken_kernels_triton.tiles import blocks, next_power_of_2

if TYPE_CHECKING:
    from torch import Tensor

KERNEL = "freetoken_kernels_triton.rope_write_kernel:rope_write_kernel"
BLOCK_ELEMENTS = 2048
Strides = tuple[int, int, int, int, int, int]
"""Token and head strides of q, k and v, in elements."""


def accepts(shape: OpShape) -> Availability:
    """What the rotation and the write by themselves accept."""
    return rope.accepts(shape) and write_kv.accepts(shape)


def launch(tokens: int, strides: Strides, eps: float, shape: OpShape, device: Device) -> TritonLaunch:
    """The one launch. ``shape.cols`` is 0 where heads are not normed."""
    dim, v_dim = shape.head_dim, shape.v_dim or shape.head_dim
    heads = min(
        next_power_of_2(max(shape.q_heads, shape.kv_heads)), max(1, BLOCK_ELEMENTS // next_power_of_2(max(dim, v_dim)))
    )
    q_blocks, k_blocks = blocks(shape.q_heads, heads), blocks(shape.kv_heads, heads)
    rest, tensor, i64 = dim - shape.rotary_dim, TensorArg(shape.dtype), TensorArg("int64")
    weight = tensor if shape.cols else None
    made = TritonLaunch(
        kernel=KERNEL,
        args=(
            ("q", tensor), ("k", tensor), ("v", tensor), ("q_weight", weight), ("k_weight", weight),
            ("positions", i64), ("cos_sin", TensorArg("float32")), ("k_pool", tensor), ("v_pool", tensor),
            ("kv_slots", i64), ("out", tensor),
            ("q_stride", strides[0]), ("q_head_stride", strides[1]), ("k_stride", strides[2]),
            ("k_head_stride", strides[3]), ("v_stride", strides[4]), ("v_head_stride", strides[5]), ("eps", eps),
        ),
        constexprs=(
            ("Q_HEADS", shape.q_heads), ("K_HEADS", shape.kv_heads), ("D", dim), ("DV", v_dim),
            ("R", shape.rotary_dim), ("BLOCK_HEADS", heads), ("BLOCK_HALF", next_power_of_2(shape.rotary_dim // 2)),
            ("BLOCK_REST", next_power_of_2(rest) if rest else 0), ("BLOCK_V", next_power_of_2(v_dim)),
            ("NORM", shape.cols > 0),
        ),
        grid=(tokens, q_blocks + k_blocks, 1),
    )  # fmt: skip
    return dependent(made, device)


def launches(point: StepPoint, shape: OpShape, device: Device) -> tuple[TritonLaunch, ...]:
    """What one call on a step's tokens starts."""
    dim, v_dim = shape.head_dim, shape.v_dim or shape.head_dim
    strides = (shape.q_heads * dim, dim, shape.kv_heads * dim, dim, shape.kv_heads * v_dim, v_dim)
    return (launch(point.tokens, strides, 1e-6, shape, device),)


def load(setup: KernelSetup) -> LoadedKernel:
    import torch

    shape, device = setup.shape, setup.device
    bound = memoised(lambda tokens, strides, eps: launch(tokens, strides, eps, shape, device))

    def rope_write(
        q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float,
        positions: Tensor, cos_sin: Tensor, k_pool: Tensor, v_pool: Tensor, kv_slots: Tensor,
    ) -> Tensor:  # fmt: skip
        """``q [T, Hq, D]``, ``k``, ``v [T, Hkv, D]``, strided or not; pools ``[pages, P, Hkv, D]`` contiguous."""
        if not (k_pool.is_contiguous() and v_pool.is_contiguous()):
            raise EngineError("rope_write into strided pools", f"strides {k_pool.stride()} and {v_pool.stride()}")
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if q.shape[0]:
            strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1))
            weights = (q_weight, k_weight) if shape.cols else ()
            bound(q.shape[0], strides, eps)(
                q, k, v, *weights, positions, cos_sin, k_pool, v_pool, kv_slots, out
            )  # fmt: skip
        return out

    return LoadedKernel(call=rope_write)
