"""Experts out of pinned host memory into their slots, by programs that read the host's memory over the bus."""

# mypy: ignore-errors
# Triton's language has no types that mypy could check.

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit(do_not_specialize=["room"])
def fetch_kernel(
    host,
    bank,
    lists,
    counters,
    room,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    TIMED: tl.constexpr,
):
    """Programs share out blocks of ``BLOCK`` words of all experts to fetch; how many there are stands on the device.

    ``host`` [E, WORDS] and ``bank`` [S, WORDS] are one part of the experts. ``TIMED``: the first program adds how long
    it was busy, which is how long all were, since their shares differ by one block at most.
    """
    if TIMED:
        begin = globaltimer()
    blocks = (WORDS + BLOCK - 1) // BLOCK
    misses = tl.load(lists)
    within = tl.arange(0, BLOCK)
    for item in range(tl.program_id(0), misses * blocks, tl.num_programs(0)):
        miss = item // blocks
        start = (item % blocks) * BLOCK
        expert = tl.load(lists + 4 + miss).to(tl.int64)
        slot = tl.load(lists + 4 + room + miss).to(tl.int64)
        if WORDS % BLOCK == 0:
            words = tl.load(host + expert * WORDS + start + within, eviction_policy="evict_first")
            tl.store(bank + slot * WORDS + start + within, words)
        else:
            inside = start + within < WORDS
            words = tl.load(host + expert * WORDS + start + within, mask=inside, eviction_policy="evict_first")
            tl.store(bank + slot * WORDS + start + within, words, mask=inside)
    if TIMED:  # noqa: SIM102 - this condition is the compiler's, the inner one the device's
        if tl.program_id(0) == 0:
            tl.store(counters + 4, tl.load(counters + 4) + globaltimer() - begin)
