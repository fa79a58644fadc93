"""Head norms, rotation and the write into the pages: what lies between the projection and attention, in one launch."""

# mypy: ignore-errors
# The bodies are Triton's language, not Python's types.
import triton
import triton.language as tl

from freetoken_kernels_triton.dependent_kernel import wait_for_predecessor
from freetoken_kernels_triton.write_kv_kernel import copy_heads


@triton.jit
def norm_and_rotate(
    x,
    weight,
    out,
    token,
    head,
    heads,
    stride,
    head_stride,
    out_row,
    table,
    eps,
    valid,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    NORM: tl.constexpr,
):
    """Heads ``head`` [N] of one token, rotated, to row ``out_row`` of ``out [rows, heads, D]``; dims past ``R`` are not
    rotated. Nothing is written where ``valid`` is false."""
    ALIGN: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    HALF: tl.constexpr = R // 2
    kind = x.dtype.element_ty
    source = x + token.to(tl.int64) * (stride // ALIGN * ALIGN)
    source += head.to(tl.int64)[:, None] * (head_stride // ALIGN * ALIGN)
    target = out + out_row * (heads * D) + head.to(tl.int64)[:, None] * D
    dim = tl.arange(0, BLOCK_HALF)
    inside = head[:, None] < heads
    mask = inside & (dim[None, :] < HALF)
    cos = tl.load(table + dim, mask=dim < HALF, other=0.0)[None, :]
    sin = tl.load(table + HALF + dim, mask=dim < HALF, other=0.0)[None, :]
    first = tl.load(source + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    if BLOCK_REST > 0:
        rest_dim = R + tl.arange(0, BLOCK_REST)
        rest_mask = inside & (rest_dim[None, :] < D)
        rest = tl.load(source + rest_dim[None, :], mask=rest_mask, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        if BLOCK_REST > 0:
            squares += tl.sum(rest * rest, axis=1)
        inverse = (1.0 / tl.sqrt(squares / D + eps))[:, None]
        first_scale = tl.load(weight + dim, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]
        second_scale = tl.load(weight + HALF + dim, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]
        # Rounded as a norm of its own would store it.
        first = (first * inverse * first_scale).to(kind).to(tl.float32)
        second = (second * inverse * second_scale).to(kind).to(tl.float32)
        if BLOCK_REST > 0:
            rest_scale = tl.load(weight + rest_dim, mask=rest_dim < D, other=0.0).to(tl.float32)[None, :]
            rest = rest * inverse * rest_scale
    tl.store(target + dim[None, :], (first * cos - second * sin).to(kind), mask=mask & valid)
    tl.store(target + HALF + dim[None, :], (second * cos + first * sin).to(kind), mask=mask & valid)
    if BLOCK_REST > 0:
        tl.store(target + rest_dim[None, :], rest.to(kind), mask=rest_mask & valid)


@triton.jit(
    do_not_specialize=["q_stride", "q_head_stride", "k_stride", "k_head_stride", "v_stride", "v_head_stride"],
)
def rope_write_kernel(
    q,
    k,
    v,
    q_weight,
    k_weight,
    positions,
    cos_sin,
    k_pool,
    v_pool,
    kv_slots,
    out,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    eps,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    R: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token, block of heads); the blocks of keys, which bring their values, follow those of queries.

    A negative slot writes nothing.
    """
    token = tl.program_id(0)
    block = tl.program_id(1)
    wait_for_predecessor(PDL)
    Q_BLOCKS: tl.constexpr = (Q_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    table = cos_sin + tl.load(positions + token) * R
    head = tl.arange(0, BLOCK_HEADS)
    if block < Q_BLOCKS:
        norm_and_rotate(
            q,
            q_weight,
            out,
            token,
            head + block * BLOCK_HEADS,
            Q_HEADS,
            q_stride,
            q_head_stride,
            token.to(tl.int64),
            table,
            eps,
            True,
            D,
            R,
            BLOCK_HALF,
            BLOCK_REST,
            NORM,
        )
    else:
        slot = tl.load(kv_slots + token)
        first = (block - Q_BLOCKS) * BLOCK_HEADS
        norm_and_rotate(
            k,
            k_weight,
            k_pool,
            token,
            head + first,
            K_HEADS,
            k_stride,
            k_head_stride,
            slot,
            table,
            eps,
            slot >= 0,
            D,
            R,
            BLOCK_HALF,
            BLOCK_REST,
            NORM,
        )
        if slot >= 0:
            copy_heads(v, v_pool, token, slot, v_stride, v_head_stride, first, K_HEADS, DV, BLOCK_HEADS, BLOCK_V)
