"""Tiny kernels for the launch-space tests, one for each fault. Imports triton only, as files of kernels must."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens"])
def by_row(x, tokens, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offsets, offsets, mask=offsets < tokens)


@triton.jit
def specialising(x, tokens, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offsets, offsets, mask=offsets < tokens)


@triton.autotune(configs=[triton.Config({"BLOCK": 64})], key=["tokens"])
@triton.jit
def tuned(x, tokens, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(x + offsets, offsets, mask=offsets < tokens)
