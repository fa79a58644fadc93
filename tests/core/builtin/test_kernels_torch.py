"""The built-in torch kernels: the conformance suite over every op."""

from __future__ import annotations

from freetoken.testing.kernels import KernelConformance


class TestConformance(KernelConformance):
    spec = "freetoken.builtin.kernels_torch:freetoken_kernels"
