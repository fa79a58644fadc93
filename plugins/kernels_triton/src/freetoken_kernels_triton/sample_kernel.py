"""One token a row, without a sort: cuts are thresholds found by bisection, the draw inverts the distribution function.

The meaning is defined in ``freetoken.ops.sampling``; here ``s = (l − max l) / t`` as there. A row is looked at in
*parts* of PART logits: the first kernel writes each part's maximum and mass, spread over the device; the second, one
program a row, then needs few parts. The k-th largest part maximum bounds the k-th largest value from below, so what
survives the cuts lies in the few parts that reach such a bound, and is gathered into at most CAP candidates. Only a
flat distribution has more: then the whole row is read once for each step of the bisection.
"""

# mypy: ignore-errors
# The bodies are Triton's language, not Python's types.
import triton
import triton.language as tl

MINUS_INFINITY_KEY = tl.constexpr(-2139095041)
"""``key_of(−inf)``."""


@triton.jit
def key_of(value):
    """A float32 as an int32 that orders the same way."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def value_of(key):
    """The inverse of ``key_of``."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def even_stride(stride, V: tl.constexpr):
    """``stride``, known to be a multiple of 4 where the vocabulary is: then rows lie at multiples of 16 bytes."""
    if V % 4 == 0:
        stride = stride // 4 * 4
    return stride


@triton.jit(do_not_specialize=["logits_stride"])
def sample_scan_kernel(
    logits,
    temperature,
    maxima,
    masses,
    logits_stride,
    V: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Program (GROUP parts, row): each part's largest logit, and its Σ exp((l − that) / t)."""
    row = tl.program_id(1)
    part = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    index = part[:, None] * PART + tl.arange(0, PART)[None, :]
    start = logits + row.to(tl.int64) * even_stride(logits_stride, V)
    value = tl.load(start + index, mask=index < V, other=float("-inf"))
    heat = tl.load(temperature + row)
    scale = 1.0 / tl.where(heat > 0, heat, 1.0)
    largest = tl.max(value, axis=1)
    # A part of −inf alone has no mass; −inf − −inf would be no number.
    anchor = tl.where(largest > float("-inf"), largest, 0.0)
    mass = tl.sum(tl.exp((value - anchor[:, None]) * scale), axis=1)
    tl.store(maxima + row * PARTS + part, largest, mask=part < PARTS)
    tl.store(masses + row * PARTS + part, mass, mask=part < PARTS)


@triton.jit
def smallest_cut(keys, weight, target, low, high):
    """The smallest key t in (low, high] with Σ weight[keys > t] < target."""
    for _ in range(31):
        middle = low + (high - low) // 2
        enough = tl.sum(tl.where(keys > middle, weight, 0.0), axis=0) < target
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle)
    return high


@triton.jit
def first_past(running, target, ids, last):
    """The lowest of ``ids`` whose running sum exceeds ``target``; ``last`` where rounding leaves none."""
    return tl.minimum(tl.min(tl.where(running > target, ids, 0x7FFFFFFF), axis=0), last)


@triton.jit
def row_mass_above(row, top, scale, floor, a, b, c, COUNT: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr):
    """Σ over s > each of three keys of exp(s), or of 1, among s ≥ floor: one pass over the row."""
    index = tl.arange(0, BLOCK)
    sum_a = tl.zeros((BLOCK,), tl.float32)
    sum_b = tl.zeros((BLOCK,), tl.float32)
    sum_c = tl.zeros((BLOCK,), tl.float32)
    for base in range(0, V, BLOCK):
        value = (tl.load(row + base + index, mask=base + index < V, other=float("-inf")) - top) * scale
        key = key_of(value)
        if COUNT:
            weight = tl.where(base + index < V, 1.0, 0.0)
        else:
            weight = tl.where(key >= floor, tl.exp(value), 0.0)
        sum_a += tl.where(key > a, weight, 0.0)
        sum_b += tl.where(key > b, weight, 0.0)
        sum_c += tl.where(key > c, weight, 0.0)
    return tl.sum(sum_a, axis=0), tl.sum(sum_b, axis=0), tl.sum(sum_c, axis=0)


