"""CUDA devices as the driver itself reports them, through ctypes: no torch, and no context on any device.

A CUDA context takes several hundred MiB of a device for as long as its process lives, so a process that only plans must
not make one. NVML answers how much is free without a context. ``cuInit`` does make CUDA unusable in children that are
*forked* from here; FreeToken's processes are spawned.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import re
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import frozen

from freetoken.vocab.hardware import Device

_DRIVER, _NVML = ("nvcuda.dll", "nvml.dll") if sys.platform == "win32" else ("libcuda.so.1", "libnvidia-ml.so.1")
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_MULTIPROCESSORS, _MAJOR, _MINOR, _SHARED_OPTIN = 16, 75, 76, 97  # CUdevice_attribute
_NAME_BYTES = 256

LoadLibrary = Callable[[str], Any]


@frozen
class CudaReport:
    """The devices, or why there are none (``problem``, with a ``fix`` where one is known)."""

    devices: tuple[Device, ...] = ()
    problem: str = ""
    fix: str = ""


class DriverError(Exception):
    """A call of the driver or of NVML failed."""


def read_cuda(load: LoadLibrary = ctypes.CDLL) -> CudaReport:
    """All CUDA devices this process may see (``CUDA_VISIBLE_DEVICES`` is the driver's own affair)."""
    try:
        driver = load(_DRIVER)
    except OSError:
        return CudaReport(problem=f"no NVIDIA driver ({_DRIVER} is not there)")
    status = driver.cuInit(0)
    if status == _NO_DEVICE:
        return CudaReport(problem="the NVIDIA driver shows no device", fix="check nvidia-smi and CUDA_VISIBLE_DEVICES")
    if status:
        return CudaReport(
            problem=f"the NVIDIA driver does not start: cuInit returned {status}", fix="check nvidia-smi, or restart"
        )
    try:
        nvml = _start_nvml(load)
        count = _integer(driver.cuDeviceGetCount)
        return CudaReport(tuple(_device(driver, nvml, index) for index in range(count)))
    except DriverError as error:
        return CudaReport(problem=str(error), fix="check nvidia-smi")


def torch_cuda_build() -> str:
    """The CUDA version the installed torch was built for, ``""`` for a build without CUDA or no torch at all.

    Read from torch's version file, without importing it.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    text = Path(spec.origin).with_name("version.py").read_text()
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return found[1] if found else ""


def usable_cuda(load: LoadLibrary = ctypes.CDLL) -> CudaReport:
    """The CUDA devices that the installed torch can use."""
    report = read_cuda(load)
    if report.devices and not torch_cuda_build():
        names = ", ".join(device.name for device in report.devices)
        version = importlib.metadata.version("torch") if importlib.util.find_spec("torch") else "missing"
        return CudaReport(
            problem=f"{names} is there, but the installed torch ({version}) has no CUDA",
            fix="install a CUDA build of torch",
        )
    return report


def _device(driver: Any, nvml: Any | None, index: int) -> Device:
    handle = _integer(driver.cuDeviceGet, index)

    def attribute(number: int) -> int:
        return _integer(driver.cuDeviceGetAttribute, number, handle)

    name = ctypes.create_string_buffer(_NAME_BYTES)
    _call(driver.cuDeviceGetName, name, _NAME_BYTES, handle)
    total = ctypes.c_size_t()
    _call(driver.cuDeviceTotalMem_v2, ctypes.byref(total), handle)
    return Device(
        kind="cuda",
        index=index,
        name=name.value.decode(),
        compute_capability=(attribute(_MAJOR), attribute(_MINOR)),
        multiprocessors=attribute(_MULTIPROCESSORS),
        shared_memory_bytes=attribute(_SHARED_OPTIN),
        memory_total_bytes=total.value,
        memory_free_bytes=_free_bytes(driver, nvml, handle),
    )


class _NvmlMemory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def _free_bytes(driver: Any, nvml: Any | None, handle: int) -> int:
    """Free memory by NVML; where that is missing or does not know the device, through a short-lived context."""
    device = _nvml_device(driver, nvml, handle) if nvml is not None else None
    if device is None or nvml is None:
        return _free_bytes_in_context(driver, handle)
    memory = _NvmlMemory()
    _call(nvml.nvmlDeviceGetMemoryInfo, device, ctypes.byref(memory))
    return int(memory.free)


def _nvml_device(driver: Any, nvml: Any, handle: int) -> ctypes.c_void_p | None:
    """NVML counts devices differently (it ignores ``CUDA_VISIBLE_DEVICES``), so they are matched by UUID."""
    raw = (ctypes.c_ubyte * 16)()
    _call(driver.cuDeviceGetUuid_v2, ctypes.byref(raw), handle)
    device = ctypes.c_void_p()
    for prefix in ("GPU", "MIG"):
        name = f"{prefix}-{uuid.UUID(bytes=bytes(raw))}".encode()
        if nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(device)) == 0:
            return device
    return None


def _free_bytes_in_context(driver: Any, handle: int) -> int:
    context = ctypes.c_void_p()
    _call(driver.cuDevicePrimaryCtxRetain, ctypes.byref(context), handle)
    try:
        _call(driver.cuCtxPushCurrent_v2, context)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        _call(driver.cuMemGetInfo_v2, ctypes.byref(free), ctypes.byref(total))
        _call(driver.cuCtxPopCurrent_v2, ctypes.byref(context))
        return free.value
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(handle)


def _start_nvml(load: LoadLibrary) -> Any | None:
    try:
        nvml = load(_NVML)
    except OSError:
        return None
    return nvml if nvml.nvmlInit_v2() == 0 else None


def _integer(call: Callable[..., int], *arguments: int) -> int:
    value = ctypes.c_int()
    _call(call, ctypes.byref(value), *arguments)
    return value.value


def _call(call: Callable[..., int], *arguments: Any) -> None:
    status = call(*arguments)
    if status:
        raise DriverError(f"{getattr(call, '__name__', 'a driver call')} returned {status}")
