"""Matrices kept in half precision for float32 products on a CPU, through FBGEMM's packed product (in torch on x86).

FBGEMM widens the half-precision weights to float32 in registers and computes and adds in float32, so that a product
reads half the bytes of a float32 matrix and is as exact as the rounding of the weights: 2⁻¹² of each, against about 2⁻⁵
in a 4-bit format. It beats torch's other ways at few rows: for
3072 × 576 on one core of a Zen 3, weights from memory, at 1, 8 and 32 rows, 276, 631 and 1883 µs, against 595, 1204 and
2829 of a float32 ``F.linear`` and 357, 878 and 3723 of the int8 product with its conversions to bfloat16 and back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional as F

from freetoken.ops.packing import Dequantise, pack_dense
from freetoken.plugin.protocols import KernelSetup, LoadedKernel
from freetoken.vocab.errors import CheckpointError, PluginError
from freetoken.vocab.weight import StoredTensor

_MAX_HALF = 65504.0


@frozen(eq=False)
class PackedHalf:
    """FBGEMM's own form of a matrix ``[O, I]``: two bytes a weight."""

    weight: Any  # a ScriptObject
    rows: int


def load_linear(setup: KernelSetup) -> LoadedKernel:
    """Raises ``PluginError`` where this torch was built without FBGEMM."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        raise PluginError("kernel cpu-packed", "this build of torch has no FBGEMM", "use --kernel linear=torch")
    multiply: Callable[[Tensor, Any], Tensor] = torch.ops.quantized.linear_dynamic_fp16.default._op

    def call(x: Tensor, packed: PackedHalf) -> Tensor:
        return multiply(x, packed.weight)

    def pack(tensors: Sequence[StoredTensor]) -> PackedHalf:
        matrix = _checked(tensors, setup.dequantise)
        return PackedHalf(torch.ops.quantized.linear_prepack_fp16(matrix, None), matrix.shape[0])

    return LoadedKernel(call, pack)


def load_embedding(setup: KernelSetup) -> LoadedKernel:
    """Rows in half precision, widened when they are looked up."""

    def call(tokens: Tensor, packed: Tensor) -> Tensor:
        return F.embedding(tokens, packed).float()

    def pack(tensors: Sequence[StoredTensor]) -> Tensor:
        return _checked(tensors, setup.dequantise).half()

    return LoadedKernel(call, pack)


def _checked(tensors: Sequence[StoredTensor], dequantise: Dequantise) -> Tensor:
    """The matrices stacked along their rows, in float32. Raises ``CheckpointError`` for weights beyond half's range."""
    matrix = pack_dense(tensors, dequantise, torch.float32, "cpu")
    low, high = (float(end) for end in matrix.aminmax()) if matrix.numel() else (0.0, 0.0)
    if not (low >= -_MAX_HALF and high <= _MAX_HALF):  # written so that NaN is refused too
        names = ", ".join(t.name for t in tensors)
        raise CheckpointError(
            f"keep {names} in half precision", f"its weights reach from {low:g} to {high:g}, beyond ±{_MAX_HALF:g}",
            "use --kernel linear=torch --kernel embedding=torch",
        )  # fmt: skip
    return matrix
