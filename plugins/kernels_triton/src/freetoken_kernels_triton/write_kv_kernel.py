"""Scatter of new keys and values into the paged pools."""

# mypy: ignore-errors
# The bodies are Triton's language, not Python's types.
import triton
import triton.language as tl

from freetoken_kernels_triton.dependent_kernel import wait_for_predecessor


@triton.jit
def copy_heads(
    source,
    pool,
    token,
    slot,
    stride,
    head_stride,
    first,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One token's heads [HEADS, D] from ``first`` on, BLOCK_HEADS of them, into a pool's slot; slots are contiguous."""
    ALIGN: tl.constexpr = 128 // source.dtype.element_ty.primitive_bitwidth
    head = first + tl.arange(0, BLOCK_HEADS)
    dim = tl.arange(0, BLOCK_D)
    mask = (head[:, None] < HEADS) & (dim[None, :] < D)
    start = token.to(tl.int64) * (stride // ALIGN * ALIGN)
    rows = head.to(tl.int64)[:, None] * (head_stride // ALIGN * ALIGN)
    value = tl.load(source + start + rows + dim[None, :], mask=mask, other=0.0)
    tl.store(pool + slot * (HEADS * D) + head[:, None] * D + dim[None, :], value, mask=mask)


@triton.jit(do_not_specialize=["k_stride", "k_head_stride", "v_stride", "v_head_stride"])
def write_kv_kernel(
    k,
    v,
    k_pool,
    v_pool,
    kv_slots,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token). A negative slot writes nothing."""
    token = tl.program_id(0)
    wait_for_predecessor(PDL)
    slot = tl.load(kv_slots + token)
    if slot >= 0:
        copy_heads(k, k_pool, token, slot, k_stride, k_head_stride, 0, HEADS, K_DIM, BLOCK_HEADS, BLOCK_K)
        copy_heads(v, v_pool, token, slot, v_stride, v_head_stride, 0, HEADS, V_DIM, BLOCK_HEADS, BLOCK_V)
