"""Depthwise causal convolution with SiLU over a ragged batch, and the update of its state.

State row ``slot`` is [C, W−1], oldest input first. The program that holds a sequence's first token alone reads and
writes its state, so no order between programs matters; it reads all it needs before it writes.
"""

# mypy: ignore-errors
# The bodies are Triton's language, not Python's types.
import triton
import triton.language as tl

from freetoken_kernels_triton.dependent_kernel import wait_for_predecessor


@triton.jit
def sequence_of_block(query_starts, sequences, block, TOKENS: tl.constexpr, BLOCK_B: tl.constexpr):
    """Which sequence a block of TOKENS tokens belongs to, and its first block.

    Sequence b's blocks begin at ``query_starts[b] // TOKENS + b``: enough places for each, found without knowing the
    lengths of the others. A block may lie behind its sequence's end.
    """
    index = tl.arange(0, BLOCK_B)
    before = tl.zeros((BLOCK_B,), tl.int32)
    for base in range(0, sequences, BLOCK_B):
        start = tl.load(query_starts + base + index, mask=base + index < sequences, other=0)
        begun = (start // TOKENS + base + index <= block) & (base + index < sequences)
        before += begun.to(tl.int32)
    sequence = tl.sum(before, axis=0) - 1
    return sequence, tl.load(query_starts + sequence) // TOKENS + sequence


@triton.jit(do_not_specialize=["x_stride", "sequences"])
def conv_prefill_kernel(
    x,
    weight,
    state,
    query_starts,
    state_slots,
    prefix_lens,
    out,
    x_stride,
    sequences,
    C: tl.constexpr,
    W: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Program (block of tokens of one sequence, block of channels)."""
    ALIGN: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    block = tl.program_id(0)
    sequence, first_block = sequence_of_block(query_starts, sequences, block, BLOCK_T, BLOCK_B)
    begin = tl.load(query_starts + sequence)
    length = tl.load(query_starts + sequence + 1) - begin
    local = (block - first_block) * BLOCK_T + tl.arange(0, BLOCK_T)
    if (block - first_block) * BLOCK_T >= length:
        return
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    channels = channel < C
    prefix = tl.load(prefix_lens + sequence)
    old = state + tl.load(state_slots + sequence) * (C * (W - 1)) + channel[None, :] * (W - 1)
    rows = x + begin.to(tl.int64) * (x_stride // ALIGN * ALIGN)
    total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for tap in tl.static_range(W):
        at = local - (W - 1) + tap
        inside = (at >= 0) & (local < length)
        offsets = at.to(tl.int64)[:, None] * (x_stride // ALIGN * ALIGN) + channel[None, :]
        value = tl.load(rows + offsets, mask=inside[:, None] & channels[None, :], other=0.0).to(tl.float32)
        if tap < W - 1:
            earlier = (at < 0) & (local < length) & (prefix > 0)
            past = tl.load(old + (at + W - 1)[:, None], mask=earlier[:, None] & channels[None, :], other=0.0)
            value += past.to(tl.float32)
        value *= tl.load(weight + channel * W + tap, mask=channels, other=0.0).to(tl.float32)[None, :]
        total += value
    result = total / (1.0 + tl.exp(-total))
    target = out + (begin + local).to(tl.int64)[:, None] * C + channel[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=(local < length)[:, None] & channels[None, :])
    if block == first_block:
        KEPT: tl.constexpr = W - 1
        held = state + tl.load(state_slots + sequence) * (C * KEPT) + channel * KEPT
        for index in tl.static_range(KEPT):
            place = length - KEPT + index
            recent = tl.load(
                rows + place.to(tl.int64) * (x_stride // ALIGN * ALIGN) + channel,
                mask=channels & (place >= 0),
                other=0.0,
            )
            # Before the first token comes what the state held, at a place behind the one that is written now: places
            # are written oldest first, so none is overwritten that is still to be read.
            kept = tl.load(held + place + KEPT, mask=channels & (place < 0) & (prefix > 0), other=0.0)
            tl.debug_barrier()
            tl.store(held + index, recent.to(tl.float32) + kept.to(tl.float32), mask=channels)


@triton.jit(do_not_specialize=["x_stride", "sequences"])
def conv_decode_kernel(
    x,
    weight,
    state,
    state_slots,
    prefix_lens,
    out,
    x_stride,
    sequences,
    C: tl.constexpr,
    W: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (block of sequences, block of channels): one token for each sequence."""
    ALIGN: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    KEPT: tl.constexpr = W - 1
    row = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (row < sequences)[:, None] & (channel < C)[None, :]
    taps = weight + channel * W
    last_tap = tl.load(taps + KEPT, mask=channel < C, other=0.0).to(tl.float32)
    wait_for_predecessor(PDL)
    slot = tl.load(state_slots + row, mask=row < sequences, other=0)
    known = tl.load(prefix_lens + row, mask=row < sequences, other=0) > 0
    old = state + slot[:, None] * (C * KEPT) + channel[None, :] * KEPT
    newest = tl.load(
        x + row.to(tl.int64)[:, None] * (x_stride // ALIGN * ALIGN) + channel[None, :], mask=mask, other=0.0
    ).to(tl.float32)
    total = newest * last_tap[None, :]
    for index in tl.static_range(KEPT):
        value = tl.load(old + index, mask=mask & known[:, None], other=0.0).to(tl.float32)
        total += value * tl.load(taps + index, mask=channel < C, other=0.0).to(tl.float32)[None, :]
        # Another thread may hold the same place in another layout: every thread has read place index − 1 by now.
        tl.debug_barrier()
        if index > 0:
            tl.store(old + index - 1, value, mask=mask)
    tl.store(old + KEPT - 1, newest, mask=mask)
    result = total / (1.0 + tl.exp(-total))
    target = out + row.to(tl.int64)[:, None] * C + channel[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=mask)
