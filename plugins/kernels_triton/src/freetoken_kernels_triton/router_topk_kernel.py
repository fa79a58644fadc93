"""Softmax over experts and the K largest, lower expert first among equals."""

# mypy: ignore-errors
# The bodies are Triton's language, not Python's types.
import triton
import triton.language as tl

from freetoken_kernels_triton.dependent_kernel import wait_for_predecessor


@triton.jit
def sort_keys(value, expert, inside, LOWEST: tl.constexpr):
    """Integers in the order of (value, then lower expert): a maximum of them finds both at once.

    A float's bits, those below the sign turned over where it is negative, are in the order of the floats; the expert
    lies in the 16 bits below. Both zeros are one value.
    """
    if value.dtype.primitive_bitwidth == 16:
        bits = value.to(tl.int16, bitcast=True).to(tl.int32)
        bits = tl.where(bits == -32768, 0, bits)
        ordered = tl.where(bits < 0, bits ^ 0x7FFF, bits)
    else:
        bits = value.to(tl.int32, bitcast=True).to(tl.int64)
        bits = tl.where(bits == -2147483648, 0, bits)
        ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(inside, ordered * 65536 + (65535 - expert), LOWEST)


@triton.jit
def value_of(key, dtype: tl.constexpr):
    """The float32 value that a key was made of."""
    ordered = key >> 16
    if dtype.primitive_bitwidth == 16:
        bits = tl.where(ordered < 0, ordered ^ 0x7FFF, ordered).to(tl.int16)
    else:
        bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.int32)
    return bits.to(dtype, bitcast=True).to(tl.float32)


@triton.jit(do_not_specialize=["logits_stride", "renormalise"])
def router_topk_kernel(
    logits,
    weights,
    experts,
    logits_stride,
    renormalise,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LOWEST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row): K rounds of one integer maximum each, which a warp takes in one instruction for 16-bit logits."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_E)
    inside = expert < E
    rank = tl.arange(0, BLOCK_K)
    wait_for_predecessor(PDL)
    value = tl.load(logits + row * logits_stride + expert, mask=inside, other=0.0)
    left = sort_keys(value, expert, inside, LOWEST)
    chosen = tl.zeros((BLOCK_K,), left.dtype)
    for k in tl.static_range(K):
        best = tl.max(left, axis=0)
        chosen = tl.where(rank == k, best, chosen)
        left = tl.where(left == best, LOWEST, left)
    kept = value_of(chosen, logits.dtype.element_ty)
    largest = tl.max(tl.where(rank == 0, kept, float("-inf")), axis=0)
    mass = tl.sum(tl.where(inside, tl.exp(value.to(tl.float32) - largest), 0.0), axis=0)
    weight = tl.where(rank < K, tl.exp(kept - largest) / mass, 0.0)
    weight = weight * tl.where(renormalise != 0, 1.0 / tl.sum(weight, axis=0), 1.0)
    tl.store(weights + row * K + rank, weight, mask=rank < K)
    tl.store(experts + row * K + rank, (65535 - (chosen & 65535)).to(tl.int32), mask=rank < K)
