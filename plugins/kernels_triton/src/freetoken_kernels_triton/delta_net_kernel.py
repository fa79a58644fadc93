"""One step of the gated delta net for one token a sequence: norms of queries and keys, gates and the rule together."""

# mypy: ignore-errors
# The bodies are Triton's language, not Python's types.
import triton
import triton.language as tl

from freetoken_kernels_triton.dependent_kernel import wait_for_predecessor
from freetoken_kernels_triton.gates_kernel import softplus


@triton.jit
def unit(x, eps, kind: tl.constexpr):
    """``x [DK]`` of length one, rounded as a norm of its own would store it."""
    return (x * (1.0 / tl.sqrt(tl.sum(x * x, axis=0) + eps))).to(kind).to(tl.float32)


@triton.jit(do_not_specialize=["mixed_stride", "ba_stride"])
def delta_net_decode_kernel(
    mixed,
    ba,
    rate,
    dt_bias,
    state,
    state_slots,
    prefix_lens,
    out,
    mixed_stride,
    ba_stride,
    eps,
    scale,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (block of value dims, value head, sequence): a [DK, BLOCK_V] piece of the state passes through once."""
    ALIGN: tl.constexpr = 128 // mixed.dtype.element_ty.primitive_bitwidth
    kind = mixed.dtype.element_ty
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    col = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    dim = tl.arange(0, DK)
    speed = tl.load(rate + head)
    bias = tl.load(dt_bias + head)
    wait_for_predecessor(PDL)
    key_head = head // (HV // HK)
    slot = tl.load(state_slots + row)
    piece = state + (slot * HV + head) * (DK * DV) + dim[:, None] * DV + col[None, :]
    mask = (col < DV)[None, :] & (dim < DK)[:, None]
    memory = tl.load(piece, mask=mask & (tl.load(prefix_lens + row) > 0), other=0.0)
    heads = mixed + row * (mixed_stride // ALIGN * ALIGN)
    query = tl.load(heads + key_head * DK + dim).to(tl.float32)
    key = tl.load(heads + (HK + key_head) * DK + dim).to(tl.float32)
    value = tl.load(heads + 2 * HK * DK + head * DV + col, mask=col < DV, other=0.0).to(tl.float32)
    b = tl.load(ba + row * ba_stride + head).to(tl.float32)
    a = tl.load(ba + row * ba_stride + HV + head).to(tl.float32)
    query = unit(query, eps, kind) * scale
    key = unit(key, eps, kind)
    memory *= tl.exp(speed * softplus(a + bias))
    seen = tl.sum(memory * key[:, None], axis=0)
    change = (value - seen) * (1.0 / (1.0 + tl.exp(-b)))
    memory += key[:, None] * change[None, :]
    result = tl.sum(memory * query[:, None], axis=0)
    tl.store(out + (row * HV + head) * DV + col, result.to(out.dtype.element_ty), mask=col < DV)
    tl.store(piece, memory, mask=mask)
