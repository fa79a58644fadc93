"""The core's own suite for kernels, on a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from attrs import evolve
from torch import Tensor

from freetoken.testing.kernels import KernelConformance


class TestTritonKernels(KernelConformance):
    spec = "freetoken_kernels_triton.spec:SPECS"

    def _load(self, case):
        """The suite's single rows are slices; the engine's tensors start at multiples of 16 bytes."""
        kernel = super()._load(case)
        return evolve(kernel, call=lambda *args: kernel.call(*map(_aligned, args)))


def _aligned(value):
    return value.clone() if isinstance(value, Tensor) and value.data_ptr() % 16 else value
