"""``gated_delta``: one recurrent step for decode, chunks of 64 tokens for prefill."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from freetoken.ops.dependent_launch import dependent
from freetoken.ops.triton_launch import BoundLaunch, bind
from freetoken.plugin.protocols import KernelSetup, LoadedKernel
from freetoken.vocab.availability import Availability
from freetoken.vocab.errors import EngineError
from freetoken.vocab.hardware import Device
from freetoken.vocab.launch import StepPoint, TensorArg, TritonLaunch
from freetoken.vocab.ops import OpShape
from freetoken_kernels_triton.tiles import blocks, dot_precision, next_power_of_2, row_multiple

if TYPE_CHECKING:
    from torch import Tensor

MODULE = "freetoken_kernels_triton.gated_delta_kernel:"
CHUNK = 64
SEQUENCES_AT_ONCE = 64
Strides = tuple[int, int, int, int, int]
"""Between tokens of q, k, v, decay and beta, in elements."""


def accepts(shape: OpShape) -> Availability:
    """Key heads of a power of two, value heads that key heads divide, aligned rows."""
    if shape.head_dim not in (16, 32, 64, 128, 256):
        return Availability.no(f"key head size {shape.head_dim} is not 16, 32, 64, 128 or 256")
    if shape.v_dim % row_multiple(shape.dtype):
        return Availability.no(f"value head size {shape.v_dim} is not a multiple of {row_multiple(shape.dtype)}")
    if not shape.q_heads or shape.kv_heads % shape.q_heads:
        return Availability.no(f"{shape.kv_heads} value heads do not share {shape.q_heads} key heads evenly")
    return Availability.yes()


def scan_stages(shape: OpShape, device: Device) -> int:
    """How many chunks' operands shared memory holds: q, k, w and the scores of one take about 56 KiB at 128 dims."""
    one = CHUNK * (3 * shape.head_dim + CHUNK + 64) * 2
    return max(1, min(3, (device.shared_memory_bytes or 99 * 1024) // one))


def step_launches(
    tokens: int, sequences: int, strides: Strides, shape: OpShape, device: Device
) -> tuple[TritonLaunch, ...]:
    """The launches for ``tokens`` tokens of ``sequences`` sequences."""
    if tokens == sequences:
        return (dependent(_decode(sequences, strides, shape), device),)
    return _chunks(tokens, sequences, strides, shape, device), _scan(sequences, strides, shape, device)


def launches(point: StepPoint, shape: OpShape, device: Device) -> tuple[TritonLaunch, ...]:
    """What one call on a step starts."""
    keys, values = shape.q_heads * shape.head_dim, shape.kv_heads * shape.v_dim
    strides = (keys, keys, values, shape.kv_heads, shape.kv_heads)
    return step_launches(point.tokens, point.sequences, strides, shape, device)


def _sizes(shape: OpShape, block_v: int) -> tuple[tuple[str, object], ...]:
    return (
        ("HK", shape.q_heads), ("HV", shape.kv_heads), ("DK", shape.head_dim), ("DV", shape.v_dim),
        ("BLOCK_V", block_v),
    )  # fmt: skip


def _scale(shape: OpShape) -> float:
    return float(shape.head_dim**-0.5)


def _strides(strides: Strides) -> tuple[tuple[str, int], ...]:
    names = ("q_stride", "k_stride", "v_stride", "decay_stride", "beta_stride")
    return tuple(zip(names, strides, strict=True))


def _decode(sequences: int, strides: Strides, shape: OpShape) -> TritonLaunch:
    data, f32 = TensorArg(shape.dtype), TensorArg("float32")
    block = min(32, next_power_of_2(shape.v_dim))
    return TritonLaunch(
        kernel=MODULE + "delta_decode_kernel",
        args=(
            ("q", data), ("k", data), ("v", data), ("decay", f32), ("beta", f32), ("state", f32),
            ("state_slots", TensorArg("int64")), ("prefix_lens", TensorArg("int32")), ("out", data),
            *_strides(strides), ("scale", _scale(shape)),
        ),
        constexprs=_sizes(shape, block),
        grid=(blocks(shape.v_dim, block), shape.kv_heads, sequences),
    )  # fmt: skip


def _chunks(tokens: int, sequences: int, strides: Strides, shape: OpShape, device: Device) -> TritonLaunch:
    data, f32 = TensorArg(shape.dtype), TensorArg("float32")
    block = min(64, max(16, next_power_of_2(shape.v_dim)))
    return TritonLaunch(
        kernel=MODULE + "delta_chunk_kernel",
        args=(
            ("q", data), ("k", data), ("v", data), ("decay", f32), ("beta", f32),
            ("query_starts", TensorArg("int32")), ("u", data), ("w", data), ("scores", data), ("sums", f32),
            *_strides(strides), ("sequences", sequences), ("scale", _scale(shape)),
        ),
        constexprs=(
            *_sizes(shape, block), ("CHUNK", CHUNK), ("BLOCK_B", SEQUENCES_AT_ONCE),
            ("PRECISION", dot_precision(shape.dtype)),
        ),
        grid=(tokens // CHUNK + sequences, shape.kv_heads, 1),
        # Hopper's matrix instructions read operands from shared memory; elsewhere 4 warps spill registers.
        num_warps=4 if device.compute_capability[0] == 9 else 8,
        num_stages=1,
    )  # fmt: skip


def _scan(sequences: int, strides: Strides, shape: OpShape, device: Device) -> TritonLaunch:
    data, f32 = TensorArg(shape.dtype), TensorArg("float32")
    block = min(32, max(16, next_power_of_2(shape.v_dim)))
    return TritonLaunch(
        kernel=MODULE + "delta_scan_kernel",
        args=(
            ("q", data), ("k", data), ("u", data), ("w", data), ("scores", data), ("sums", f32), ("state", f32),
            ("query_starts", TensorArg("int32")), ("state_slots", TensorArg("int64")),
            ("prefix_lens", TensorArg("int32")), ("out", data),
            ("q_stride", strides[0]), ("k_stride", strides[1]), ("scale", _scale(shape)),
        ),
        constexprs=(*_sizes(shape, block), ("CHUNK", CHUNK), ("PRECISION", dot_precision(shape.dtype))),
        grid=(blocks(shape.v_dim, block), shape.kv_heads, sequences),
        num_stages=scan_stages(shape, device),
    )  # fmt: skip


def load(setup: KernelSetup) -> LoadedKernel:
    import torch

    shape, device = setup.shape, setup.device

    @lru_cache(maxsize=4096)
    def bound(tokens: int, sequences: int, strides: Strides) -> tuple[BoundLaunch, ...]:
        return tuple(bind(launch) for launch in step_launches(tokens, sequences, strides, shape, device))

    def gated_delta(
        q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor,
        query_starts: Tensor, state_slots: Tensor, prefix_lens: Tensor,
    ) -> Tensor:  # fmt: skip
        """``q``, ``k [T, Hk, Dk]``, ``v [T, Hv, Dv]``, rows of tokens strided or not → contiguous ``[T, Hv, Dv]``."""
        tokens, sequences = v.shape[0], state_slots.shape[0]
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        if not tokens:
            return out
        run = bound(tokens, sequences, _token_strides(q, k, v, decay, beta))
        if tokens == sequences:
            run[0](q, k, v, decay, beta, state, state_slots, prefix_lens, out)
            return out
        u = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        w = u.new_empty((tokens, shape.kv_heads, shape.head_dim))
        scores = u.new_empty((tokens, shape.kv_heads, CHUNK))
        sums = torch.empty((tokens, shape.kv_heads), dtype=torch.float32, device=v.device)
        run[0](q, k, v, decay, beta, query_starts, u, w, scores, sums)
        run[1](q, k, u, w, scores, sums, state, query_starts, state_slots, prefix_lens, out)
        return out

    return LoadedKernel(call=gated_delta)


def _token_strides(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Strides:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.stride(1) != tensor.shape[2] or tensor.stride(2) != 1:
            raise EngineError(
                f"gated_delta on {name} of strides {tuple(tensor.stride())}",
                "a token's heads do not lie one behind the other", "call .contiguous() first",
            )  # fmt: skip
    return q.stride(0), k.stride(0), v.stride(0), decay.stride(0), beta.stride(0)
