"""The launch space: the modules that FlashInfer builds with nvcc, one for a kernel, dtype and head size."""

from __future__ import annotations

from functools import lru_cache, partial

from freetoken.vocab.hardware import Device
from freetoken.vocab.launch import NativeModule, StepPoint
from freetoken.vocab.ops import OpShape
from freetoken_attention_flashinfer.build import build_in_child
from freetoken_attention_flashinfer.kernels import FA2, kernels_for, module_name


def launches(point: StepPoint, shape: OpShape, device: Device) -> tuple[NativeModule, ...]:
    """What one layer's attention needs at ``point``. Decode is FA2's alone; of the others any kernel may be asked."""
    kernels = kernels_for(device.arch) if not point.decode else (FA2,)
    return tuple(native_module(kernel, shape.dtype, shape.head_dim, device) for kernel in kernels)


@lru_cache(maxsize=64)
def native_module(kernel: str, dtype: str, head_dim: int, device: Device) -> NativeModule:
    """One module: built by a process of its own, loaded and touched on ``device`` in this one."""
    return NativeModule(
        name=module_name(kernel, dtype, head_dim),
        build=partial(build_in_child, kernel, dtype, head_dim),
        load=partial(_load, kernel, dtype, head_dim, device.torch_name),
    )


def _load(kernel: str, dtype: str, head_dim: int, device: str) -> None:
    from freetoken_attention_flashinfer.touch import touch

    touch(kernel, dtype, head_dim, device)
