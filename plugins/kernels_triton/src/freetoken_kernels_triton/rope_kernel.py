"""Rotary embedding of queries and keys in one launch, halves layout, out of place."""

# mypy: ignore-errors
# The bodies are Triton's language, not Python's types.
import triton
import triton.language as tl

from freetoken_kernels_triton.dependent_kernel import wait_for_predecessor


@triton.jit
def rotate_heads(
    x,
    out,
    token,
    head,
    heads,
    stride,
    head_stride,
    table,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Rotate heads ``head`` [N] of one token; dims past ``R`` are copied."""
    ALIGN: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    HALF: tl.constexpr = R // 2
    stride = stride // ALIGN * ALIGN
    head_stride = head_stride // ALIGN * ALIGN
    source = x + token.to(tl.int64) * stride + head.to(tl.int64)[:, None] * head_stride
    target = out + token.to(tl.int64) * (heads * D) + head.to(tl.int64)[:, None] * D
    dim = tl.arange(0, BLOCK_HALF)
    mask = (head[:, None] < heads) & (dim[None, :] < HALF)
    cos = tl.load(table + dim, mask=dim < HALF, other=0.0)[None, :]
    sin = tl.load(table + HALF + dim, mask=dim < HALF, other=0.0)[None, :]
    first = tl.load(source + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(target + dim[None, :], (first * cos - second * sin).to(out.dtype.element_ty), mask=mask)
    tl.store(target + HALF + dim[None, :], (second * cos + first * sin).to(out.dtype.element_ty), mask=mask)
    if BLOCK_REST > 0:
        rest = R + tl.arange(0, BLOCK_REST)
        rest_mask = (head[:, None] < heads) & (rest[None, :] < D)
        tl.store(target + rest[None, :], tl.load(source + rest[None, :], mask=rest_mask, other=0.0), mask=rest_mask)


@triton.jit(do_not_specialize=["q_stride", "q_head_stride", "k_stride", "k_head_stride"])
def rope_kernel(
    q,
    k,
    positions,
    cos_sin,
    q_out,
    k_out,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token, block of heads); the blocks of keys follow those of queries."""
    token = tl.program_id(0)
    block = tl.program_id(1)
    Q_BLOCKS: tl.constexpr = (Q_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    wait_for_predecessor(PDL)
    table = cos_sin + tl.load(positions + token) * R
    head = tl.arange(0, BLOCK_HEADS)
    if block < Q_BLOCKS:
        rotate_heads(
            q,
            q_out,
            token,
            head + block * BLOCK_HEADS,
            Q_HEADS,
            q_stride,
            q_head_stride,
            table,
            D,
            R,
            BLOCK_HALF,
            BLOCK_REST,
        )
    else:
        rotate_heads(
            k,
            k_out,
            token,
            head + (block - Q_BLOCKS) * BLOCK_HEADS,
            K_HEADS,
            k_stride,
            k_head_stride,
            table,
            D,
            R,
            BLOCK_HALF,
            BLOCK_REST,
        )
