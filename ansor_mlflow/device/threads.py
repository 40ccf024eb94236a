"""Threads and the CPUs that they may run on: affinity, and the quota of a control group."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

from ansor_mlflow.errors import UserInputError

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


_CPU_ROOT = Path("/sys/devices/system/cpu")
_own = threading.local()
_making_pool = threading.Lock()
"""Held while TVM makes a pool of threads, which reads the environment that all threads share."""


def available_cpus(cgroup_root: Path = CGROUP_ROOT, own_cgroup: Path = OWN_CGROUP) -> int:
    """The number of CPUs this process may use: its affinity mask, capped by the CPU quotas of its cgroups (v2 or v1).

    Args:
        cgroup_root: Where the cgroup file system is mounted.
        own_cgroup: File that names the cgroups of this process.
    """
    cpus, quota = len(os.sched_getaffinity(0)), cpu_quota(cgroup_root, own_cgroup)
    return cpus if quota is None else min(cpus, max(1, int(quota)))


def resolve_num_threads(num_threads: int | str) -> int:
    """The thread count to run kernels with; "auto" takes every CPU this process may use.

    Raises:
        UserInputError: More threads than CPUs are asked for, which would only measure the operating system's scheduler.
    """
    cpus = available_cpus()
    if num_threads == "auto":
        return cpus
    if int(num_threads) > cpus:
        raise UserInputError(
            f"num_threads={num_threads}, but this process may use {cpus} CPUs (affinity and cgroup quota); "
            f"give at most {cpus}, or auto"
        )
    return int(num_threads)


def set_num_threads(num_threads: int) -> int:
    """Makes TVM's kernels run on `num_threads` threads, in the calling thread and in threads started later.

    Left alone, TVM uses half of the CPUs on x86. Every thread that calls a kernel gets a pool of its own, which reads
    the environment when it is made and can shrink afterwards but not grow. Threads are not bound to CPUs: a bound
    pool of one thread would pin its caller, and every thread started from it, to one CPU.

    Returns:
        The number that holds in the calling thread; smaller than asked for when it ran kernels on fewer threads before.
    """
    import tvm

    with _making_pool:
        os.environ["TVM_NUM_THREADS"] = str(num_threads)
        os.environ["TVM_BIND_THREADS"] = "0"
        tvm.get_global_func("runtime.config_threadpool")(1, num_threads)
        _own.num_threads = int(tvm.get_global_func("runtime.NumThreads")())
        return int(_own.num_threads)


def has_num_threads(num_threads: int) -> bool:
    """Whether kernels run on so many threads in the calling thread; sets the number where it is another one.

    False where the thread has run kernels on fewer threads before; see `set_num_threads`.
    """
    return getattr(_own, "num_threads", None) == num_threads or set_num_threads(num_threads) == num_threads


def measuring_cpus(num_threads: int, cpu_root: Path = _CPU_ROOT, process: int | None = None) -> frozenset[int]:
    """The CPUs that kernels of so many threads are measured on, always the same ones.

    Threads of different cores are taken before a core's second thread, whose sibling would share its units. Where a
    process begins follows from its number, so that two tuners on a large host rarely meet.

    Args:
        num_threads: Threads of a kernel.
        cpu_root: Where Linux describes the CPUs.
        process: Number of the process; this one by default.
    """
    allowed = sorted(os.sched_getaffinity(0))
    first_of_core = {_siblings(cpu, cpu_root): cpu for cpu in reversed(allowed)}.values()
    by_core = [cpu for cpu in allowed if cpu in first_of_core]
    others = [cpu for cpu in allowed if cpu not in first_of_core]
    start = (os.getpid() if process is None else process) * num_threads % len(by_core)
    by_core = by_core[start:] + by_core[:start]
    return frozenset([*by_core, *others][:num_threads])


def _siblings(cpu: int, cpu_root: Path) -> str:
    """The hardware threads of a CPU's core, such as "0,8"; the CPU alone where Linux does not say."""
    try:
        return (cpu_root / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)
