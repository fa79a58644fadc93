"""The gated delta rule: recurrent for one token a sequence, chunked for more.

Chunked form: Yang et al. 2024, arXiv:2412.06464, with the WY representation of arXiv:2406.06484. Within a chunk, with
``g`` the running sum of the decays and ``D_ij = exp(g_i − g_j)`` for ``j ≤ i``:

    A = strict lower of (beta · k kᵀ ∘ D);  U = (I + A)⁻¹ (beta · v);  W = (I + A)⁻¹ (beta · exp(g) · k)
    V' = U − W S;  out = exp(g) · q S + (q kᵀ ∘ D) V';  S ← exp(g_last) · S + (exp(g_last − g) · k)ᵀ V'
"""

# mypy: ignore-errors
# The bodies are Triton's language, not Python's types.
import triton
import triton.language as tl

from freetoken_kernels_triton.causal_conv_kernel import sequence_of_block
from freetoken_kernels_triton.dependent_kernel import wait_for_predecessor


@triton.jit(do_not_specialize=["q_stride", "k_stride", "v_stride", "decay_stride", "beta_stride"])
def delta_decode_kernel(
    q,
    k,
    v,
    decay,
    beta,
    state,
    state_slots,
    prefix_lens,
    out,
    q_stride,
    k_stride,
    v_stride,
    decay_stride,
    beta_stride,
    scale,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (block of value dims, value head, sequence): a [DK, BLOCK_V] piece of the state passes through once."""
    ALIGN: tl.constexpr = 128 // q.dtype.element_ty.primitive_bitwidth
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    col = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    dim = tl.arange(0, DK)
    key_head = head // (HV // HK)
    wait_for_predecessor(PDL)
    slot = tl.load(state_slots + row)
    piece = state + (slot * HV + head) * (DK * DV) + dim[:, None] * DV + col[None, :]
    mask = (col < DV)[None, :] & (dim < DK)[:, None]
    memory = tl.load(piece, mask=mask & (tl.load(prefix_lens + row) > 0), other=0.0)
    key = tl.load(k + row * (k_stride // ALIGN * ALIGN) + key_head * DK + dim).to(tl.float32)
    query = tl.load(q + row * (q_stride // ALIGN * ALIGN) + key_head * DK + dim).to(tl.float32) * scale
    value = tl.load(v + row * (v_stride // ALIGN * ALIGN) + head * DV + col, mask=col < DV, other=0.0).to(tl.float32)
    memory *= tl.exp(tl.load(decay + row * decay_stride + head))
    seen = tl.sum(memory * key[:, None], axis=0)
    change = (value - seen) * tl.load(beta + row * beta_stride + head)
    memory += key[:, None] * change[None, :]
    result = tl.sum(memory * query[:, None], axis=0)
    tl.store(out + (row * HV + head) * DV + col, result.to(out.dtype.element_ty), mask=col < DV)
    tl.store(piece, memory, mask=mask)


@triton.jit
def invert_unit_lower(a, PRECISION: tl.constexpr):
    """(I + a)⁻¹ for a strictly lower triangular ``a`` [64, 64], float32.

    The four 16×16 diagonal blocks by forward substitution, all at once; then with T their inverses and L the rest of
    ``a``, N = T L has N⁴ = 0, and the inverse is (I − N)(I + N²) T. Powers of ``a`` itself would grow without bound
    where keys resemble each other.
    """
    row = tl.arange(0, 64)
    same = (row[:, None] // 16) == (row[None, :] // 16)
    block = tl.arange(0, 4)
    inner = tl.arange(0, 16)
    on_diagonal = block[:, None, None, None] == block[None, None, :, None]
    diagonal = tl.sum(tl.where(on_diagonal, tl.reshape(a, (4, 16, 4, 16)), 0.0), axis=2)
    inverse = tl.zeros((4, 16, 16), tl.float32)
    for i in range(16):
        this = inner[None, :, None] == i
        factors = tl.sum(tl.where(this, diagonal, 0.0), axis=1)
        solved = -factors - tl.sum(factors[:, :, None] * inverse, axis=1)
        inverse = tl.where(this, solved[:, None, :], inverse)
    wide = tl.where(on_diagonal, tl.reshape(inverse, (4, 16, 1, 16)), 0.0)
    identity = tl.where(row[:, None] == row[None, :], 1.0, 0.0)
    blocks = tl.reshape(wide, (64, 64)) + identity
    n = tl.dot(blocks, tl.where(same, 0.0, a), input_precision=PRECISION)
    squared = tl.dot(n, n, input_precision=PRECISION)
    first = identity - n
    first += tl.dot(first, squared, input_precision=PRECISION)
    return tl.dot(first, blocks, input_precision=PRECISION)


@triton.jit(do_not_specialize=["q_stride", "k_stride", "v_stride", "decay_stride", "beta_stride", "sequences"])
def delta_chunk_kernel(
    q,
    k,
    v,
    decay,
    beta,
    query_starts,
    u,
    w,
    scores,
    sums,
    q_stride,
    k_stride,
    v_stride,
    decay_stride,
    beta_stride,
    sequences,
    scale,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (chunk of one sequence, value head): all of a chunk that does not depend on the state.

    Writes ``u [T, HV, DV]``, ``w [T, HV, DK]``, ``scores [T, HV, CHUNK]`` and the running sums ``sums [T, HV]``.
    """
    ALIGN: tl.constexpr = 128 // q.dtype.element_ty.primitive_bitwidth
    block = tl.program_id(0)
    head = tl.program_id(1)
    sequence, first_block = sequence_of_block(query_starts, sequences, block, CHUNK, BLOCK_B)
    begin = tl.load(query_starts + sequence)
    end = tl.load(query_starts + sequence + 1)
    start = begin + (block - first_block) * CHUNK
    if start >= end:
        return
    key_head = head // (HV // HK)
    token = start + tl.arange(0, CHUNK)
    inside = token < end
    token = token.to(tl.int64)
    dim = tl.arange(0, DK)
    keys = tl.load(
        k + token[:, None] * (k_stride // ALIGN * ALIGN) + key_head * DK + dim[None, :],
        mask=inside[:, None],
        other=0.0,
    )
    strength = tl.load(beta + token * beta_stride + head, mask=inside, other=0.0)
    g = tl.cumsum(tl.load(decay + token * decay_stride + head, mask=inside, other=0.0), axis=0)
    tl.store(sums + token * HV + head, g, mask=inside)
    index = tl.arange(0, CHUNK)
    upto = index[:, None] >= index[None, :]
    ratio = tl.where(upto, tl.exp(tl.where(upto, g[:, None] - g[None, :], 0.0)), 0.0)
    likeness = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
    lower = tl.where(index[:, None] > index[None, :], likeness * ratio * strength[:, None], 0.0)
    inverse = invert_unit_lower(lower, PRECISION).to(keys.dtype)
    weighted = (keys.to(tl.float32) * (strength * tl.exp(g))[:, None]).to(keys.dtype)
    w_rows = tl.dot(inverse, weighted, input_precision=PRECISION)
    w_target = w + (token * HV + head)[:, None] * DK + dim[None, :]
    tl.store(w_target, w_rows.to(w.dtype.element_ty), mask=inside[:, None])
    for first in tl.static_range(0, DV, BLOCK_V):
        col = first + tl.arange(0, BLOCK_V)
        mask = inside[:, None] & (col < DV)[None, :]
        values = tl.load(
            v + token[:, None] * (v_stride // ALIGN * ALIGN) + head * DV + col[None, :], mask=mask, other=0.0
        )
        scaled = (values.to(tl.float32) * strength[:, None]).to(keys.dtype)
        u_rows = tl.dot(inverse, scaled, input_precision=PRECISION)
        tl.store(u + (token * HV + head)[:, None] * DV + col[None, :], u_rows.to(u.dtype.element_ty), mask=mask)
    queries = tl.load(
        q + token[:, None] * (q_stride // ALIGN * ALIGN) + key_head * DK + dim[None, :],
        mask=inside[:, None],
        other=0.0,
    )
    attention = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * ratio * scale
    target = scores + (token * HV + head)[:, None] * CHUNK + index[None, :]
    tl.store(target, attention.to(scores.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=["q_stride", "k_stride"])
def delta_scan_kernel(
    q,
    k,
    u,
    w,
    scores,
    sums,
    state,
    query_starts,
    state_slots,
    prefix_lens,
    out,
    q_stride,
    k_stride,
    scale,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (block of value dims, value head, sequence): carries a [DK, BLOCK_V] piece of the state over chunks."""
    ALIGN: tl.constexpr = 128 // q.dtype.element_ty.primitive_bitwidth
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    key_head = head // (HV // HK)
    begin = tl.load(query_starts + sequence)
    end = tl.load(query_starts + sequence + 1)
    dim = tl.arange(0, DK)
    col = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    index = tl.arange(0, CHUNK)
    columns = (col < DV)[None, :]
    slot = tl.load(state_slots + sequence)
    piece = state + (slot * HV + head) * (DK * DV) + dim[:, None] * DV + col[None, :]
    whole = (dim < DK)[:, None] & columns
    memory = tl.load(piece, mask=whole & (tl.load(prefix_lens + sequence) > 0), other=0.0)
    for start in range(begin, end, CHUNK):
        token = start + index
        inside = token < end
        row = token.to(tl.int64)
        held = memory.to(w.dtype.element_ty)
        w_rows = tl.load(w + (row * HV + head)[:, None] * DK + dim[None, :], mask=inside[:, None], other=0.0)
        u_rows = tl.load(u + (row * HV + head)[:, None] * DV + col[None, :], mask=inside[:, None] & columns, other=0.0)
        fresh = u_rows.to(tl.float32) - tl.dot(w_rows, held, input_precision=PRECISION)
        g = tl.load(sums + row * HV + head, mask=inside, other=0.0)
        last = tl.load(sums + (tl.minimum(start + CHUNK, end) - 1).to(tl.int64) * HV + head)
        queries = tl.load(
            q + row[:, None] * (q_stride // ALIGN * ALIGN) + key_head * DK + dim[None, :],
            mask=inside[:, None],
            other=0.0,
        )
        result = tl.dot(queries, held, input_precision=PRECISION) * (tl.exp(g) * scale)[:, None]
        attention = tl.load(
            scores + (row * HV + head)[:, None] * CHUNK + index[None, :], mask=inside[:, None], other=0.0
        )
        result = tl.dot(attention, fresh.to(attention.dtype), result, input_precision=PRECISION)
        target = out + (row * HV + head)[:, None] * DV + col[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=inside[:, None] & columns)
        keys = tl.load(
            k + row[None, :] * (k_stride // ALIGN * ALIGN) + key_head * DK + dim[:, None],
            mask=inside[None, :],
            other=0.0,
        )
        # Rows behind the end have fresh = 0, whatever their factor.
        passed = (fresh * tl.exp(last - g)[:, None]).to(keys.dtype)
        memory = tl.dot(keys, passed, memory * tl.exp(last), input_precision=PRECISION)
    tl.store(piece, memory, mask=whole)
