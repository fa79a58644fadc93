"""The look-up of slots on the device: the arithmetic of ``index``, without a word to the host.

Kernels of one look-up run in order: ``mark`` (where there are many pairs), ``select``, ``place``, ``settle``. No
program reads what another of the same launch writes.
"""

# mypy: ignore-errors
# Triton's language has no types that mypy could check.

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["pairs"])
def mark_kernel(experts, wanted, pairs, BLOCK: tl.constexpr):
    """Program (block of pairs): 1 for every routed expert; several programs may write the same 1."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < pairs
    e = tl.load(experts + i, mask=inside, other=0)
    tl.store(wanted + e, tl.full((BLOCK,), 1, tl.int32), mask=inside)


@triton.jit(do_not_specialize=["row", "first", "slots", "pairs"])
def select_kernel(
    experts,
    wanted,
    slot_of,
    kind,
    target,
    lists,
    row,
    first,
    slots,
    pairs,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
    MARKED: tl.constexpr,
):
    """One program: hits and misses among the wanted experts number ``first`` … ``first + slots − 1``."""
    e = tl.arange(0, BLOCK_E)
    inside = e < E
    if MARKED:
        want = tl.load(wanted + e, mask=inside, other=0)
    else:
        want = tl.zeros((BLOCK_E,), tl.int32)
        p = tl.arange(0, BLOCK_P)
        for base in range(0, pairs, BLOCK_P):
            routed = tl.load(experts + base + p, mask=base + p < pairs, other=-1)
            same = (e[:, None] == routed[None, :]).to(tl.int32)
            want = tl.maximum(want, tl.max(same, axis=1))
    rank = tl.cumsum(want, axis=0) - 1
    chosen = (want != 0) & (rank >= first) & (rank < first + slots)
    here = tl.load(slot_of + row * E + e, mask=inside, other=-1)
    miss = chosen & (here < 0)
    hit = chosen & (here >= 0)
    number = tl.cumsum(miss.to(tl.int32), axis=0) - 1
    tl.store(kind + e, tl.where(miss, 2 + number, hit.to(tl.int32)), mask=inside)
    tl.store(target + e, tl.where(hit, here, -1), mask=inside)
    tl.store(lists + 4 + number, e, mask=miss)
    tl.store(lists, tl.sum(miss.to(tl.int32), axis=0))
    tl.store(lists + 1, tl.sum(hit.to(tl.int32), axis=0))


@triton.jit
def leaving_order(
    s,
    slots,
    owner,
    last,
    used,
    kind,
    now,
    row,
    E: tl.constexpr,
    KEEP: tl.constexpr,
    DECAY: tl.constexpr,
    HALF_LIFE: tl.constexpr,
):
    """Keys [B] int64 of slots ``s``, and whether each may be taken; see ``index.eviction_keys``."""
    inside = s < slots
    number = tl.load(owner + s, mask=inside, other=-1)
    held = number >= 0
    then = tl.load(last + number, mask=held, other=0)
    key = then
    if DECAY:
        halvings = tl.minimum((now >> HALF_LIFE) - (then >> HALF_LIFE), 31)
        count = tl.load(used + number, mask=held, other=0).to(tl.int64) >> halvings
        key = (count << 40) | then
    mine = held & (number // E == row)
    if KEEP:
        key = tl.where(mine, key | (1 << 62), key)
    needed = tl.load(kind + number % E, mask=mine, other=0) != 0
    return tl.where(held, key, -1), inside & (needed == 0)


@triton.jit(do_not_specialize=["row", "slots", "room"])
def place_kernel(
    owner,
    last,
    used,
    clock,
    kind,
    target,
    lists,
    row,
    slots,
    room,
    E: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_ALL: tl.constexpr,
    KEEP: tl.constexpr,
    DECAY: tl.constexpr,
    HALF_LIFE: tl.constexpr,
):
    """Program (block of slots): a slot that fewer than ``misses`` others precede takes the miss of that number."""
    misses = tl.load(lists)
    if misses == 0:
        return
    now = tl.load(clock)
    s = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    key, free = leaving_order(s, slots, owner, last, used, kind, now, row, E, KEEP, DECAY, HALF_LIFE)
    rank = tl.zeros((BLOCK_S,), tl.int32)
    for base in range(0, slots, BLOCK_ALL):
        t = base + tl.arange(0, BLOCK_ALL)
        other, other_free = leaving_order(t, slots, owner, last, used, kind, now, row, E, KEEP, DECAY, HALF_LIFE)
        sooner = (other[None, :] < key[:, None]) | ((other[None, :] == key[:, None]) & (t[None, :] < s[:, None]))
        rank += tl.sum((sooner & other_free[None, :]).to(tl.int32), axis=1)
    taken = free & (rank < misses)
    expert = tl.load(lists + 4 + rank, mask=taken, other=0)
    tl.store(target + expert, s, mask=taken)
    tl.store(lists + 4 + room + rank, s, mask=taken)


@triton.jit(do_not_specialize=["row", "pairs", "room", "touch", "final", "cause"])
def settle_kernel(
    experts,
    slots_out,
    owner,
    slot_of,
    last,
    used,
    clock,
    wanted,
    kind,
    target,
    lists,
    counters,
    row,
    pairs,
    room,
    touch,
    final,
    cause,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF_LIFE: tl.constexpr,
):
    """Program (block of pairs): routed experts to slots; the first also writes owners, uses and counters."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    routed = tl.load(experts + i, mask=i < pairs, other=0)
    tl.store(slots_out + i, tl.load(target + routed), mask=i < pairs)
    if tl.program_id(0) != 0:
        return
    e = tl.arange(0, BLOCK_E)
    misses = tl.load(lists)
    moved = e < misses
    slot = tl.load(lists + 4 + room + e, mask=moved, other=0)
    expert = tl.load(lists + 4 + e, mask=moved, other=0)
    old = tl.load(owner + slot, mask=moved, other=-1)
    tl.store(slot_of + old, tl.full((BLOCK_E,), -1, tl.int32), mask=moved & (old >= 0))
    tl.store(owner + slot, row * E + expert, mask=moved)
    tl.store(slot_of + row * E + expert, slot, mask=moved)
    now = tl.load(clock)
    number = row * E + e
    chosen = (tl.load(kind + e, mask=e < E, other=0) != 0) & (touch != 0)
    then = tl.load(last + number, mask=chosen, other=0)
    halvings = tl.minimum((now >> HALF_LIFE) - (then >> HALF_LIFE), 31).to(tl.int32)
    count = tl.load(used + number, mask=chosen, other=0) >> halvings
    tl.store(used + number, count + 256, mask=chosen)
    tl.store(last + number, tl.zeros((BLOCK_E,), tl.int64) + now, mask=chosen)
    tl.debug_barrier()  # every warp has read the clock
    tl.store(clock, now + 1)
    hits = counters + 2 * cause
    tl.store(hits, tl.load(hits) + tl.load(lists + 1))
    tl.store(hits + 1, tl.load(hits + 1) + misses)
    tl.store(wanted + e, tl.zeros((BLOCK_E,), tl.int32), mask=(e < E) & (final != 0))
