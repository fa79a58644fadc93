"""Kernels in Triton's interpreter: only in a process of their own, since the switch acts when a kernel is decorated.

``../test_interpreter.py`` starts that process. Whatever ``torch.empty`` gives is poisoned, so that a place no kernel
wrote shows.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Any:
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def kernel() -> Callable[..., Callable[..., Any]]:
    """``kernel(op, dtype, **sizes)``: the loaded call of this plugin's kernel for that shape."""
    from freetoken.plugin.protocols import KernelSetup
    from freetoken.vocab.hardware import Device
    from freetoken.vocab.ops import OpShape
    from freetoken_kernels_triton.spec import SPECS

    device = Device(multiprocessors=4, shared_memory_bytes=99 * 1024)

    def load(op: str, dtype: str, **sizes: Any) -> Callable[..., Any]:
        spec = next(s for s in SPECS if s.op == op)
        shape = OpShape(op, dtype, **sizes)
        served = spec.serves(shape)
        assert served, served.reason
        return spec.load(KernelSetup(shape, device, dtype, lambda stored: stored.parts["data"].float())).call

    return load


@pytest.fixture
def close() -> Callable[..., None]:
    """Compares with the float32 oracle within the rounding of the result's own dtype."""
    import torch

    def check(got: Any, want: Any, *, scale: float = 1.0) -> None:
        unit = {torch.float32: 2e-6, torch.float16: 1e-3}[got.dtype] * scale
        torch.testing.assert_close(got.float(), want.float(), rtol=2 * unit, atol=4 * unit)

    return check
