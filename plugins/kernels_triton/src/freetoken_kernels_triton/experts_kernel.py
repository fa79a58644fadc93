"""The experts' kernels. Gate and up rows alternate in ``gate_up`` [S, 2I, H], so that one product yields both.

A *pair* is one token's choice of one expert, numbered token · K + rank. A slot below 0 contributes nothing.
"""

# mypy: ignore-errors
# The bodies are Triton's language, not Python's types.
import triton
import triton.language as tl

from freetoken_kernels_triton.dependent_kernel import wait_for_predecessor


@triton.jit
def silu_times(pairs, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """[M, 2N] of alternating gate and up → silu(gate) · up [M, N]; neighbours lie in one thread already."""
    gate, up = tl.split(tl.reshape(pairs, (BLOCK_M, BLOCK_N, 2)))
    return gate / (1.0 + tl.exp(-gate)) * up


# ------------------------------------------------------------------------------------- few tokens: pair by pair


@triton.jit(do_not_specialize=["hidden_stride"])
def pair_up_kernel(
    hidden,
    slots,
    gate_up,
    inner,
    hidden_stride,
    H: tl.constexpr,
    I: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (block of BLOCK_N inner columns, pair): silu(gate · h) · (up · h) by products in registers."""
    pair = tl.program_id(1)
    wait_for_predecessor(PDL)
    slot = tl.load(slots + pair)
    if slot < 0:
        return
    two = tl.arange(0, 2 * BLOCK_N)
    row = tl.minimum(tl.program_id(0) * (2 * BLOCK_N) + two, 2 * I - 1)
    k = tl.arange(0, BLOCK_K)
    ALIGN: tl.constexpr = 128 // hidden.dtype.element_ty.primitive_bitwidth
    x = hidden + (pair // K).to(tl.int64) * (hidden_stride // ALIGN * ALIGN)
    rows = gate_up + slot.to(tl.int64) * (2 * I * H) + row[:, None] * H
    total = tl.zeros((2 * BLOCK_N, BLOCK_K), tl.float32)
    for start in tl.static_range(0, H, BLOCK_K):
        if start + BLOCK_K <= H:
            w = tl.load(rows + start + k[None, :])
            value = tl.load(x + start + k)
        else:
            w = tl.load(rows + start + k[None, :], mask=start + k[None, :] < H, other=0.0)
            value = tl.load(x + start + k, mask=start + k < H, other=0.0)
        total += w.to(tl.float32) * value.to(tl.float32)[None, :]
    both = tl.reshape(tl.sum(total, axis=1), (1, 2 * BLOCK_N))
    result = silu_times(both, 1, BLOCK_N)
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(
        inner + pair.to(tl.int64) * I + col[None, :],
        result.to(inner.dtype.element_ty),
        mask=col[None, :] < I,
    )


@triton.jit
def pair_down_kernel(
    inner,
    weights,
    slots,
    down,
    out,
    H: tl.constexpr,
    I: tl.constexpr,
    K: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (block of BLOCK_N outputs, token): the weighted sum over the token's K experts, in float32.

    RANKS experts are read side by side: one after another, each would wait for its slot and then for its rows.
    """
    token = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row = tl.minimum(n, H - 1)[None, :, None] * I
    total = tl.zeros((RANKS, BLOCK_N, BLOCK_K), tl.float32)
    wait_for_predecessor(PDL)
    for first in tl.static_range(0, K, RANKS):
        rank = first + tl.arange(0, RANKS)
        pair = token * K + rank
        slot = tl.load(slots + pair, mask=rank < K, other=-1)
        used = slot >= 0
        weight = tl.load(weights + pair, mask=used, other=0.0)
        rows = down + slot.to(tl.int64)[:, None, None] * (H * I) + row
        values = inner + pair.to(tl.int64)[:, None] * I
        for start in tl.static_range(0, I, BLOCK_K):
            inside = (start + k < I)[None, :] & used[:, None]
            w = tl.load(rows + (start + k)[None, None, :], mask=inside[:, None, :], other=0.0)
            value = tl.load(values + (start + k)[None, :], mask=inside, other=0.0).to(tl.float32) * weight[:, None]
            total += w.to(tl.float32) * value[:, None, :]
    result = tl.sum(tl.sum(total, axis=2), axis=0)
    tl.store(out + token.to(tl.int64) * H + n, result.to(out.dtype.element_ty), mask=n < H)


# ------------------------------------------------------------------------------------- tiles of a grouped product


@triton.jit
def up_tile(
    hidden,
    gate_up,
    inner,
    pair,
    valid,
    inner_row,
    slot,
    block,
    hidden_stride,
    H: tl.constexpr,
    I: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """BLOCK_M pairs of one slot times BLOCK_N rows of its ``gate_up``: writes BLOCK_N / 2 inner columns."""
    ALIGN: tl.constexpr = 128 // hidden.dtype.element_ty.primitive_bitwidth
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    token = tl.where(valid, pair, 0) // K
    a_pointers = hidden + token.to(tl.int64)[:, None] * (hidden_stride // ALIGN * ALIGN) + k[None, :]
    row = tl.minimum(n, 2 * I - 1)
    b_pointers = gate_up + slot.to(tl.int64) * (2 * I * H) + row[None, :] * H + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, H, BLOCK_K):
        if H % BLOCK_K == 0:
            a = tl.load(a_pointers + start, mask=valid[:, None], other=0.0)
            b = tl.load(b_pointers + start)
        else:
            a = tl.load(a_pointers + start, mask=valid[:, None] & (start + k[None, :] < H), other=0.0)
            b = tl.load(b_pointers + start, mask=start + k[:, None] < H, other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    result = silu_times(total, BLOCK_M, BLOCK_N // 2)
    col = block * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    target = inner + inner_row.to(tl.int64)[:, None] * I + col[None, :]
    tl.store(target, result.to(inner.dtype.element_ty), mask=valid[:, None] & (col[None, :] < I))


@triton.jit
def down_tile(
    inner,
    weights,
    down,
    parts,
    pair,
    valid,
    inner_row,
    slot,
    block,
    H: tl.constexpr,
    I: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """BLOCK_M pairs' inner rows times BLOCK_N rows of the slot's ``down``, weighted: writes ``parts`` [pairs, H]."""
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a_pointers = inner + tl.where(valid, inner_row, 0).to(tl.int64)[:, None] * I + k[None, :]
    row = tl.minimum(n, H - 1)
    b_pointers = down + slot.to(tl.int64) * (H * I) + row[None, :] * I + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, I, BLOCK_K):
        if I % BLOCK_K == 0:
            a = tl.load(a_pointers + start, mask=valid[:, None], other=0.0)
            b = tl.load(b_pointers + start)
        else:
            a = tl.load(a_pointers + start, mask=valid[:, None] & (start + k[None, :] < I), other=0.0)
            b = tl.load(b_pointers + start, mask=start + k[:, None] < I, other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    total *= tl.load(weights + pair, mask=valid, other=0.0)[:, None]
    target = parts + pair.to(tl.int64)[:, None] * H + n[None, :]
    tl.store(target, total.to(parts.dtype.element_ty), mask=valid[:, None] & (n[None, :] < H))


# ------------------------------------------------------------------------------------- some tokens: slot by slot


@triton.jit
def pairs_of_slot(slots, pairs, slot, BLOCK_P: tl.constexpr):
    """All pairs' ranks among those of ``slot`` (−1 for others) [BLOCK_P], and how many there are."""
    index = tl.arange(0, BLOCK_P)
    mine = tl.load(slots + index, mask=index < pairs, other=-1) == slot
    place = tl.cumsum(mine.to(tl.int32), axis=0)
    return tl.where(mine, place - 1, -1), tl.sum(mine.to(tl.int32), axis=0)


@triton.jit
def pick_pairs(rank, first, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr):
    """The pairs with ranks ``first`` … ``first + BLOCK_M − 1``, [BLOCK_M]; 0 where there is none."""
    wanted = first + tl.arange(0, BLOCK_M)
    index = tl.arange(0, BLOCK_P)
    return tl.sum(tl.where(rank[None, :] == wanted[:, None], index[None, :], 0), axis=1)


@triton.jit(do_not_specialize=["pairs", "hidden_stride"])
def slot_up_kernel(
    hidden,
    slots,
    gate_up,
    inner,
    pairs,
    hidden_stride,
    H: tl.constexpr,
    I: tl.constexpr,
    K: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (block of columns, slot): finds the slot's pairs itself, so that nothing need be sorted before."""
    slot = tl.program_id(1)
    wait_for_predecessor(PDL)
    rank, count = pairs_of_slot(slots, pairs, slot, BLOCK_P)
    for first in range(0, count, BLOCK_M):
        pair = pick_pairs(rank, first, BLOCK_M, BLOCK_P)
        valid = first + tl.arange(0, BLOCK_M) < count
        up_tile(
            hidden,
            gate_up,
            inner,
            pair,
            valid,
            pair,
            slot,
            tl.program_id(0),
            hidden_stride,
            H,
            I,
            K,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            PRECISION,
        )


@triton.jit(do_not_specialize=["pairs"])
def slot_down_kernel(
    inner,
    weights,
    slots,
    down,
    parts,
    pairs,
    H: tl.constexpr,
    I: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (block of columns, slot): the second product for the slot's pairs."""
    slot = tl.program_id(1)
    wait_for_predecessor(PDL)
    rank, count = pairs_of_slot(slots, pairs, slot, BLOCK_P)
    for first in range(0, count, BLOCK_M):
        pair = pick_pairs(rank, first, BLOCK_M, BLOCK_P)
        valid = first + tl.arange(0, BLOCK_M) < count
        down_tile(
            inner,
            weights,
            down,
            parts,
            pair,
            valid,
            pair,
            slot,
            tl.program_id(0),
            H,
            I,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            PRECISION,
        )


# ------------------------------------------------------------------------------------- many tokens: sorted tiles


@triton.jit(do_not_specialize=["pairs", "tiles"])
def align_kernel(
    slots, order, tile_slots, tile_rows, tile_ends, pairs, tiles, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr
):
    """Program (slot): where its pairs lie in the sorted order, and which tiles are its own.

    With ``start`` the number of pairs of lower slots, its pairs take places ``start`` … and its tiles begin at
    ``start // BLOCK_M + slot``: at least ⌈count / BLOCK_M⌉ places before the next slot's, found without knowing the
    others' counts. Tiles that stay empty have slot −1. No atomics, so the order is the same every time.
    """
    slot = tl.program_id(0)
    index = tl.arange(0, BLOCK_P)
    below = tl.zeros((BLOCK_P,), tl.int32)
    mine = tl.zeros((BLOCK_P,), tl.int32)
    for base in range(0, pairs, BLOCK_P):
        found = tl.load(slots + base + index, mask=base + index < pairs, other=-1)
        below += ((found >= 0) & (found < slot)).to(tl.int32)
        mine += (found == slot).to(tl.int32)
    start = tl.sum(below, axis=0)
    count = tl.sum(mine, axis=0)
    place = start
    for base in range(0, pairs, BLOCK_P):
        found = tl.load(slots + base + index, mask=base + index < pairs, other=-1)
        hit = (found == slot).to(tl.int32)
        rank = tl.cumsum(hit, axis=0) - 1
        tl.store(order + place + rank, base + index, mask=hit != 0)
        place += tl.sum(hit, axis=0)
    first_tile = start // BLOCK_M + slot
    last = slot == tl.num_programs(0) - 1
    next_tile = tl.where(last, tiles, (start + count) // BLOCK_M + slot + 1)
    for base in range(first_tile, next_tile, BLOCK_P):
        tile = base + index
        row = start + (tile - first_tile) * BLOCK_M
        used = row < start + count
        inside = tile < next_tile
        tl.store(tile_slots + tile, tl.where(used, slot, -1), mask=inside)
        tl.store(tile_rows + tile, row, mask=inside)
        tl.store(tile_ends + tile, tl.zeros((BLOCK_P,), tl.int32) + start + count, mask=inside)


@triton.jit(do_not_specialize=["hidden_stride"])
def tile_up_kernel(
    hidden,
    order,
    tile_slots,
    tile_rows,
    tile_ends,
    gate_up,
    inner,
    hidden_stride,
    H: tl.constexpr,
    I: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (tile · blocks of columns): inner rows lie in sorted order, so that the second product reads straight."""
    BLOCKS: tl.constexpr = (2 * I + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // BLOCKS
    slot = tl.load(tile_slots + tile)
    if slot < 0:
        return
    row = tl.load(tile_rows + tile) + tl.arange(0, BLOCK_M)
    valid = row < tl.load(tile_ends + tile)
    pair = tl.load(order + row, mask=valid, other=0)
    up_tile(
        hidden,
        gate_up,
        inner,
        pair,
        valid,
        row,
        slot,
        tl.program_id(0) % BLOCKS,
        hidden_stride,
        H,
        I,
        K,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        PRECISION,
    )


@triton.jit
def tile_down_kernel(
    inner,
    weights,
    order,
    tile_slots,
    tile_rows,
    tile_ends,
    down,
    parts,
    H: tl.constexpr,
    I: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (tile · blocks of columns): the second product, scattered to the pairs' own rows."""
    BLOCKS: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // BLOCKS
    slot = tl.load(tile_slots + tile)
    if slot < 0:
        return
    row = tl.load(tile_rows + tile) + tl.arange(0, BLOCK_M)
    valid = row < tl.load(tile_ends + tile)
    pair = tl.load(order + row, mask=valid, other=0)
    down_tile(
        inner,
        weights,
        down,
        parts,
        pair,
        valid,
        row,
        slot,
        tl.program_id(0) % BLOCKS,
        H,
        I,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        PRECISION,
    )


@triton.jit
def combine_kernel(parts, slots, out, H: tl.constexpr, K: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr):
    """Program (token, block of columns): the sum of a token's K weighted parts, in rank order."""
    token = tl.program_id(0)
    col = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    total = tl.zeros((BLOCK_H,), tl.float32)
    wait_for_predecessor(PDL)
    for rank in tl.static_range(K):
        pair = token.to(tl.int64) * K + rank
        used = tl.load(slots + pair) >= 0
        total += tl.load(parts + pair * H + col, mask=(col < H) & used, other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * H + col, total.to(out.dtype.element_ty), mask=col < H)