@triton.jit
def row_cut(row, top, scale, floor, target, COUNT: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr):
    """``smallest_cut`` over the whole row, two bits a pass. ``high`` is 0, the key of the largest s."""
    low = floor * 0 + MINUS_INFINITY_KEY - 1
    high = floor * 0
    for _ in range(17):
        half = (high - low) // 2
        b = low + half
        a = low + half // 2
        c = b + (high - b) // 2
        above_a, above_b, above_c = row_mass_above(row, top, scale, floor, a, b, c, COUNT, V, BLOCK)
        new_high = tl.where(above_a < target, a, tl.where(above_b < target, b, tl.where(above_c < target, c, high)))
        low = tl.where(above_c >= target, c, tl.where(above_b >= target, b, tl.where(above_a >= target, a, low)))
        high = new_high
    return high


@triton.jit
def draw_from_row(row, top, scale, cut, u, V: tl.constexpr, BLOCK: tl.constexpr):
    """The lowest id whose running mass of s ≥ cut exceeds u times the whole: two passes over the row."""
    index = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for base in range(0, V, BLOCK):
        value = (tl.load(row + base + index, mask=base + index < V, other=float("-inf")) - top) * scale
        total += tl.where(key_of(value) >= cut, tl.exp(value), 0.0)
    target = u * tl.sum(total, axis=0)
    before = target * 0
    found = cut * 0 + 0x7FFFFFFF
    last = cut * 0
    for base in range(0, V, BLOCK):
        if found == 0x7FFFFFFF:
            value = (tl.load(row + base + index, mask=base + index < V, other=float("-inf")) - top) * scale
            kept = key_of(value) >= cut
            mass = tl.where(kept & (base + index < V), tl.exp(value), 0.0)
            running = before + tl.cumsum(mass, axis=0)
            found = tl.min(tl.where(running > target, base + index, 0x7FFFFFFF), axis=0)
            last = tl.maximum(last, tl.max(tl.where(mass > 0, base + index, 0), axis=0))
            before += tl.sum(mass, axis=0)
    return tl.minimum(found, last)


@triton.jit
def draw_from_parts(row, part, largest, mass, top, scale, u, V: tl.constexpr, PART: tl.constexpr):
    """A draw without cuts: the part from the parts' masses, then the token within it."""
    total = mass * tl.exp((largest - top) * scale)
    running = tl.cumsum(total, axis=0)
    target = u * tl.sum(total, axis=0)
    chosen = first_past(running, target, part, tl.max(tl.where(total > 0, part, 0), axis=0))
    before = tl.sum(tl.where(part < chosen, total, 0.0), axis=0)
    index = chosen * PART + tl.arange(0, PART)
    value = (tl.load(row + index, mask=index < V, other=float("-inf")) - top) * scale
    inner = tl.exp(value)
    last = tl.max(tl.where(inner > 0, index, 0), axis=0)
    return first_past(before + tl.cumsum(inner, axis=0), target, index, last)


