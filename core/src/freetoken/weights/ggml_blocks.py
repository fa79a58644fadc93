"""The block types of GGML as scales, offsets and codes: the reference that every kernel for them is tested against.

A block is a run of weights along the last axis; each of its groups has a scale, in some types an offset too, and a
weight is ``scale · code + offset``. Layouts are those of the structs in GGML's ``ggml-common.h``. Arithmetic is in
float32, multiplication before addition, as GGML's own row functions do it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from attrs import frozen
from torch import Tensor

from freetoken.weights.ggml_types import BLOCK_TYPES

WEIGHTS_AT_ONCE = 1 << 18  # bounds temporaries to a few MB, which also stay in the processor's cache

# What the 16 codes of the non-linear 4-bit types and of MXFP4 (E2M1, doubled) stand for.
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@frozen(eq=False)
class Affine:
    """``N`` blocks of ``G`` groups of ``W`` weights: ``scales [N, G]`` and ``offsets`` float32, ``codes [N, G · W]``
    uint8 (types with offsets) or int8."""

    scales: Tensor
    codes: Tensor
    offsets: Tensor | None = None

    def weights(self) -> Tensor:
        """``[N, G · W]`` float32."""
        groups = self.codes.float().view(*self.scales.shape, -1) * self.scales[:, :, None]
        return (groups if self.offsets is None else groups + self.offsets[:, :, None]).flatten(1)


Take = Callable[[Tensor], Affine]


def dequantise_rows(name: str, packed: Tensor) -> Tensor:
    """``packed [..., row bytes]`` uint8 of block type ``name`` → ``[..., row weights]`` float32."""
    blocks_of = BLOCK_TYPES[name]
    rows, row_bytes = prod(packed.shape[:-1]), packed.shape[-1]
    row_weights = row_bytes // blocks_of.block_bytes * blocks_of.block
    out = torch.empty((*packed.shape[:-1], row_weights), dtype=torch.float32, device=packed.device)
    source = packed.reshape(rows * row_bytes // blocks_of.block_bytes, blocks_of.block_bytes)
    target = out.view(source.shape[0], blocks_of.block)
    step = max(1, WEIGHTS_AT_ONCE // blocks_of.block)
    for first in range(0, source.shape[0], step):
        target[first : first + step] = _TAKE[name](source[first : first + step]).weights()
    return out


def affine(name: str, packed: Tensor) -> Affine:
    """``packed [N, block bytes]`` uint8 of block type ``name``, taken apart."""
    return _TAKE[name](packed)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte ``at`` of each block, ``[N, 1]`` float32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _bytes(blocks: Tensor, at: int, count: int) -> Tensor:
    return blocks[:, at : at + count]


def _nibbles(packed: Tensor) -> Tensor:
    """``[N, n]`` → ``[N, 2n]``: all low halves, then all high halves."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _signed(codes: Tensor, zero: int) -> Tensor:
    """uint8 codes, of which ``zero`` stands for 0, as int8."""
    return codes.view(torch.int8) - zero


def _bits(blocks: Tensor, at: int) -> Tensor:
    """The 32 bits at byte ``at``, lowest first: ``[N, 32]`` of 0 and 1."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return ((blocks[:, at : at + 4, None] >> shifts) & 1).flatten(1)


def _q4_0(blocks: Tensor) -> Affine:
    return Affine(_half(blocks, 0), _signed(_nibbles(_bytes(blocks, 2, 16)), 8))


def _q4_1(blocks: Tensor) -> Affine:
    return Affine(_half(blocks, 0), _nibbles(_bytes(blocks, 4, 16)), _half(blocks, 2))


def _q5_0(blocks: Tensor) -> Affine:
    return Affine(_half(blocks, 0), _signed(_nibbles(_bytes(blocks, 6, 16)) | (_bits(blocks, 2) << 4), 16))


def _q5_1(blocks: Tensor) -> Affine:
    return Affine(_half(blocks, 0), _nibbles(_bytes(blocks, 8, 16)) | (_bits(blocks, 4) << 4), _half(blocks, 2))


def _q8_0(blocks: Tensor) -> Affine:
    return Affine(_half(blocks, 0), _bytes(blocks, 2, 32).contiguous().view(torch.int8))


def _quarters(packed: Tensor) -> Tensor:
    """``[N, 64]`` → ``[N, 256]``: in each half of 32 bytes, four planes of two bits."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=packed.device)[:, None]
    return ((packed.reshape(-1, 2, 1, 32) >> shifts) & 3).flatten(1)


