"""What the cgroups of this process grant it, v2 or v1: a container sees the CPUs and the memory of its whole host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
_NO_LIMIT = 2**60
"""Version 1 writes the largest number of pages where there is no limit."""


def cpu_quota(root: Path = CGROUP_ROOT, own_cgroup: Path = OWN_CGROUP) -> float | None:
    """The CPUs that the narrowest of the cgroups grants, such as 1.5; None where none has a limit.

    Args:
        root: Where the cgroup file system is mounted.
        own_cgroup: File that names the cgroups of this process.
    """
    quotas = [_quota(folder) for folder in _folders("cpu", root, own_cgroup)]
    return min((quota for quota in quotas if quota is not None), default=None)


def memory_left(root: Path = CGROUP_ROOT, own_cgroup: Path = OWN_CGROUP) -> int | None:
    """The bytes that the cgroups let this process take beside what is taken; None where none has a limit.

    Args:
        root: Where the cgroup file system is mounted.
        own_cgroup: File that names the cgroups of this process.
    """
    left = [_memory_left(folder) for folder in _folders("memory", root, own_cgroup)]
    return min((number for number in left if number is not None), default=None)


def _folders(controller: str, root: Path, own_cgroup: Path) -> Iterator[Path]:
    """The folders of this process's cgroups, from its own up to the root; in a container often the root alone."""
    try:
        lines = own_cgroup.read_text().splitlines()
    except OSError:
        lines = []
    own = {name: path for line in lines for _, names, path in [line.split(":", 2)] for name in names.split(",")}
    for hierarchy, name in ((root, ""), (root / controller, controller)):
        path = hierarchy / own.get(name, "").lstrip("/")
        yield path
        yield from (parent for parent in path.parents if parent.is_relative_to(hierarchy))


def _quota(folder: Path) -> float | None:
    """CPUs granted by `cpu.max` (v2) or `cpu.cfs_quota_us` (v1); None where there is no limit."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
    except (OSError, ValueError):
        return None
    if quota in ("max", "-1"):
        return None
    return int(quota) / int(period)


def _memory_left(folder: Path) -> int | None:
    """The limit of a cgroup without what it takes now, by the files of v2 or v1. What it caches is given back."""
    is_v2 = (folder / "memory.max").exists()
    limit, usage = ("memory.max", "memory.current") if is_v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    try:
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cached = int(statistics.get("inactive_file") or statistics.get("total_inactive_file") or 0)
        limit_bytes, used_bytes = int((folder / limit).read_text()), int((folder / usage).read_text())
    except (OSError, ValueError):
        return None
    return max(0, limit_bytes - used_bytes + cached) if limit_bytes < _NO_LIMIT else None
