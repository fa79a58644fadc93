"""Measuring. Oracle: allocations of known size."""

from __future__ import annotations

import pytest

from freetoken.memory.hardware import probe_hardware
from freetoken.memory.measure import PeakTracker, device_free_bytes
from freetoken.memory.threads import compute_threads, loading_threads, thread_environment
from freetoken.vocab.hardware import Device
from freetoken.vocab.units import GIB, MIB


def test_the_cpu_peak_is_what_was_touched_and_freed_inside():
    before = bytearray(96 * MIB)  # touched and freed before: must not count
    before[::4096] = b"x" * len(before[::4096])
    del before
    with PeakTracker(Device()) as peak:
        block = bytearray(64 * MIB)
        block[::4096] = b"x" * len(block[::4096])
        del block
    assert peak.peak_bytes >= peak.start_bytes
    assert peak.extra_bytes >= 63 * MIB
    if peak.exact:
        assert peak.extra_bytes < 90 * MIB


def test_the_peak_is_unknown_inside_the_block():
    with PeakTracker(Device()) as peak, pytest.raises(RuntimeError, match="once the with block has ended"):
        _ = peak.extra_bytes


def test_free_bytes_of_a_cpu_honour_the_total_it_was_probed_with():
    hardware = probe_hardware(accelerators=False)
    more = probe_hardware(accelerators=False, host_memory_bytes=hardware.host_total_bytes + GIB).cpu
    plain = device_free_bytes(hardware.cpu)
    assert 0 < plain <= hardware.host_total_bytes
    if more.memory_total_bytes > hardware.host_total_bytes:  # no control group holds it back
        assert abs(device_free_bytes(more) - plain - GIB) < 512 * MIB


@pytest.mark.parametrize(
    ("cores", "asked", "kind", "threads"),
    [
        (1, None, "cpu", 1), (2, None, "cpu", 2), (3, None, "cpu", 3), (4, None, "cpu", 3), (16, None, "cpu", 15),
        (16, 5, "cpu", 5), (2, 8, "cpu", 8), (0, None, "cpu", 1), (16, None, "cuda", 4), (2, None, "cuda", 2),
    ],
)  # fmt: skip
def test_threads_follow_the_documented_rule(cores, asked, kind, threads):
    assert compute_threads(cores, asked, device_kind=kind) == threads
    assert thread_environment(threads)["OMP_NUM_THREADS"] == str(threads)


@pytest.mark.parametrize(("compute", "kind", "loaders"), [(1, "cpu", 1), (2, "cpu", 2), (31, "cpu", 4), (4, "cuda", 1)])
def test_loaders_are_few_since_each_holds_a_matrix(compute: int, kind: str, loaders: int) -> None:
    """Table: on a device the copies are one after the other anyway."""
    assert loading_threads(compute, kind) == loaders


@pytest.mark.gpu
def test_gpu_free_bytes_and_peak_follow_an_allocation():
    import torch

    device = probe_hardware().device("cuda")
    assert device is not None
    torch.zeros(1, device="cuda")
    free = device_free_bytes(device)
    with PeakTracker(device) as peak:
        held = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
        gone = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
        del gone
    assert peak.extra_bytes == 768 * MIB
    taken = free - device_free_bytes(device)
    assert abs(taken - 256 * MIB) < 16 * MIB, "what torch caches counts as free"
    del held
