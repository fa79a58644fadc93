"""Residual addition and RMS norm in one pass over the rows."""

# mypy: ignore-errors
# The bodies are Triton's language, not Python's types.
import triton
import triton.language as tl

from freetoken_kernels_triton.dependent_kernel import wait_for_predecessor


@triton.jit(do_not_specialize=["rows", "x_stride", "residual_stride"])
def add_rms_norm_kernel(
    x,
    residual,
    weight,
    normed,
    summed,
    rows,
    x_stride,
    residual_stride,
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
    x_start = row.to(tl.int64) * (x_stride // ALIGN * ALIGN)
    residual_start = row.to(tl.int64) * (residual_stride // ALIGN * ALIGN)
    out_offsets = row.to(tl.int64)[:, None] * N + col[None, :]
    scale = tl.load(weight + col, mask=col < N, other=0.0).to(tl.float32)
    wait_for_predecessor(PDL)
    a = tl.load(x + x_start[:, None] + col[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(residual + residual_start[:, None] + col[None, :], mask=mask, other=0.0).to(tl.float32)
    total = (a + b).to(summed.dtype.element_ty)
    tl.store(summed + out_offsets, total, mask=mask)
    # The norm sees the sum as stored, so that it equals rms_norm(summed).
    value = total.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, axis=1) / N + eps)
    out = value * inverse[:, None] * scale[None, :]
    tl.store(normed + out_offsets, out.to(normed.dtype.element_ty), mask=mask)
