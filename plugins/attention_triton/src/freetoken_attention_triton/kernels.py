"""The Triton kernels. Imports triton alone, so that workers without torch can compile them.

Softmax is computed online, in base 2 (Milakov & Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135);
contexts are split over programs and the parts combined by their log-sum-exp (Dao et al. 2023, "Flash-Decoding").
Query heads that share a key head are rows of one tile, so that keys and values are read once for all of them.

Pools are ``[pages, P, Hkv, D]`` and addressed in 64 bits. Counts and strides are plain run-time integers that never
specialise; strides are hinted to be multiples of 16 bytes, which the launch's contract guarantees.

With ``PDL`` a kernel may start before its predecessor has ended; ``freetoken.ops.dependent_launch`` has the rules.
"""

# mypy: ignore-errors
# Triton's language has no types that mypy could check.

import triton
import triton.language as tl


@triton.jit
def _wait_for_predecessor(PDL: tl.constexpr):
    """Wait until all that the predecessors wrote is there; then let the next kernel start."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _share_of_decode(context, window, splits, BLOCK_N: tl.constexpr, MIN_BLOCKS: tl.constexpr, WINDOWED: tl.constexpr):
    """Where the keys of a decoded token begin, and how many of them one part takes: whole blocks, and not too few.

    Parts are numbered from the first key on, so that those of a short context are the first ones and the others empty.
    """
    low = context * 0
    if WINDOWED:
        low = tl.maximum(context - window, 0) // BLOCK_N * BLOCK_N
    return low, tl.maximum(tl.cdiv(tl.cdiv(context - low, BLOCK_N), splits), MIN_BLOCKS) * BLOCK_N


@triton.jit
def _attend(
    q, acc, top, total, k_pool, v_pool, pages, low, high, context, positions, window, head, scale,
    D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr, KV_HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add keys ``[low, high)`` to the running softmax of ``q [M, D]``: ``acc [M, DV]``, its maximum and its sum.

    Without ``MASKED`` every row must see every key of every block. ``scale`` includes log2(e).
    """
    dims = tl.arange(0, BLOCK_D)
    v_dims = tl.arange(0, BLOCK_DV)
    for start in range(low, high, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        if MASKED:
            inside = cols < context
            page = tl.load(pages + cols // PAGE, mask=inside, other=0)
        else:
            page = tl.load(pages + cols // PAGE)
        slot = (page.to(tl.int64) * PAGE + cols % PAGE) * KV_HEADS + head
        k_at = k_pool + slot[:, None] * D + dims[None, :]
        v_at = v_pool + slot[:, None] * DV + v_dims[None, :]
        if MASKED:
            k = tl.load(k_at, mask=inside[:, None] & (dims < D)[None, :], other=0.0)
        elif BLOCK_D != D:
            k = tl.load(k_at, mask=(dims < D)[None, :], other=0.0)
        else:
            k = tl.load(k_at)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if MASKED:
            v = tl.load(v_at, mask=inside[:, None] & (v_dims < DV)[None, :], other=0.0)
            seen = cols[None, :] <= positions[:, None]
            if WINDOWED:
                seen = seen & (cols[None, :] > positions[:, None] - window)
            scores = tl.where(seen, scores * scale, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen nothing yet
            weights = tl.exp2(scores - base[:, None])
            shrink = tl.exp2(top - base)
        else:
            if BLOCK_DV != DV:
                v = tl.load(v_at, mask=(v_dims < DV)[None, :], other=0.0)
            else:
                v = tl.load(v_at)
            new_top = tl.maximum(top, tl.max(scores, 1) * scale)
            weights = tl.exp2(scores * scale - new_top[:, None])
            shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
    return acc, top, total


@triton.jit
def _store(
    acc, top, total, out, partial, lse, row, part_row, valid, head_of_row, split, splits,
    DV: tl.constexpr, Q_HEADS: tl.constexpr, BLOCK_DV: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Write a tile to ``out [T, Hq, DV]``, or with its log-sum-exp to ``partial [rows, Hq, splits, DV]``."""
    v_dims = tl.arange(0, BLOCK_DV)
    mask = valid[:, None] & (v_dims < DV)[None, :]
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if SPLIT:
        place = (part_row.to(tl.int64) * Q_HEADS + head_of_row) * splits + split
        tl.store(partial + place[:, None] * DV + v_dims[None, :], result, mask=mask)
        tl.store(lse + place, tl.where(total == 0.0, float("-inf"), top + tl.log2(total)), mask=valid)
    else:
        place = row.to(tl.int64) * Q_HEADS + head_of_row
        tl.store(out + place[:, None] * DV + v_dims[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["sequences", "q_stride", "table_stride", "tiles", "splits", "window", "min_query"])
def prefill(
    q, k_pool, v_pool, out, partial, lse, page_table, query_starts, context_lens,
    sequences, q_stride, table_stride, tiles, splits, window, min_query, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    STRIDE_MULTIPLE: tl.constexpr, WINDOWED: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Causal attention of a ragged batch's query tokens, ``BLOCK_M ÷ GROUP_PADDED`` of one sequence a program.

    Grid ``(tiles · KV_HEADS, splits)``, tiles = tokens ÷ queries a tile + sequences; the last tiles, which see most
    keys, come first. Sequences of fewer than ``min_query`` queries are left out.
    """
    QUERIES: tl.constexpr = BLOCK_M // GROUP_PADDED
    head = tl.program_id(0) % KV_HEADS
    tile = tiles - 1 - tl.program_id(0) // KV_HEADS
    split = tl.program_id(1)

    # The last sequence whose first tile is not after this one.
    sequence = tile * 0
    beyond = sequences
    while beyond - sequence > 1:
        middle = (sequence + beyond) // 2
        if tl.load(query_starts + middle) // QUERIES + middle <= tile:
            sequence = middle
        else:
            beyond = middle
    q_start = tl.load(query_starts + sequence)
    q_len = tl.load(query_starts + sequence + 1) - q_start
    first_query = (tile - q_start // QUERIES - sequence) * QUERIES
    if (first_query >= q_len) | (q_len < min_query):
        return

    context = tl.load(context_lens + sequence)
    pages = page_table + sequence.to(tl.int64) * table_stride
    q_stride = tl.multiple_of(q_stride, STRIDE_MULTIPLE)

    lanes = tl.arange(0, BLOCK_M)
    tokens = first_query + lanes // GROUP_PADDED
    member = lanes % GROUP_PADDED
    valid = (tokens < q_len) & (member < GROUP)
    positions = context - q_len + tokens
    dims = tl.arange(0, BLOCK_D)
    q_row = (q_start + tokens).to(tl.int64) * q_stride + (head * GROUP + member) * D
    q_at = q + q_row[:, None] + dims[None, :]
    if BLOCK_D == D:
        tile_q = tl.load(q_at, mask=valid[:, None], other=0.0)
    else:
        tile_q = tl.load(q_at, mask=valid[:, None] & (dims < D)[None, :], other=0.0)

    # Keys [low, high) are seen by some row; [inner_low, inner_high), in whole blocks, by all.
    first = context - q_len + first_query
    high = tl.minimum(first + QUERIES, context)
    low = 0
    inner_low = 0
    if WINDOWED:
        low = tl.maximum(first - window + 1, 0) // BLOCK_N * BLOCK_N
        inner_low = (tl.maximum(high - window, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    inner_high = tl.maximum((first + 1) // BLOCK_N * BLOCK_N, low)
    inner_low = tl.minimum(inner_low, inner_high)
    if SPLIT:
        share = tl.cdiv(tl.cdiv(high - low, BLOCK_N), splits) * BLOCK_N
        low = low + split * share
        high = tl.minimum(low + share, high)
        inner_low = tl.minimum(tl.maximum(inner_low, low), high)
        inner_high = tl.minimum(tl.maximum(inner_high, inner_low), high)

    acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    if WINDOWED:
        acc, top, total = _attend(
            tile_q, acc, top, total, k_pool, v_pool, pages, low, inner_low, context, positions, window, head, scale,
            D, DV, PAGE, KV_HEADS, BLOCK_N, BLOCK_D, BLOCK_DV, True, True, PRECISION,
        )  # fmt: skip
    acc, top, total = _attend(
        tile_q, acc, top, total, k_pool, v_pool, pages, inner_low, inner_high, context, positions, window, head, scale,
        D, DV, PAGE, KV_HEADS, BLOCK_N, BLOCK_D, BLOCK_DV, False, WINDOWED, PRECISION,
    )  # fmt: skip
    acc, top, total = _attend(
        tile_q, acc, top, total, k_pool, v_pool, pages, inner_high, high, context, positions, window, head, scale,
        D, DV, PAGE, KV_HEADS, BLOCK_N, BLOCK_D, BLOCK_DV, True, WINDOWED, PRECISION,
    )  # fmt: skip
    _store(
        acc, top, total, out, partial, lse, q_start + tokens, q_start + tokens, valid, head * GROUP + member,
        split, splits, DV, KV_HEADS * GROUP, BLOCK_DV, SPLIT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["q_stride", "table_stride", "splits", "window"])
def decode(
    q, k_pool, v_pool, out, partial, lse, page_table, query_starts, context_lens,
    q_stride, table_stride, splits, window, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    STRIDE_MULTIPLE: tl.constexpr, WINDOWED: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    MIN_BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attention of the sequences that bring one token: grid ``(sequences, KV_HEADS, splits)``.

    The split of a context follows its own length, so the grid does not, and a captured launch serves any context. A
    part without keys writes nothing; ``combine_decoded`` knows which ones there are.
    """
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    _wait_for_predecessor(PDL)
    row = tl.load(query_starts + sequence)
    following = tl.load(query_starts + sequence + 1)
    context = tl.load(context_lens + sequence)  # asked for before the branch, so that all three come at once
    if following - row != 1:
        return
    low, share = _share_of_decode(context, window, splits, BLOCK_N, MIN_BLOCKS, WINDOWED)
    high = context
    if SPLIT:
        low = low + split * share
        high = tl.minimum(low + share, high)
        if low >= high:
            return
    pages = page_table + sequence.to(tl.int64) * table_stride
    q_stride = tl.multiple_of(q_stride, STRIDE_MULTIPLE)

    member = tl.arange(0, BLOCK_M)
    valid = member < GROUP
    dims = tl.arange(0, BLOCK_D)
    q_at = q + row.to(tl.int64) * q_stride + ((head * GROUP + member) * D)[:, None] + dims[None, :]
    tile_q = tl.load(q_at, mask=valid[:, None] & (dims < D)[None, :], other=0.0)
    positions = tl.zeros([BLOCK_M], dtype=tl.int32) + (context - 1)

    acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc, top, total = _attend(
        tile_q, acc, top, total, k_pool, v_pool, pages, low, high, context, positions, window, head, scale,
        D, DV, PAGE, KV_HEADS, BLOCK_N, BLOCK_D, BLOCK_DV, True, WINDOWED, PRECISION,
    )  # fmt: skip
    _store(
        acc, top, total, out, partial, lse, row + member * 0, sequence + member * 0, valid, head * GROUP + member,
        split, splits, DV, KV_HEADS * GROUP, BLOCK_DV, SPLIT,
    )  # fmt: skip


@triton.jit
def _join(
    partial, lse, place, out_row, out, parts, head,
    Q_HEADS: tl.constexpr, DV: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """BLOCK_C columns of one row and head: ``parts`` partial results from ``place`` on, weighted by their sums.

    The largest log-sum-exp is found first, over all parts at once, so that the blocks of parts do not depend on each
    other and their loads overlap.
    """
    every = tl.arange(0, BLOCK_P)
    top = tl.max(tl.load(lse + place + every, mask=every < parts, other=float("-inf")), 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    cols = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    acc = tl.zeros([BLOCK_C], dtype=tl.float32)
    total = 0.0
    for start in range(0, parts, BLOCK_S):
        part = start + tl.arange(0, BLOCK_S)
        inside = part < parts
        values = tl.load(
            partial + (place + part)[:, None] * DV + cols[None, :], mask=inside[:, None] & (cols < DV)[None, :],
            other=0.0,
        )  # fmt: skip
        weight = tl.exp2(tl.load(lse + place + part, mask=inside, other=float("-inf")) - base)
        acc += tl.sum(values * weight[:, None], 0)
        total += tl.sum(weight, 0)
    result = acc / tl.where(total == 0.0, 1.0, total)
    to = out + (out_row.to(tl.int64) * Q_HEADS + head) * DV + cols
    tl.store(to, result.to(out.dtype.element_ty), mask=cols < DV)


@triton.jit(do_not_specialize=["splits"])
def combine(
    partial, lse, out, splits,
    Q_HEADS: tl.constexpr, DV: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Join the parts of a prefill's row and head: grid ``(rows, Hq, blocks of columns)``."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    place = (row.to(tl.int64) * Q_HEADS + head) * splits
    _join(partial, lse, place, row, out, splits, head, Q_HEADS, DV, BLOCK_P, BLOCK_S, BLOCK_C)


@triton.jit(do_not_specialize=["splits", "window"])
def combine_decoded(
    partial, lse, out, query_starts, context_lens, splits, window,
    Q_HEADS: tl.constexpr, DV: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr, MIN_BLOCKS: tl.constexpr, WINDOWED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Join the parts of a sequence's only token: grid ``(sequences, Hq, blocks of columns)``.

    Only the parts that this context has are read. Sequences that bring more tokens are left out.
    """
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    _wait_for_predecessor(PDL)
    row = tl.load(query_starts + sequence)
    following = tl.load(query_starts + sequence + 1)
    context = tl.load(context_lens + sequence)
    if following - row != 1:
        return
    low, share = _share_of_decode(context, window, splits, BLOCK_N, MIN_BLOCKS, WINDOWED)
    parts = tl.cdiv(context - low, share)
    place = (sequence.to(tl.int64) * Q_HEADS + head) * splits
    _join(partial, lse, place, row, out, parts, head, Q_HEADS, DV, BLOCK_P, BLOCK_S, BLOCK_C)
