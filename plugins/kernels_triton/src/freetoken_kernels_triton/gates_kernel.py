"""Small elementwise kernels between a layer's larger ones; computed in float32, rounded once."""

# mypy: ignore-errors
# The bodies are Triton's language, not Python's types.
import triton
import triton.language as tl

from freetoken_kernels_triton.dependent_kernel import wait_for_predecessor
from freetoken_kernels_triton.rms_norm_kernel import row_offsets


@triton.jit(do_not_specialize=["x_stride", "residual_stride", "shared_stride", "gate_stride"])
def residual_add_kernel(
    x,
    residual,
    shared,
    gate,
    out,
    x_stride,
    residual_stride,
    shared_stride,
    gate_stride,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHARED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, block of columns): residual + (x + shared · sigmoid(gate))."""
    ALIGN: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = col < N
    wait_for_predecessor(PDL)
    total = tl.load(x + row * (x_stride // ALIGN * ALIGN) + col, mask=mask, other=0.0).to(tl.float32)
    stream = tl.load(residual + row * (residual_stride // ALIGN * ALIGN) + col, mask=mask, other=0.0).to(tl.float32)
    if SHARED:
        opening = tl.load(gate + row * gate_stride).to(tl.float32)
        more = tl.load(shared + row * (shared_stride // ALIGN * ALIGN) + col, mask=mask, other=0.0).to(tl.float32)
        total += more * (1.0 / (1.0 + tl.exp(-opening)))
    tl.store(out + row * N + col, (stream + total).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "groups", "x_stride", "x_group_stride", "gate_stride", "gate_group_stride"])
def sigmoid_gate_kernel(
    x,
    gate,
    out,
    rows,
    groups,
    x_stride,
    x_group_stride,
    gate_stride,
    gate_group_stride,
    N: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (block of rows): x · sigmoid(gate)."""
    ALIGN: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = tl.arange(0, BLOCK_N)
    mask = (row[:, None] < rows) & (col[None, :] < N)
    x_start = row_offsets(row, groups, x_stride, x_group_stride, ALIGN)
    gate_start = row_offsets(row, groups, gate_stride, gate_group_stride, ALIGN)
    wait_for_predecessor(PDL)
    value = tl.load(x + x_start[:, None] + col[None, :], mask=mask, other=0.0).to(tl.float32)
    opening = tl.load(gate + gate_start[:, None] + col[None, :], mask=mask, other=0.0).to(tl.float32)
    result = value * (1.0 / (1.0 + tl.exp(-opening)))
    tl.store(out + row.to(tl.int64)[:, None] * N + col[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def softplus(a):
    """log(1 + exp(a)); by a series where 1 + exp(−|a|) has few digits of the exponential left."""
    small = tl.exp(-tl.abs(a))
    series = small * (1.0 - small * (0.5 - small * (1.0 / 3.0)))
    return tl.maximum(a, 0.0) + tl.where(small < 1e-2, series, tl.log(1.0 + small))


@triton.jit(do_not_specialize=["rows", "ba_stride"])
def delta_gates_kernel(
    ba,
    rate,
    dt_bias,
    beta,
    decay,
    rows,
    ba_stride,
    HEADS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (block of rows): sigmoid(b), and rate · softplus(a + dt_bias)."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    head = tl.arange(0, BLOCK_H)
    mask = (row[:, None] < rows) & (head[None, :] < HEADS)
    speed = tl.load(rate + head, mask=head < HEADS, other=0.0)[None, :]
    bias = tl.load(dt_bias + head, mask=head < HEADS, other=0.0)[None, :]
    wait_for_predecessor(PDL)
    source = ba + row.to(tl.int64)[:, None] * ba_stride + head[None, :]
    b = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    a = tl.load(source + HEADS, mask=mask, other=0.0).to(tl.float32) + bias
    target = row.to(tl.int64)[:, None] * HEADS + head[None, :]
    tl.store(beta + target, 1.0 / (1.0 + tl.exp(-b)), mask=mask)
    tl.store(decay + target, speed * softplus(a), mask=mask)
