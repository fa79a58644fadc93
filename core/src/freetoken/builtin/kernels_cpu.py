"""CPU kernels for float32: ``cpu-packed`` keeps two bytes a weight (x86), ``cpu`` needs few operations."""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path

from freetoken.plugin.markers import hookimpl
from freetoken.plugin.protocols import KernelSetup, LoadedKernel
from freetoken.plugin.specs import KernelSpec
from freetoken.vocab.availability import Availability
from freetoken.vocab.hardware import Hardware
from freetoken.vocab.ops import OpShape
from freetoken.vocab.units import ceil_div
from freetoken.weights.ggml_types import BLOCK_TYPES

# Formats that half precision holds as well as its own rounding allows. float32 is not among them: who stores that
# wants it.
FORMATS = frozenset({"float16", "bfloat16", *(f"gguf.{name}" for name in BLOCK_TYPES)})

_NEEDED = frozenset({"avx2", "fma", "f16c"})  # of FBGEMM's half-precision product
_CPUINFO = Path("/proc/cpuinfo")


def probe(_: Hardware) -> Availability:
    """x86 with the instructions that FBGEMM needs. Whether torch was built with it is seen when the kernel loads."""
    machine = platform.machine()
    if machine not in ("x86_64", "AMD64"):
        return Availability.no(f"it is for x86 processors, and this one is {machine}")
    missing = _NEEDED - _cpu_flags() if _CPUINFO.exists() else frozenset()
    return Availability.no(f"this processor has no {', '.join(sorted(missing))}") if missing else Availability.yes()


@cache
def _cpu_flags() -> frozenset[str]:
    for line in _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def half_bytes(shape: OpShape) -> int:
    """Bytes of one matrix of ``shape.rows × shape.cols``."""
    return 2 * shape.rows * shape.cols


def packed_bytes(shape: OpShape) -> int:
    """Bytes of FBGEMM's form: whole blocks of 512 columns and 16 rows. The padding is kept, but never read."""
    return 2 * ceil_div(shape.rows, 16) * 16 * ceil_div(shape.cols, 512) * 512


def _loader(module: str, name: str) -> Callable[[KernelSetup], LoadedKernel]:
    """``name`` of a module beside this one, which imports torch and is therefore imported when the kernel loads."""

    def load(setup: KernelSetup) -> LoadedKernel:
        found: Callable[[KernelSetup], LoadedKernel] = getattr(import_module(f"freetoken.builtin.{module}"), name)
        return found(setup)

    return load


def _packed(op: str, summary: str) -> KernelSpec:
    return KernelSpec(
        op=op,
        name="cpu-packed",
        summary=summary,
        devices=frozenset({"cpu"}),
        dtypes=frozenset({"float32"}),
        load=_loader("cpu_linear", f"load_{op}"),
        priority=10,
        formats=FORMATS,
        probe=probe,
        packed_bytes=packed_bytes if op == "linear" else half_bytes,
    )


def _few_ops(op: str) -> KernelSpec:
    return KernelSpec(
        op=op,
        name="cpu",
        summary=f"{op} in fewer operations than the reference",
        devices=frozenset({"cpu"}),
        dtypes=frozenset({"float32"}),
        load=_loader("cpu_few_ops", f"load_{op}"),
        priority=10,
    )


@hookimpl
def freetoken_kernels() -> tuple[KernelSpec, ...]:
    return (
        _packed("linear", "half-precision weights, float32 products (FBGEMM)"),
        _packed("embedding", "half-precision rows, widened when they are looked up"),
        _few_ops("rms_norm"),
        _few_ops("add_rms_norm"),
        _few_ops("rope"),
        _few_ops("rope_write"),
        _few_ops("silu_and_mul"),
    )
