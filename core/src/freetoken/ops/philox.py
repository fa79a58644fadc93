"""Random numbers that are a function of (seed, step) alone: Philox4x32-10, with integers any device can reproduce.

Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3". With all arithmetic modulo 2³²:

    counter = (step mod 2³², step div 2³², 0, 0);  key = (seed mod 2³², seed div 2³²)
    ten times:
        c0, c1, c2, c3 = mulhi(0xCD9E8D57, c2) ^ c1 ^ k0,  0xCD9E8D57 · c2,
                         mulhi(0xD2511F53, c0) ^ c3 ^ k1,  0xD2511F53 · c0
        k0, k1 = k0 + 0x9E3779B9,  k1 + 0xBB67AE85

The uniform number takes ``c0`` as a signed 32-bit ``x``, folds it to 31 bits (``−x − 1`` where negative), rounds it to
float32 and multiplies by ``4.6566127342e-10``; it lies in [0, 1). This is Triton's ``tl.rand(seed, step)``,
bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_SCALE = 4.6566127342e-10
_SCALAR_ROWS = 16  # up to here plain integers beat ~120 small tensor operations on a CPU


def uniform(seeds: Tensor, steps: Tensor) -> Tensor:
    """``seeds [R] i64``, ``steps [R] i64`` → ``[R] f32`` in [0, 1)."""
    if seeds.device.type == "cpu" and seeds.numel() <= _SCALAR_ROWS:
        words = [philox_word(s, n) for s, n in zip(seeds.tolist(), steps.tolist(), strict=True)]
        word = torch.tensor(words, dtype=torch.int64)
    else:
        word = philox_words(seeds, steps)
    folded = torch.where(word >= 1 << 31, _MASK - word, word)  # −x − 1 of the signed reading
    return folded.to(torch.float32) * torch.tensor(_SCALE, dtype=torch.float32, device=seeds.device)


def philox_words(seeds: Tensor, steps: Tensor) -> Tensor:
    """The first output word of each (seed, step), ``[R] i64`` in [0, 2³²).

    A product of two 32-bit words may wrap as a signed 64-bit integer; its upper and lower halves, masked, are right all
    the same.
    """
    c0, c1 = steps & _MASK, (steps >> 32) & _MASK
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = seeds & _MASK, (seeds >> 32) & _MASK
    for _ in range(_ROUNDS):
        a, b = c0 * _ROUND_A, c2 * _ROUND_B
        c0, c1 = ((b >> 32) & _MASK) ^ c1 ^ k0, b & _MASK
        c2, c3 = ((a >> 32) & _MASK) ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + _KEY_A) & _MASK, (k1 + _KEY_B) & _MASK
    return c0


def philox_word(seed: int, step: int) -> int:
    """The same word from two integers."""
    c0, c1, c2, c3 = step & _MASK, (step >> 32) & _MASK, 0, 0
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(_ROUNDS):
        a, b = c0 * _ROUND_A, c2 * _ROUND_B
        c0, c1 = (b >> 32) ^ c1 ^ k0, b & _MASK
        c2, c3 = (a >> 32) ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + _KEY_A) & _MASK, (k1 + _KEY_B) & _MASK
    return c0
