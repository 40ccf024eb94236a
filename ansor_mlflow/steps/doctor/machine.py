"""Checks of this machine: compiler, CPU, threads, noise, memory and disk."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import psutil

from ansor_mlflow.device import Device, is_cpu
from ansor_mlflow.errors import first_line
from ansor_mlflow.files import scratch_directory
from ansor_mlflow.measuring import probe_noise
from ansor_mlflow.model import require_linker
from ansor_mlflow.steps.doctor.checks import Check

_SOURCE = 'extern "C" int answer(void) { return 42; }\n'
_COMPILER_TIMEOUT_S = 10.0
_MAX_QUIET, _MAX_USABLE = 0.1, 1.0
"""Spreads of the probe's times up to which the machine is quiet, and up to which measurements mean something."""
_PROBE_S = 1.0
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_LEAST_MEMORY_MIB = 1024
"""What the tuner itself takes, with TVM and XGBoost."""
_LEAST_DISK_BYTES, _ENOUGH_DISK_BYTES = 2**28, 2**31
_FAST_INSTRUCTIONS = {"avx2", "avx512f", "fma", "sve", "dotprod"}
"""LLVM's names of instruction sets without which kernels take several times as long."""
_THREAD_VARIABLES = ("TVM_NUM_THREADS", "OMP_NUM_THREADS")


def check_compiler() -> Check:
    """Compiles and links a shared library as TVM links its own, and loads it from the temporary directory.

    Raises:
        MachineError: There is no compiler.
    """
    name = "compiler"
    require_linker()
    from tvm.support import cc

    compiler = cc.get_cc()
    with scratch_directory() as directory:
        source, library = Path(directory, "answer.cc"), Path(directory, "answer.so")
        source.write_text(_SOURCE)
        command = [compiler, "-shared", "-fPIC", "-x", "c++", "-o", str(library), str(source)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_COMPILER_TIMEOUT_S, check=False, env=_english()
            )
        except (OSError, subprocess.TimeoutExpired) as err:
            return Check.of_error(name, err, "set CXX to a C++ compiler, or unset it")
        if done.returncode:
            reason = next(iter(done.stderr.strip().splitlines()), f"exit code {done.returncode}")
            return Check.red(name, f"{compiler} links no library: {reason}", "apt install g++, or set CXX to another")
        try:
            ctypes.CDLL(str(library))
        except OSError as err:
            return Check.red(
                name,
                f"a library that {compiler} linked cannot be loaded: {first_line(err)}",
                f"set TMPDIR to a directory that is not mounted noexec; it is {tempfile.gettempdir()}",
            )
    if shutil.which("ld") is None:
        return Check.yellow(
            name, f"{compiler} links, but ld is not in PATH: each trial takes longer to link", "apt install binutils"
        )
    return Check.green(name, f"{compiler} links a library that loads, ld links those of trials")


def _english() -> dict[str, str]:
    return {**os.environ, "LC_ALL": "C"}


def check_target(target: str, num_threads: int) -> Check:
    """Compares the target with the instructions of this CPU.

    Raises:
        UserInputError: TVM knows no such target.
        MachineError: This host cannot run what is compiled for it.
    """
    name = "target"
    device = Device.resolve(target, num_threads)
    device.require_measurable_here()
    found = f"{device.description} on {device.fingerprint.cpu_model}"
    if not is_cpu(device.target):
        return Check.green(name, found)
    has = set(Device.resolve("auto", num_threads).fingerprint.features)
    if unused := sorted(_FAST_INSTRUCTIONS & has - set(device.fingerprint.features)):
        fix = "use target=auto, or name the CPU with -mcpu"
        return Check.yellow(name, f"{found}: instructions that it has are left unused, {', '.join(unused)}", fix)
    return Check.green(name, found)


