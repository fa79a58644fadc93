"""``delta_net``: one kernel where each sequence brings a token; for prompts norm, gates and the chunked rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from freetoken.ops.dependent_launch import dependent
from freetoken.ops.triton_launch import memoised
from freetoken.plugin.protocols import KernelSetup, LoadedKernel
from freetoken.vocab.availability import Availability
from freetoken.vocab.hardware import Device
from freetoken.vocab.launch import StepPoint, TensorArg, TritonLaunch
from freetoken.vocab.ops import OpShape
from freetoken_kernels_triton import delta_gates, gated_delta, l2norm
from freetoken_kernels_triton.rows import Rows
from freetoken_kernels_triton.tiles import blocks, next_power_of_2, row_multiple

if TYPE_CHECKING:
    from torch import Tensor

KERNEL = "freetoken_kernels_triton.delta_net_kernel:delta_net_decode_kernel"


def accepts(shape: OpShape) -> Availability:
    """What the rule by itself accepts, with gates whose rows are aligned."""
    if 2 * shape.kv_heads % row_multiple(shape.dtype):
        return Availability.no(f"{2 * shape.kv_heads} gates are not a multiple of {row_multiple(shape.dtype)}")
    return gated_delta.accepts(shape)


def channels(shape: OpShape) -> int:
    """Queries, keys and values of one token."""
    return 2 * shape.q_heads * shape.head_dim + shape.kv_heads * shape.v_dim


def decode_launch(
    sequences: int, mixed_stride: int, ba_stride: int, eps: float, shape: OpShape, device: Device
) -> TritonLaunch:
    """One token for each of ``sequences``; strides in elements."""
    data, f32 = TensorArg(shape.dtype), TensorArg("float32")
    block = min(32, next_power_of_2(shape.v_dim))
    made = TritonLaunch(
        kernel=KERNEL,
        args=(
            ("mixed", data), ("ba", data), ("rate", f32), ("dt_bias", f32), ("state", f32),
            ("state_slots", TensorArg("int64")), ("prefix_lens", TensorArg("int32")), ("out", data),
            ("mixed_stride", mixed_stride), ("ba_stride", ba_stride), ("eps", eps),
            ("scale", float(shape.head_dim**-0.5)),
        ),
        constexprs=(
            ("HK", shape.q_heads), ("HV", shape.kv_heads), ("DK", shape.head_dim), ("DV", shape.v_dim),
            ("BLOCK_V", block),
        ),
        grid=(blocks(shape.v_dim, block), shape.kv_heads, sequences),
    )  # fmt: skip
    return dependent(made, device)


def norm_shape(shape: OpShape) -> OpShape:
    """The norm of queries and keys, which lie side by side."""
    return OpShape("l2norm", shape.dtype, cols=shape.head_dim, q_heads=2 * shape.q_heads, head_dim=shape.head_dim)


def launches(point: StepPoint, shape: OpShape, device: Device) -> tuple[TritonLaunch, ...]:
    """What one call on a step starts."""
    if point.tokens == point.sequences:
        return (decode_launch(point.tokens, channels(shape), 2 * shape.kv_heads, 1e-6, shape, device),)
    heads = 2 * shape.q_heads
    keys, values = heads * shape.head_dim, shape.kv_heads * shape.v_dim
    strides = (keys, keys, keys + values, shape.kv_heads, shape.kv_heads)
    return (
        l2norm.launch(
            Rows.packed(point.tokens, shape.head_dim, heads), 1e-6, norm_shape(shape), shape.head_dim, device
        ),
        delta_gates.launch(point.tokens, 2 * shape.kv_heads, shape, device),
        *gated_delta.step_launches(point.tokens, point.sequences, strides, shape, device),
    )


def load(setup: KernelSetup) -> LoadedKernel:
    import torch

    shape, device = setup.shape, setup.device
    bound = memoised(lambda count, mixed, ba, eps: decode_launch(count, mixed, ba, eps, shape, device))
    norm = l2norm.load(evolve(setup, shape=norm_shape(shape))).call
    gates = delta_gates.load(setup).call
    rule = gated_delta.load(setup).call
    keys, values = 2 * shape.q_heads * shape.head_dim, shape.kv_heads * shape.v_dim

    def delta_net(
        mixed: Tensor, ba: Tensor, rate: Tensor, dt_bias: Tensor, eps: float, state: Tensor, query_starts: Tensor,
        state_slots: Tensor, prefix_lens: Tensor,
    ) -> Tensor:  # fmt: skip
        """``mixed [T, 2 Hk Dk + Hv Dv]``, ``ba [T, 2 Hv]``, rows strided or not → contiguous ``[T, Hv, Dv]``."""
        tokens, sequences = mixed.shape[0], state_slots.shape[0]
        if tokens == sequences:
            out = torch.empty((tokens, shape.kv_heads, shape.v_dim), dtype=mixed.dtype, device=mixed.device)
            if tokens:
                bound(tokens, mixed.stride(0), ba.stride(0), eps)(
                    mixed, ba, rate, dt_bias, state, state_slots, prefix_lens, out
                )
            return out
        both, v = mixed.split_with_sizes((keys, values), dim=-1)
        both = norm(both.view(tokens, 2 * shape.q_heads, shape.head_dim), eps)
        q, k = both[:, : shape.q_heads], both[:, shape.q_heads :]
        beta, decay = gates(ba, rate, dt_bias)
        found: Tensor = rule(
            q, k, v.view(tokens, shape.kv_heads, shape.v_dim), decay, beta, state, query_starts, state_slots,
            prefix_lens,
        )  # fmt: skip
        return found

    return LoadedKernel(call=delta_net)
