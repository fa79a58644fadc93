"""What is free and what was taken, measured while the engine starts. Imports torch where the device needs it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import psutil

from freetoken.memory.hardware import host_memory
from freetoken.vocab.hardware import Device
from freetoken.vocab.units import KIB

if TYPE_CHECKING:
    from typing import Self


def device_free_bytes(device: Device) -> int:
    """Bytes a new allocation on ``device`` may take now.

    On a GPU: what the driver has, and what torch's allocator holds without using it. On a CPU: ``device``'s total (so
    that an override given to the probe still counts) less what the host has in use.
    """
    if device.kind == "cpu":
        return host_memory(device.memory_total_bytes or None)[1]
    import torch

    free, _ = torch.cuda.mem_get_info(device.index)
    idle = torch.cuda.memory_reserved(device.index) - torch.cuda.memory_allocated(device.index)
    return int(free + idle)


class PeakTracker:
    """The highest memory use inside a ``with`` block, as bytes above the use at its start.

    On a GPU: torch's allocated bytes; nesting two on one device is not possible, since torch keeps one peak. On a CPU:
    the resident set, which the kernel tracks; where its mark cannot be reset (``exact`` is false then), an earlier
    higher peak of the process counts too, so the answer is never too low.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.exact = True
        self.start_bytes = 0
        self._peak_bytes: int | None = None

    @property
    def peak_bytes(self) -> int:
        """The absolute peak; after the block."""
        if self._peak_bytes is None:
            raise RuntimeError("the peak is known once the with block has ended")
        return self._peak_bytes

    @property
    def extra_bytes(self) -> int:
        """The peak above the use at the start; after the block."""
        return max(0, self.peak_bytes - self.start_bytes)

    def __enter__(self) -> Self:
        if self.device.kind == "cpu":
            self.exact = _reset_resident_peak()
            self.start_bytes = psutil.Process().memory_info().rss
        else:
            import torch

            torch.cuda.synchronize(self.device.index)
            self.start_bytes = torch.cuda.memory_allocated(self.device.index)
            torch.cuda.reset_peak_memory_stats(self.device.index)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.device.kind == "cpu":
            self._peak_bytes = _resident_peak()
        else:
            import torch

            torch.cuda.synchronize(self.device.index)
            self._peak_bytes = torch.cuda.max_memory_allocated(self.device.index)


def _reset_resident_peak() -> bool:
    """Linux: writing 5 sets the process's high-water mark back to its use now (proc(5), ``clear_refs``)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _resident_peak() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * KIB
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource  # not there on Windows

    high = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return high if sys.platform == "darwin" else high * KIB
