"""Tiny kernels for the launch tests. Imports triton only, as files of kernels must."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def add_scaled(x, y, out, count, stride, scale, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    total = tl.load(x + offsets, mask=mask) + tl.load(y + offsets, mask=mask) * scale + 0 * stride
    tl.store(out + offsets, total, mask=mask)


@triton.autotune(configs=[triton.Config({"BLOCK": 64})], key=["count"])
@triton.jit
def tuned(x, count, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(x + offsets, offsets, mask=offsets < count)
