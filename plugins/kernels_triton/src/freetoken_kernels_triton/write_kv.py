"""``write_kv``: new keys and values go into their pages."""

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
from freetoken_kernels_triton.tiles import next_power_of_2, row_multiple

if TYPE_CHECKING:
    from torch import Tensor

KERNEL = "freetoken_kernels_triton.write_kv_kernel:write_kv_kernel"


def accepts(shape: OpShape) -> Availability:
    """Heads whose rows are aligned."""
    for dim in (shape.head_dim, shape.v_dim or shape.head_dim):
        if dim % row_multiple(shape.dtype):
            return Availability.no(f"head size {dim} is not a multiple of {row_multiple(shape.dtype)}")
    return Availability.yes()


def launch(tokens: int, strides: tuple[int, int, int, int], shape: OpShape, device: Device) -> TritonLaunch:
    """The one launch; ``strides`` are k's token and head strides, then v's, in elements."""
    v_dim = shape.v_dim or shape.head_dim
    tensor = TensorArg(shape.dtype)
    made = TritonLaunch(
        kernel=KERNEL,
        args=(
            ("k", tensor), ("v", tensor), ("k_pool", tensor), ("v_pool", tensor), ("kv_slots", TensorArg("int64")),
            ("k_stride", strides[0]), ("k_head_stride", strides[1]),
            ("v_stride", strides[2]), ("v_head_stride", strides[3]),
        ),
        constexprs=(
            ("HEADS", shape.kv_heads), ("K_DIM", shape.head_dim), ("V_DIM", v_dim),
            ("BLOCK_HEADS", next_power_of_2(shape.kv_heads)),
            ("BLOCK_K", next_power_of_2(shape.head_dim)), ("BLOCK_V", next_power_of_2(v_dim)),
        ),
        grid=(tokens, 1, 1),
        num_warps=2,
    )  # fmt: skip
    return dependent(made, device)


def launches(point: StepPoint, shape: OpShape, device: Device) -> tuple[TritonLaunch, ...]:
    """What one call on a step's tokens starts."""
    heads, k_dim, v_dim = shape.kv_heads, shape.head_dim, shape.v_dim or shape.head_dim
    return (launch(point.tokens, (heads * k_dim, k_dim, heads * v_dim, v_dim), shape, device),)


def load(setup: KernelSetup) -> LoadedKernel:
    shape, device = setup.shape, setup.device
    bound = memoised(lambda tokens, strides: launch(tokens, strides, shape, device))

    def write_kv(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, kv_slots: Tensor) -> None:
        """``k``, ``v [T, Hkv, D]``, strided or not; pools ``[pages, P, Hkv, D]`` contiguous."""
        if not (k_pool.is_contiguous() and v_pool.is_contiguous()):
            raise EngineError("write_kv into strided pools", f"strides {k_pool.stride()} and {v_pool.stride()}")
        if k.shape[0]:
            strides = (k.stride(0), k.stride(1), v.stride(0), v.stride(1))
            bound(k.shape[0], strides)(k, v, k_pool, v_pool, kv_slots)

    return LoadedKernel(call=write_kv)
