"""Machine code for this processor, made by LLVM when a kernel loads: a fifth of a second a form, once a process."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from threading import Lock
from typing import Any

import llvmlite.binding as llvm
from attrs import frozen

from freetoken_kernels_llvm.forms import Form
from freetoken_kernels_llvm.ir import module
from freetoken_kernels_llvm.openmp import runtime

SYMBOLS = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
_OPTIMISE = 3
_lock = Lock()  # LLVM's global state is not for several threads


@frozen(eq=False)
class Product:
    """``run(tiles, x, y, sums [rows, blocks], groups, blocks, rows, row stride of x, threads)``, all addresses and
    integers; ``sums`` is scratch memory. It lets go of Python's lock. ``engine`` owns the code."""

    run: Callable[..., None]
    engine: Any


@cache
def _target() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    library = runtime()
    for name in SYMBOLS:
        llvm.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    return llvm.Target.from_default_triple()


def target_machine() -> Any:
    """LLVM's description of this processor, with all that it can do."""
    features = llvm.get_host_cpu_features().flatten()
    return _target().create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=_OPTIMISE)


def product(form: Form) -> Product:
    """The product for ``form``; made once."""
    with _lock:
        return _made(form)


@cache
def _made(form: Form) -> Product:
    machine = target_machine()
    parsed = llvm.parse_assembly(module(form))
    parsed.verify()
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=_OPTIMISE))
    passes.getModulePassManager().run(parsed, passes)
    engine = llvm.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    integers, addresses = [ctypes.c_int64] * 4, [ctypes.c_void_p] * 4
    prototype = ctypes.CFUNCTYPE(None, *addresses, *integers, ctypes.c_int32)
    return Product(prototype(engine.get_function_address("run")), engine)
