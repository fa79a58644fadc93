"""How far a result may lie from its float32 oracle, by dtype and by the length of the sum behind it."""

from __future__ import annotations

from math import sqrt

import torch
from attrs import frozen
from torch import Tensor

_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@frozen
class Tolerance:
    """``|actual − expected| ≤ atol + rtol · |expected|``."""

    rtol: float
    atol: float


def tolerance(dtype: str, reduction: int = 1) -> Tolerance:
    """For values of order 1 that were read and written in ``dtype`` and summed over ``reduction`` terms in float32.

    With the unit roundoff u of ``dtype``, four roundings may fall between inputs and output: 4u, relative and, since
    terms cancel, absolute. Another order of summation moves a float32 sum by about 2⁻²⁴·√n; eight times that is
    allowed.
    """
    u = _ROUNDOFF[dtype]
    return Tolerance(rtol=4 * u, atol=4 * u + 8 * _ROUNDOFF["float32"] * sqrt(reduction))


def assert_close(actual: Tensor, expected: Tensor, dtype: str, reduction: int = 1, what: str = "result") -> None:
    """Fails with the place and size of the worst difference; a shape, a NaN or an infinity that differs fails too."""
    assert actual.shape == expected.shape, f"{what}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    allowed = tolerance(dtype, reduction)
    torch.testing.assert_close(
        actual.detach().double().cpu(), expected.detach().double().cpu(), rtol=allowed.rtol, atol=allowed.atol,
        equal_nan=True, msg=lambda text: f"{what} ({dtype}, sums of {reduction}): {text}",
    )  # fmt: skip
