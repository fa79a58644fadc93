"""Loading compiled kernels on the device: a key that is only compiled still costs its first launch a module load."""

from __future__ import annotations

from typing import Any

from freetoken.ops.triton_stub import Pointer, call_arguments, jit_function, launch_options
from freetoken.vocab.launch import TritonLaunch


def load_launch(launch: TritonLaunch) -> Any:
    """Compile ``launch`` for the current device (a read where the disk has it), load its module, and return the kernel.

    The launch goes through Triton's own binder with stand-in tensors, so that the kernel lies under the very key that
    launches with real ones will ask for. Hold what is returned: newer Tritons unload a kernel that nobody holds.
    """
    fn = jit_function(launch.kernel)
    values, _ = call_arguments(fn, launch, lambda arg: Pointer(arg.dtype))
    compiled = fn.warmup(*values, grid=(1, 1, 1), **launch_options(launch))
    compiled._init_handles()
    return compiled