@triton.jit(do_not_specialize=["logits_stride"])
def sample_pick_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    steps,
    maxima,
    masses,
    chosen_parts,
    candidates,
    candidate_ids,
    out,
    logits_stride,
    V: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    CAP: tl.constexpr,
    GUESS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row): the row's token from the parts' maxima and masses and the parts that matter."""
    r = tl.program_id(0)
    row = logits + r.to(tl.int64) * even_stride(logits_stride, V)
    part = tl.arange(0, BLOCK_PARTS)
    largest = tl.load(maxima + r * PARTS + part, mask=part < PARTS, other=float("-inf"))
    top = tl.max(largest, axis=0)
    heat = tl.load(temperature + r)
    if heat <= 0:
        first = tl.min(tl.where(largest == top, part, PARTS - 1), axis=0)
        index = first * PART + tl.arange(0, PART)
        value = tl.load(row + index, mask=index < V, other=float("-inf"))
        tl.store(out + r, tl.min(tl.where(value == top, index, V - 1), axis=0).to(tl.int64))
        return
    scale = 1.0 / heat
    u = tl.rand(tl.load(seeds + r), tl.load(steps + r))
    mass = tl.load(masses + r * PARTS + part, mask=part < PARTS, other=0.0)
    k = tl.load(top_k + r)
    p = tl.load(top_p + r)
    by_k = (k > 0) & (k < V)
    by_p = p < 1.0
    floor = key_of(tl.log(tl.load(min_p + r)))
    part_keys = key_of((largest - top) * scale)
    if (floor <= MINUS_INFINITY_KEY) & (by_k == 0) & (by_p == 0):
        tl.store(out + r, draw_from_parts(row, part, largest, mass, top, scale, u, V, PART).to(tl.int64))
        return
    # A bound below which nothing survives: exact for top-k, a guess (checked below) for top-p alone.
    wanted = tl.where(by_k, k, tl.where(by_p, GUESS, PARTS))
    enough_parts = wanted <= PARTS
    wanted = tl.minimum(wanted, PARTS)
    ones = tl.where(part < PARTS, 1.0, 0.0)
    reached = smallest_cut(part_keys, ones, wanted.to(tl.float32), MINUS_INFINITY_KEY - 1 + floor * 0, floor * 0)
    bound = tl.where((by_k & enough_parts) | ((by_k == 0) & by_p), reached, MINUS_INFINITY_KEY)
    # Top-p behind top-k weighs all that top-k kept, also what min-p drops afterwards.
    bound = tl.where(by_k & by_p, bound, tl.maximum(bound, floor))
    # The parts that reach it, in order of ids, then their values that do.
    takes = (part_keys >= bound) & (part < PARTS)
    place = tl.cumsum(takes.to(tl.int32), axis=0) - 1
    num_parts = tl.sum(takes.to(tl.int32), axis=0)
    tl.store(chosen_parts + r * PARTS + place, part, mask=takes)
    tl.debug_barrier()
    count = num_parts * 0
    within = tl.arange(0, GROUP * PART)
    base = num_parts * 0
    while (base < num_parts) & (count <= CAP):
        which = base + within // PART
        known = which < num_parts
        index = tl.load(chosen_parts + r * PARTS + which, mask=known, other=0) * PART + within % PART
        inside = known & (index < V)
        value = (tl.load(row + index, mask=inside, other=float("-inf")) - top) * scale
        hit = (inside & (key_of(value) >= bound)).to(tl.int32)
        slot = count + tl.cumsum(hit, axis=0) - 1
        keep = (hit != 0) & (slot < CAP)
        tl.store(candidates + r * CAP + slot, value, mask=keep)
        tl.store(candidate_ids + r * CAP + slot, index, mask=keep)
        count += tl.sum(hit, axis=0)
        base += GROUP
    tl.debug_barrier()
    lane = tl.arange(0, CAP)
    held = lane < tl.minimum(count, CAP)
    value = tl.load(candidates + r * CAP + lane, mask=held, other=float("-inf"))
    ids = tl.load(candidate_ids + r * CAP + lane, mask=held, other=0x7FFFFFFF)
    keys = key_of(value)
    weight = tl.where(held, tl.exp(value), 0.0)
    whole = tl.sum(mass * tl.exp((largest - top) * scale), axis=0)
    covers = by_k | (by_p == 0) | (tl.sum(weight, axis=0) >= p * whole) | (bound <= floor)
    cut = floor
    if (count <= CAP) & covers:
        if by_k:
            each = tl.where(held, 1.0, 0.0)
            kth = smallest_cut(keys, each, k.to(tl.float32), MINUS_INFINITY_KEY - 1 + floor * 0, floor * 0)
            cut = tl.maximum(cut, kth)
            weight = tl.where(keys >= kth, weight, 0.0)
            whole = tl.sum(weight, axis=0)
        if by_p:
            # Without top-k the mass is the row's, of which the candidates hold enough; min-p comes after top-p.
            cut = tl.maximum(cut, smallest_cut(keys, weight, p * whole, MINUS_INFINITY_KEY - 1 + floor * 0, floor * 0))
        weight = tl.where(keys >= cut, weight, 0.0)
        running = tl.cumsum(weight, axis=0)
        last = tl.max(tl.where(weight > 0, ids, 0), axis=0)
        tl.store(out + r, first_past(running, u * tl.sum(weight, axis=0), ids, last).to(tl.int64))
    else:
        kth = floor * 0 + MINUS_INFINITY_KEY
        if by_k:
            kth = row_cut(row, top, scale, kth, k.to(tl.float32), True, V, BLOCK)
            cut = tl.maximum(cut, kth)
        if by_p:
            no_key = floor * 0 + MINUS_INFINITY_KEY - 1
            whole, _, _ = row_mass_above(row, top, scale, kth, no_key, no_key, no_key, False, V, BLOCK)
            cut = tl.maximum(cut, row_cut(row, top, scale, kth, p * whole, False, V, BLOCK))
        tl.store(out + r, draw_from_row(row, top, scale, cut, u, V, BLOCK).to(tl.int64))