def _q2_k(blocks: Tensor) -> Affine:
    packed = _bytes(blocks, 0, 16)
    scales, offsets = _half(blocks, 80) * (packed & 15).float(), _half(blocks, 82) * (packed >> 4).float()
    return Affine(scales, _quarters(_bytes(blocks, 16, 64)), -offsets)


def _q3_k(blocks: Tensor) -> Affine:
    low, high = _nibbles(_bytes(blocks, 96, 8)), _bytes(blocks, 104, 4)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)[:, None]
    upper = ((high[:, None, :] >> shifts) & 3).flatten(1)
    scales = _half(blocks, 108) * ((low | (upper << 4)).float() - 32)
    planes = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    mask = ((_bytes(blocks, 0, 32)[:, None, :] >> planes) & 1).flatten(1)
    return Affine(scales, _signed(_quarters(_bytes(blocks, 32, 64)) | (mask << 2), 4))


def _six_bit_pairs(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The 8 scales and 8 minima of Q4_K and Q5_K, six bits each in 12 bytes at 4: ``[N, 8]`` float32."""
    first, second, mixed = (_bytes(blocks, at, 4) for at in (4, 8, 12))
    scales = torch.cat((first & 63, (mixed & 15) | (first >> 6 << 4)), dim=-1)
    minima = torch.cat((second & 63, (mixed >> 4) | (second >> 6 << 4)), dim=-1)
    return _half(blocks, 0) * scales.float(), _half(blocks, 2) * minima.float()


def _half_planes(packed: Tensor) -> Tensor:
    """``[N, 128]`` → ``[N, 256]``: in each quarter of 32 bytes, low halves then high halves."""
    quarters = packed.reshape(-1, 4, 1, 32)
    return torch.cat((quarters & 15, quarters >> 4), dim=2).flatten(1)


def _q4_k(blocks: Tensor) -> Affine:
    scales, minima = _six_bit_pairs(blocks)
    return Affine(scales, _half_planes(_bytes(blocks, 16, 128)), -minima)


def _q5_k(blocks: Tensor) -> Affine:
    scales, minima = _six_bit_pairs(blocks)
    planes = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    fifth = ((_bytes(blocks, 16, 32)[:, None, :] >> planes) & 1).flatten(1)
    return Affine(scales, _half_planes(_bytes(blocks, 48, 128)) | (fifth << 4), -minima)


def _q6_k(blocks: Tensor) -> Affine:
    low = _bytes(blocks, 0, 128).reshape(-1, 2, 64)
    low = torch.cat((low & 15, low >> 4), dim=2).flatten(1)
    codes = low | (_quarters(_bytes(blocks, 128, 64)) << 4)
    scales = _half(blocks, 208) * _bytes(blocks, 192, 16).contiguous().view(torch.int8).float()
    return Affine(scales, _signed(codes, 32))


def _looked_up(codes: Tensor, values: tuple[int, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.int8, device=codes.device)[codes.int()]


def _iq4_nl(blocks: Tensor) -> Affine:
    return Affine(_half(blocks, 0), _looked_up(_nibbles(_bytes(blocks, 2, 16)), _IQ4_VALUES))


def _iq4_xs(blocks: Tensor) -> Affine:
    low = torch.stack((_bytes(blocks, 4, 4) & 15, _bytes(blocks, 4, 4) >> 4), dim=-1).flatten(1)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)
    high = ((_bytes(blocks, 2, 2)[:, :, None] >> shifts) & 3).flatten(1)
    scales = _half(blocks, 0) * ((low | (high << 4)).float() - 32)
    halves = _bytes(blocks, 8, 128).reshape(-1, 8, 16)
    codes = torch.cat((halves & 15, halves >> 4), dim=2).flatten(1)
    return Affine(scales, _looked_up(codes, _IQ4_VALUES))


def _mxfp4(blocks: Tensor) -> Affine:
    exponent = _bytes(blocks, 0, 1).int()
    # 2^(e − 128): half of the E8M0 scale, since the values are doubled; ldexp reaches the subnormal end too.
    scales = torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent - 128).float()
    return Affine(scales, _looked_up(_nibbles(_bytes(blocks, 1, 16)), _MXFP4_VALUES))


_TAKE: dict[str, Take] = {
    "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q8_0": _q8_0,
    "q2_k": _q2_k, "q3_k": _q3_k, "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k,
    "iq4_nl": _iq4_nl, "iq4_xs": _iq4_xs, "mxfp4": _mxfp4,
}  # fmt: skip
