"""The probe of the machine: the one place that reads how much memory and how many cores there are."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import psutil

from freetoken.memory.cgroup import cpu_quota, memory_limit
from freetoken.memory.cuda_driver import CudaReport, usable_cuda
from freetoken.vocab.hardware import Hardware
from freetoken.vocab.units import KIB

log = logging.getLogger(__name__)


def probe_hardware(
    *, accelerators: bool = True, host_memory_bytes: int | None = None, root: Path = Path("/")
) -> Hardware:
    """Cores and memory this process may really use, and the accelerators. Imports no torch, makes no CUDA context.

    ``host_memory_bytes`` replaces the host's total where the system reports too little (a virtual machine may grow its
    memory on demand); a control group's limit still holds, since the kernel kills whoever passes it. ``root`` is where
    ``/proc`` and ``/sys`` are read.
    """
    total, free = host_memory(host_memory_bytes, root)
    report = _accelerators() if accelerators else CudaReport()
    return Hardware(
        cores=usable_cores(root),
        host_total_bytes=total,
        host_free_bytes=free,
        accelerators=report.devices,
        accelerator_problem=report.problem,
        accelerator_fix=report.fix,
    )


def usable_cores(root: Path = Path("/")) -> int:
    """Cores by affinity, cut to whole CPUs of the control group's quota: more threads than that are throttled."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(root)
    return cores if quota is None else max(1, min(cores, int(quota)))


def host_memory(override_total_bytes: int | None = None, root: Path = Path("/")) -> tuple[int, int]:
    """Total and free bytes of host memory; free includes what the kernel gives back from its caches."""
    total, free = _system_memory(root)
    if override_total_bytes is not None:
        used = total - free
        total, free = override_total_bytes, max(0, override_total_bytes - used)
    limit = memory_limit(root)
    if limit is not None:
        total, free = min(total, limit.limit_bytes), min(free, limit.free_bytes)
    return total, free


def _system_memory(root: Path) -> tuple[int, int]:
    """From ``/proc/meminfo``, which inside a container may be its own; where there is none, from psutil."""
    meminfo = root / "proc/meminfo"
    if meminfo.exists():
        rows = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        return tuple(int(rows[key].split()[0]) * KIB for key in ("MemTotal", "MemAvailable"))  # type: ignore[return-value]
    memory = psutil.virtual_memory()
    return memory.total, memory.available


def _accelerators() -> CudaReport:
    report = usable_cuda()
    if report.problem:
        log.debug("no CUDA device: %s%s", report.problem, f" ({report.fix})" if report.fix else "")
    return report
