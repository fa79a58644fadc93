"""SiLU of a row's first half times its second half."""

# mypy: ignore-errors
# The bodies are Triton's language, not Python's types.
import triton
import triton.language as tl

from freetoken_kernels_triton.dependent_kernel import wait_for_predecessor


@triton.jit(do_not_specialize=["x_stride"])
def silu_and_mul_kernel(x, out, x_stride, N: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr):
    """Program (row, block of the N output columns)."""
    ALIGN: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = col < N
    start = x + row * (x_stride // ALIGN * ALIGN)
    wait_for_predecessor(PDL)
    gate = tl.load(start + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(start + N + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * N + col, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=mask)
