"""Control-group limits. Oracle: file trees written as the kernel's documentation describes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from freetoken.memory.cgroup import MemoryLimit, cpu_quota, memory_limit
from freetoken.memory.hardware import host_memory, probe_hardware, usable_cores
from freetoken.vocab.units import GIB, MIB

V2_MOUNT = "31 23 0:27 {root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "35 31 0:32 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
)
MEMINFO = "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(root: Path, files: dict[str, str], *, own: str = "/", mount_root: str = "/") -> Path:
    base = {"proc/self/mountinfo": V2_MOUNT.format(root=mount_root), "proc/self/cgroup": f"0::{own}\n"}
    return write(root, base | {f"sys/fs/cgroup/{name}": text for name, text in files.items()})


def v1(root: Path, files: dict[str, str], *, own: str = "/", mount_root: str = "/") -> Path:
    groups = f"4:memory:{own}\n1:cpu,cpuacct:{own}\n0::/\n"
    base = {"proc/self/mountinfo": V1_MOUNTS.format(root=mount_root), "proc/self/cgroup": groups}
    return write(root, base | {f"sys/fs/cgroup/{name}": text for name, text in files.items()})


def test_without_control_groups_nothing_is_limited(tmp_path):
    write(tmp_path, {})
    assert cpu_quota(tmp_path) is None
    assert memory_limit(tmp_path) is None
    assert host_memory(None, tmp_path) == (16 * GIB, 8 * GIB)


def test_v2_takes_the_tightest_group_up_to_the_mount(tmp_path):
    v2(
        tmp_path,
        {
            "a/cpu.max": "150000 100000\n",
            "a/b/cpu.max": "max 100000\n",
            "a/memory.max": f"{4 * GIB}\n",
            "a/memory.current": f"{3 * GIB}\n",
            "a/memory.stat": f"anon {GIB}\ninactive_file {GIB}\nactive_file {512 * MIB}\n",
            "a/b/memory.max": "max\n",
        },
        own="/a/b",
    )
    assert cpu_quota(tmp_path) == 1.5
    assert memory_limit(tmp_path) == MemoryLimit(4 * GIB, GIB + 512 * MIB)
    assert host_memory(None, tmp_path) == (4 * GIB, 2 * GIB + 512 * MIB)
    assert usable_cores(tmp_path) == 1


def test_v1_reads_the_controllers_own_mounts(tmp_path):
    v1(
        tmp_path,
        {
            "memory/box/memory.limit_in_bytes": f"{2 * GIB}\n",
            "memory/box/memory.usage_in_bytes": f"{GIB}\n",
            "memory/box/memory.stat": f"cache 5\ntotal_inactive_file {256 * MIB}\ntotal_active_file 0\n",
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
            "cpu,cpuacct/box/cpu.cfs_quota_us": "50000\n",
            "cpu,cpuacct/box/cpu.cfs_period_us": "100000\n",
            "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
        own="/box",
    )
    assert memory_limit(tmp_path) == MemoryLimit(2 * GIB, GIB - 256 * MIB)
    assert cpu_quota(tmp_path) == 0.5
    assert usable_cores(tmp_path) == 1, "half a core is still one thread"


@pytest.mark.parametrize("make", [v1, v2])
def test_in_a_container_the_mount_begins_at_our_own_group(tmp_path, make):
    """The path in /proc/self/cgroup is the host's, the mount shows only what lies below it."""
    names = ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")
    names = names if make is v1 else ("memory.max", "memory.current")
    make(tmp_path, {names[0]: f"{GIB}\n", names[1]: "0\n"}, own="/docker/abc", mount_root="/docker/abc")
    assert memory_limit(tmp_path) == MemoryLimit(GIB, 0)


def test_a_group_that_is_not_visible_falls_back_to_the_nearest_that_is(tmp_path):
    v2(tmp_path, {"memory.max": f"{GIB}\n", "memory.current": "0\n"}, own="/gone/away")
    assert memory_limit(tmp_path) == MemoryLimit(GIB, 0)


def test_an_override_replaces_the_total_but_never_a_limit(tmp_path):
    write(tmp_path, {})
    assert host_memory(64 * GIB, tmp_path) == (64 * GIB, 56 * GIB)
    assert host_memory(4 * GIB, tmp_path) == (4 * GIB, 0)
    v2(tmp_path, {"memory.max": f"{32 * GIB}\n", "memory.current": f"{GIB}\n"})
    assert host_memory(64 * GIB, tmp_path) == (32 * GIB, 31 * GIB)


def test_the_probe_of_this_machine_is_consistent():
    """Oracle: psutil and the scheduler's affinity."""
    import os

    import psutil

    hardware = probe_hardware(accelerators=False)
    assert 1 <= hardware.cores <= len(os.sched_getaffinity(0))
    assert 0 < hardware.host_free_bytes <= hardware.host_total_bytes <= psutil.virtual_memory().total * 1.5
    assert hardware.cpu.memory_total_bytes == hardware.host_total_bytes
    assert probe_hardware(accelerators=False, host_memory_bytes=3 * GIB).host_total_bytes <= 3 * GIB
