"""CUDA devices without torch. Oracles: a scripted driver, and on a GPU torch's own properties."""

from __future__ import annotations

import subprocess
import sys
import uuid

import pytest

from freetoken.memory.cuda_driver import CudaReport, read_cuda, torch_cuda_build, usable_cuda
from freetoken.vocab.units import GIB

UUIDS = [uuid.UUID(int=7), uuid.UUID(int=9)]
ATTRIBUTES = {16: 84, 75: 12, 76: 0, 97: 101376}


class Driver:
    """libcuda with two devices."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.contexts = 0

    def cuInit(self, flags):  # noqa: N802
        return self.status

    def cuDeviceGetCount(self, out):  # noqa: N802
        out._obj.value = 2
        return 0

    def cuDeviceGet(self, out, index):  # noqa: N802
        out._obj.value = index
        return 0

    def cuDeviceGetAttribute(self, out, attribute, device):  # noqa: N802
        out._obj.value = ATTRIBUTES[attribute]
        return 0

    def cuDeviceGetName(self, buffer, size, device):  # noqa: N802
        buffer.value = f"GPU number {device}".encode()
        return 0

    def cuDeviceTotalMem_v2(self, out, device):  # noqa: N802
        out._obj.value = (16 + device) * GIB
        return 0

    def cuDeviceGetUuid_v2(self, out, device):  # noqa: N802
        out._obj[:] = UUIDS[device].bytes
        return 0

    def cuDevicePrimaryCtxRetain(self, out, device):  # noqa: N802
        self.contexts += 1
        return 0

    def cuCtxPushCurrent_v2(self, context):  # noqa: N802
        return 0

    def cuCtxPopCurrent_v2(self, out):  # noqa: N802
        return 0

    def cuMemGetInfo_v2(self, free, total):  # noqa: N802
        free._obj.value = 3 * GIB
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device):  # noqa: N802
        self.contexts -= 1
        return 0


class Nvml:
    """libnvidia-ml, which lists the devices in the other order; one of them is a MIG slice."""

    def nvmlInit_v2(self):  # noqa: N802
        return 0

    def nvmlDeviceGetHandleByUUID(self, name, out):  # noqa: N802
        known = {f"GPU-{UUIDS[1]}".encode(): 100, f"MIG-{UUIDS[0]}".encode(): 200}
        out._obj.value = known.get(name, 0)
        return 0 if name in known else 6

    def nvmlDeviceGetMemoryInfo(self, device, out):  # noqa: N802
        out._obj.free = {100: 5 * GIB, 200: 2 * GIB}[device.value]
        return 0


def loader(driver, nvml=None):
    def load(name):
        found = driver if "cuda" in name else nvml
        if found is None:
            raise OSError(name)
        return found

    return load


def test_every_fact_of_every_device_is_read():
    report = read_cuda(loader(Driver(), Nvml()))
    assert report.problem == ""
    first, second = report.devices
    assert (first.torch_name, first.name, first.arch, first.multiprocessors) == ("cuda:0", "GPU number 0", 120, 84)
    assert (first.shared_memory_bytes, first.memory_total_bytes) == (101376, 16 * GIB)
    assert [first.memory_free_bytes, second.memory_free_bytes] == [2 * GIB, 5 * GIB]


def test_without_nvml_a_short_context_answers_what_is_free():
    driver = Driver()
    assert [d.memory_free_bytes for d in read_cuda(loader(driver)).devices] == [3 * GIB] * 2
    assert driver.contexts == 0


@pytest.mark.parametrize(
    ("load", "problem"),
    [
        (loader(None), "no NVIDIA driver"),
        (loader(Driver(100)), "shows no device"),
        (loader(Driver(803)), "cuInit returned 803"),
    ],
)
def test_no_device_comes_with_the_reason(load, problem):
    report = read_cuda(load)
    assert report.devices == ()
    assert problem in report.problem


def test_a_failing_call_is_named():
    driver = Driver()
    driver.cuDeviceGetAttribute = failing = lambda *_: 999
    failing.__name__ = "cuDeviceGetAttribute"
    assert read_cuda(loader(driver, Nvml())).problem == "cuDeviceGetAttribute returned 999"


def test_devices_that_the_installed_torch_cannot_use_are_not_offered():
    """Oracle: torch itself, asked for its build."""
    import torch

    assert torch_cuda_build() == (torch.version.cuda or "")
    report = usable_cuda(loader(Driver(), Nvml()))
    if torch.version.cuda:
        assert len(report.devices) == 2
    else:
        assert report == CudaReport(
            problem=f"GPU number 0, GPU number 1 is there, but the installed torch ({torch.__version__}) has no CUDA",
            fix="install a CUDA build of torch",
        )


def test_the_probe_imports_no_torch():
    code = "import sys, freetoken.memory.hardware as h; h.probe_hardware(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.gpu
def test_the_driver_and_torch_agree_and_the_probe_makes_no_context():
    """Oracle: torch's device properties; and that the free memory did not fall from probing."""
    report = usable_cuda()
    again = usable_cuda()
    assert report.problem == ""
    assert again.devices[0].memory_free_bytes >= report.devices[0].memory_free_bytes
    import torch

    assert len(report.devices) == torch.cuda.device_count()
    for device in report.devices:
        properties = torch.cuda.get_device_properties(device.index)
        assert device.name == properties.name
        assert device.compute_capability == (properties.major, properties.minor)
        assert device.multiprocessors == properties.multi_processor_count
        assert device.shared_memory_bytes == properties.shared_memory_per_block_optin
        assert abs(device.memory_total_bytes - properties.total_memory) < GIB
        free = torch.cuda.mem_get_info(device.index)[0]
        assert 0 <= device.memory_free_bytes - free < GIB, "torch's own context is what came between"
