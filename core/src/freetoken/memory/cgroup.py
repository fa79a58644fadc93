"""Limits of the control groups (v1 and v2) this process lives in. Reads files only, below ``root``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

UNLIMITED_BYTES = 1 << 60  # v1 writes "no limit" as the largest page-aligned integer


@frozen
class MemoryLimit:
    """The tightest memory limit above this process, and what the group under it cannot give back."""

    limit_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs that the tightest quota grants, or ``None`` where none is set."""
    quotas = []
    for group in _groups(root, ""):
        fields = _read(group / "cpu.max").split()
        if len(fields) == 2 and fields[0].isdigit():
            quotas.append(int(fields[0]) / int(fields[1]))
    for group in _groups(root, "cpu"):
        quota_us, period_us = (_int(group / f"cpu.cfs_{what}_us") for what in ("quota", "period"))
        if quota_us and period_us and quota_us > 0:
            quotas.append(quota_us / period_us)
    return min(quotas, default=None)


def memory_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """The limit with the fewest bytes left, or ``None`` where none is set.

    The kernel charges the page cache to a group but takes it back under pressure, so it does not count as used: right
    after reading a checkpoint nearly all of the usage is page cache.
    """
    limits = []
    for group in _groups(root, ""):
        limits.append(_limit(group, "memory.max", "memory.current", ("inactive_file", "active_file")))
    for group in _groups(root, "memory"):
        names = ("total_inactive_file", "total_active_file")
        limits.append(_limit(group, "memory.limit_in_bytes", "memory.usage_in_bytes", names))
    return min((found for found in limits if found), key=lambda found: found.free_bytes, default=None)


def _limit(group: Path, limit_file: str, usage_file: str, cache_keys: tuple[str, ...]) -> MemoryLimit | None:
    limit = _int(group / limit_file)
    if limit is None or limit >= UNLIMITED_BYTES:
        return None
    stat = dict(line.split() for line in _read(group / "memory.stat").splitlines() if len(line.split()) == 2)
    cache = sum(int(stat.get(key, 0)) for key in cache_keys)
    return MemoryLimit(limit, max(0, (_int(group / usage_file) or 0) - cache))


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """This process's group and those around it, up to the mount; ``controller`` is ``""`` for version 2."""
    found = _mount(root, controller)
    if found is None:
        return
    mount, mount_root = found
    inside = _own_group(root, controller)
    # In a container the mount may begin below the hierarchy's root, and the path may name a group we cannot see.
    inside = inside.removeprefix(mount_root.rstrip("/")) if inside.startswith(mount_root) else inside
    group = mount / inside.strip("/")
    while not group.is_dir():
        group = group.parent
    while True:
        yield group
        if group == mount or mount not in group.parents:
            return
        group = group.parent


def _mount(root: Path, controller: str) -> tuple[Path, str] | None:
    """Where the hierarchy is mounted, and which group of it the mount shows as its top."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, fs = before.split(), after.split()
        if len(fields) < 5 or not fs:
            continue
        if (not controller and fs[0] == "cgroup2") or (
            controller and fs[0] == "cgroup" and controller in fs[-1].split(",")
        ):
            return root / fields[4].lstrip("/"), fields[3]
    return None


def _own_group(root: Path, controller: str) -> str:
    """The path of this process's group within the hierarchy."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if (not controller and number == "0" and not controllers) or (
            controller and controller in controllers.split(",")
        ):
            return path
    return "/"


def _read(path: Path) -> str:
    """The file's text; empty where it does not exist or may not be read, which here means "says nothing"."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _int(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None
