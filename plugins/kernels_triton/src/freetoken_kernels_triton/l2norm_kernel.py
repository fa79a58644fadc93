"""L2 norm over the last axis of rows that lie in groups."""

# mypy: ignore-errors
# The bodies are Triton's language, not Python's types.
import triton
import triton.language as tl

from freetoken_kernels_triton.dependent_kernel import wait_for_predecessor
from freetoken_kernels_triton.rms_norm_kernel import row_offsets


@triton.jit(do_not_specialize=["rows", "groups", "x_stride", "x_group_stride"])
def l2norm_kernel(
    x,
    out,
    rows,
    groups,
    x_stride,
    x_group_stride,
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
    start = row_offsets(row, groups, x_stride, x_group_stride, ALIGN)
    wait_for_predecessor(PDL)
    value = tl.load(x + start[:, None] + col[None, :], mask=mask, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, axis=1) + eps)
    normed = (value * inverse[:, None]).to(out.dtype.element_ty)
    tl.store(out + row.to(tl.int64)[:, None] * N + col[None, :], normed, mask=mask)
