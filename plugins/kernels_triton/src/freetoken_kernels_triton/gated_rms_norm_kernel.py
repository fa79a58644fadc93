"""RMS norm of rows, times the SiLU of a gate of the same shape."""

# mypy: ignore-errors
# The bodies are Triton's language, not Python's types.
import triton
import triton.language as tl

from freetoken_kernels_triton.dependent_kernel import wait_for_predecessor
from freetoken_kernels_triton.rms_norm_kernel import row_offsets


@triton.jit(do_not_specialize=["rows", "groups", "x_stride", "x_group_stride", "gate_stride", "gate_group_stride"])
def gated_rms_norm_kernel(
    x,
    gate,
    weight,
    out,
    rows,
    groups,
    x_stride,
    x_group_stride,
    gate_stride,
    gate_group_stride,
    eps,
    N: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    ALIGN: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = tl.arange(0, BLOCK_N)
    mask = (row[:, None] < rows) & (col[None, :] < N)
    x_start = row_offsets(row, groups, x_stride, x_group_stride, ALIGN)
    gate_start = row_offsets(row, groups, gate_stride, gate_group_stride, ALIGN)
    scale = tl.load(weight + col, mask=col < N, other=0.0).to(tl.float32)
    wait_for_predecessor(PDL)
    value = tl.load(x + x_start[:, None] + col[None, :], mask=mask, other=0.0).to(tl.float32)
    opening = tl.load(gate + gate_start[:, None] + col[None, :], mask=mask, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, axis=1) / N + eps)
    normed = value * inverse[:, None] * scale[None, :] * opening / (1.0 + tl.exp(-opening))
    tl.store(out + row.to(tl.int64)[:, None] * N + col[None, :], normed.to(out.dtype.element_ty), mask=mask)
