"""Products of a few rows with a matrix [outputs, I]: bound by reading the matrix once."""

# mypy: ignore-errors
# The bodies are Triton's language, not Python's types.
import triton
import triton.language as tl

from freetoken_kernels_triton.dependent_kernel import wait_for_predecessor


@triton.jit(do_not_specialize=["outputs"])
def gemv_kernel(
    x, weight, out, outputs,
    I: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: program (block of BLOCK_N outputs), products summed in float32 registers.

    The first block of the matrix is asked for before the predecessor has ended: nothing writes it.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    rows = weight + tl.minimum(n, outputs - 1).to(tl.int64)[:, None] * I
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in tl.static_range(0, I, BLOCK_K):
        if start + BLOCK_K <= I:
            w = tl.load(rows + start + k[None, :], eviction_policy="evict_first")
            if start == 0:
                wait_for_predecessor(PDL)
            value = tl.load(x + start + k)
        else:
            inside = start + k < I
            w = tl.load(rows + start + k[None, :], mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            if start == 0:
                wait_for_predecessor(PDL)
            value = tl.load(x + start + k, mask=inside, other=0.0)
        total += w.to(tl.float32) * value.to(tl.float32)[None, :]
    tl.store(out + n, tl.sum(total, axis=1).to(out.dtype.element_ty), mask=n < outputs)


@triton.jit(do_not_specialize=["outputs", "rows", "x_stride"])
def skinny_gemm_kernel(
    x, weight, out, outputs, rows, x_stride,
    I: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Up to BLOCK_M rows: program (block of BLOCK_N outputs); the matrix streams through shared memory."""
    ALIGN: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a_pointers = x + m.to(tl.int64)[:, None] * (x_stride // ALIGN * ALIGN) + k[None, :]
    b_pointers = weight + tl.minimum(n, outputs - 1).to(tl.int64)[None, :] * I + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    wait_for_predecessor(PDL)
    for start in range(0, I, BLOCK_K):
        if I % BLOCK_K == 0:
            a = tl.load(a_pointers + start, mask=m[:, None] < rows, other=0.0)
            b = tl.load(b_pointers + start)
        else:
            a = tl.load(a_pointers + start, mask=(m[:, None] < rows) & (start + k[None, :] < I), other=0.0)
            b = tl.load(b_pointers + start, mask=start + k[:, None] < I, other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    mask = (m[:, None] < rows) & (n[None, :] < outputs)
    tl.store(out + m[:, None] * outputs + n[None, :], total.to(out.dtype.element_ty), mask=mask)
