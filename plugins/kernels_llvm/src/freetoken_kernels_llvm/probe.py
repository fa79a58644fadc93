"""Whether the kernels can run here. Imports neither torch nor LLVM."""

from __future__ import annotations

import platform
import sys
from importlib.util import find_spec
from pathlib import Path

from freetoken.vocab.availability import Availability
from freetoken.vocab.hardware import Hardware
from freetoken_kernels_llvm.openmp import library_path

CPUINFO = Path("/proc/cpuinfo")


def probe(_: Hardware) -> Availability:
    """A Linux machine with a torch that computes with GNU OpenMP, and llvmlite."""
    if sys.platform != "linux":
        return Availability.no(f"it shares torch's GNU OpenMP threads, which {platform.system()} builds do not have")
    if find_spec("llvmlite") is None:
        return Availability.no("llvmlite is not installed", "pip install llvmlite")
    if library_path() is None:
        return Availability.no("this build of torch brings no GNU OpenMP library")
    if platform.machine() in ("x86_64", "AMD64") and not _widens_halves():
        return Availability.no("this processor has no f16c, the instructions that widen the blocks' float16 scales")
    return Availability.yes()


def _widens_halves() -> bool:
    """Without them LLVM calls a library function that is not there."""
    lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines() if CPUINFO.exists() else []
    return any("f16c" in line.partition(":")[2].split() for line in lines if line.startswith("flags"))


def deep_probe(_: Hardware) -> Availability:
    """LLVM makes one form's code here; in a child, since a broken library may crash."""
    from freetoken_kernels_llvm.forms import FORMS
    from freetoken_kernels_llvm.machine import product

    product(FORMS["q4_1"])
    return Availability.yes()
