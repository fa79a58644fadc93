"""Can these kernels run here: cheap for listings, deep in a child process."""

from __future__ import annotations

from importlib.util import find_spec

from freetoken.vocab.availability import Availability
from freetoken.vocab.hardware import Hardware

OLDEST_ARCH = 80
"""Below compute capability 8.0 there is no bfloat16 and no asynchronous copy into shared memory."""


def probe(hardware: Hardware) -> Availability:
    """Triton is installed and a CUDA device of compute capability 8.0 or later is there. Imports nothing."""
    if find_spec("triton") is None:
        return Availability.no("triton is not installed", "pip install 'triton>=3.6'")
    device = hardware.device("cuda")
    if device is None:
        return Availability.no("no CUDA device", "use the torch kernels, or a machine with an NVIDIA GPU")
    if device.arch < OLDEST_ARCH:
        found = ".".join(map(str, device.compute_capability))
        return Availability.no(f"{device.name} has compute capability {found}; 8.0 is needed", "use the torch kernels")
    return Availability.yes()


def deep_probe(_: Hardware) -> Availability:
    """Triton itself finds the device and can launch: it needs a C compiler for its launchers."""
    try:
        import triton
        from triton.runtime.driver import driver

        target = driver.active.get_current_target()
    except Exception as error:  # whatever Triton's driver raises is the reason
        return Availability.no(f"{type(error).__name__}: {error}", "install a C compiler and a matching NVIDIA driver")
    if target.backend != "cuda":
        return Availability.no(f"triton {triton.__version__} drives {target.backend}, not cuda")
    return Availability.yes()
