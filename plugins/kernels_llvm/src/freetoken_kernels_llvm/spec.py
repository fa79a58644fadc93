"""The plugin: one kernel, ``linear=llvm``. Imports neither torch nor LLVM."""

from __future__ import annotations

from freetoken.plugin.markers import hookimpl
from freetoken.plugin.protocols import KernelSetup, LoadedKernel
from freetoken.plugin.specs import KernelSpec
from freetoken.vocab.ops import OpShape
from freetoken_kernels_llvm.forms import FORMS, PREFIX, form_of
from freetoken_kernels_llvm.probe import probe


def _load(setup: KernelSetup) -> LoadedKernel:
    from freetoken_kernels_llvm.linear import load

    return load(setup)


def _packed_bytes(shape: OpShape) -> int:
    return form_of(shape.formats).matrix_bytes(shape.rows, shape.cols)


SPEC = KernelSpec(
    op="linear",
    name="llvm",
    summary="GGUF blocks as they are, float32 products in machine code made for this processor",
    devices=frozenset({"cpu"}),
    dtypes=frozenset({"float32"}),
    load=_load,
    priority=20,
    formats=frozenset(PREFIX + name for name in FORMS),
    probe=probe,
    deep_probe="freetoken_kernels_llvm.probe:deep_probe",
    packed_bytes=_packed_bytes,
)


@hookimpl
def freetoken_kernels() -> tuple[KernelSpec, ...]:
    return (SPEC,)