def check_threads(threads: int, quota: float | None) -> Check:
    """Compares the threads of kernels with the CPUs that this process may use, and with what the environment says.

    Args:
        threads: Threads of a kernel.
        quota: CPUs that the cgroup grants; None for no limit.
    """
    name = "threads"
    by_affinity = len(os.sched_getaffinity(0))
    found = f"{threads} of the host's {os.cpu_count()} CPUs"
    if quota is not None:
        found += f" ({by_affinity} by affinity, {quota:.3g} by the cgroup's quota)"
    if threads > by_affinity:
        return Check.red(name, f"{found}, but this process may use {by_affinity}", f"give num_threads={by_affinity}")
    if quota is not None and quota < threads:
        return Check.red(
            name, f"{found}: kernels are stopped in the middle, and times mean nothing", "raise the quota to whole CPUs"
        )
    if quota is not None and quota < by_affinity and not quota.is_integer():
        return Check.yellow(name, f"{found}: a part of a CPU is of no use", "give whole CPUs, best with a cpuset")
    number = str(threads)
    given = [f"{var}={value}" for var in _THREAD_VARIABLES if (value := os.environ.get(var, number)) != number]
    return Check.green(name, found + (f"; {', '.join(given)} is set, but num_threads decides" if given else ""))


def check_noise(num_threads: int) -> Check:
    """Times a short fixed computation again and again: beside other programs it takes longer."""
    name = "noise"
    load = os.getloadavg()[0]
    spread = probe_noise(num_threads, _PROBE_S)
    found = f"a fixed computation takes up to {spread:.0%} longer than undisturbed, load average {load:.1f}"
    if spread < _MAX_QUIET:
        return Check.green(name, found)
    fix = "end what else runs here (see top), or tune when it is quiet"
    return (Check.yellow if spread < _MAX_USABLE else Check.red)(name, found, fix)


def check_huge_pages(path: Path = _HUGE_PAGES) -> Check | None:
    """Looks whether Linux may back large arrays with huge pages; None where it does not say."""
    name = "huge pages"
    try:
        text = path.read_text()
    except OSError:
        return None
    setting = text.partition("[")[2].partition("]")[0]
    if setting == "never":
        fix = f"as root: echo madvise > {path}"
        return Check.yellow(name, "transparent huge pages are off: large arrays are slower to reach", fix)
    return Check.green(name, f"transparent huge pages: {setting}")


def check_memory(num_threads: int, worker_memory_mib: int, in_cgroup: int | None) -> Check:
    """Compares the memory that is free with what the workers may take at a time.

    Args:
        num_threads: Threads of a kernel, and workers that build.
        worker_memory_mib: What each may take, in MiB.
        in_cgroup: Bytes that the cgroup has left; None for no limit.
    """
    name = "memory"
    free = psutil.virtual_memory().available
    free_mib = min(free, free if in_cgroup is None else in_cgroup) // 2**20
    where = " in the cgroup" if in_cgroup is not None and in_cgroup < free else ""
    found = f"{free_mib / 1024:.1f} GiB are free{where}"
    wanted_mib = num_threads * worker_memory_mib
    if free_mib < _LEAST_MEMORY_MIB:
        return Check.red(name, f"{found}; the tuner alone takes {_LEAST_MEMORY_MIB / 1024:.0f}", "free some")
    if free_mib < wanted_mib:
        least = max(512, free_mib // num_threads)
        return Check.yellow(
            name,
            f"{found}, and each worker may take {worker_memory_mib} MiB, {num_threads} at a time",
            f"free some, or give worker_memory_mib={least}",
        )
    return Check.green(name, found)


def check_disk(directory: Path, name: str) -> Check:
    """Writes a file in a directory, and looks how much more there is space for."""
    directory = directory.resolve()
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".ansor-doctor-") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(directory).free
    except OSError as err:
        return Check.red(name, f"{directory} cannot be written to: {err.strerror}", "free it, or work in another one")
    found = f"{free / 2**30:.1f} GiB are free in {directory}"
    if free < _LEAST_DISK_BYTES:
        return Check.red(name, found, "free some, or work in another directory")
    if free < _ENOUGH_DISK_BYTES:
        return Check.yellow(name, f"{found}; a long tuning of a large network takes more", "free some")
    return Check.green(name, found)


def check_temporary_directory() -> Check:
    """Does what `check_disk` does where workers keep libraries; a TMPDIR that cannot be used is passed over."""
    name, used = "temporary files", tempfile.gettempdir()
    given = os.environ.get("TMPDIR")
    if given and not Path(given).is_dir():
        return Check.yellow(
            name, f"TMPDIR={given} is no directory; {used} is taken", "make it, or set TMPDIR to another"
        )
    if given and not Path(used).samefile(given):
        return Check.yellow(
            name, f"TMPDIR={given} cannot be written to; {used} is taken", "free it, or set TMPDIR to another"
        )
    return check_disk(Path(used), name)
