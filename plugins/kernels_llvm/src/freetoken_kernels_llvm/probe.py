"""Whether the kernels can run here. Imports neither torch nor LLVM."""

from __future__ import annotations

import platform
import sys
from importlib.util import find_spec

from freetoken.vocab.availability import Availability
from freetoken.vocab.hardware import Hardware
from freetoken_kernels_llvm.openmp import library_path


def probe(_: Hardware) -> Availability:
    """A Linux machine with a torch that computes with GNU OpenMP, and llvmlite."""
    if sys.platform != "linux":
        return Availability.no(f"it shares torch's GNU OpenMP threads, which {platform.system()} builds do not have")
    if find_spec("llvmlite") is None:
        return Availability.no("llvmlite is not installed", "pip install llvmlite")
    if library_path() is None:
        return Availability.no("this build of torch brings no GNU OpenMP library")
    return Availability.yes()
