"""Checks of this machine: versions, a kernel that is compiled and run, CPU, threads, noise, memory and disk."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from mlflow.utils.conda import get_conda_bin_executable
from packaging.requirements import Requirement

from ansor_mlflow.device import Device
from ansor_mlflow.errors import AnsorMlflowError, one_line
from ansor_mlflow.measuring import probe_noise
from ansor_mlflow.model import require_linker
from ansor_mlflow.plugins import distribution_of

_KERNEL = """
import sys
import tempfile

step = "import"
try:
    import ansor_mlflow.workers.preload
    import numpy as np
    import tvm
    from ansor_mlflow.device import Device, import_tensor_intrin
    from ansor_mlflow.errors import AnsorMlflowError
    from tvm import te
    from tvm.s_tir.meta_schedule import TuneContext
    from tvm.s_tir.meta_schedule.cost_model import XGBModel

    try:
        device = Device.resolve(sys.argv[1], 1)
        device.require_measurable_here()
    except AnsorMlflowError:
        sys.exit(77)
    import_tensor_intrin(device.platform.kind)
    a = te.placeholder((64,), name="a")
    b = te.compute((64,), lambda i: a[i] + a[i], name="b")
    mod = tvm.IRModule({"main": te.create_prim_func([a, b])})
    XGBModel()
    TuneContext(mod=mod, target=device.target, space_generator="post-order-apply", search_strategy="evolutionary")
    step = "compile"
    schedule = tvm.s_tir.Schedule(mod)
    if device.platform.binds_threads:
        schedule.bind(schedule.get_loops("b")[0], "threadIdx.x")
    compiled = tvm.compile(schedule.mod, device.target)
    with tempfile.TemporaryDirectory() as folder:
        step = "link"
        compiled.export_library(folder + "/kernel.so")
        step = "load"
        kernel = tvm.runtime.load_module(folder + "/kernel.so")
    step = "run"
    where = tvm.device(device.platform.name)
    data, result = np.arange(64, dtype="float32"), tvm.runtime.empty((64,), "float32", where)
    kernel["main"](tvm.runtime.tensor(data, where), result)
    np.testing.assert_array_equal(result.numpy(), 2 * data)
except Exception as err:
    sys.exit(f"{step} {type(err).__name__}: {' '.join(str(err).split())[:300]}")
"""
"""Does with a small kernel what a tuning does with all of them. Argument: the target."""
_ELSEWHERE = 77
"""Exit code of the above for a target that this host cannot run."""
_REINSTALL = "reinstall what the line `versions` names, or install this package in a new environment"
_FIXES = {
    "link": "install g++ (Debian: apt install g++ binutils), or set CXX to a C++ compiler that links",
    "load": "set TMPDIR to a directory that is not mounted noexec",
}
_MAX_QUIET, _MAX_USABLE = 0.1, 1.0
"""Spreads of the probe's times up to which the machine is quiet, and up to which measurements mean something."""
_PROBE_S = 1.0
_LEAST_MEMORY_MIB = 1024
"""What the tuner itself takes, with TVM and XGBoost."""
_LEAST_DISK_BYTES, _ENOUGH_DISK_BYTES = 2**28, 2**31
_FAST_INSTRUCTIONS = {"avx2", "avx512f", "fma", "sve", "dotprod"}
"""LLVM's names of instruction sets without which kernels take several times as long."""


@dataclass(frozen=True)
class Check:
    """What was found about one thing."""

    status: Literal["green", "yellow", "red"]
    """Green is fine; with yellow a tuning works, but is slow or less exact, or something could not be looked at; with
    red it fails, or its numbers mean nothing."""
    message: str
    fix: str = ""
    name: str = ""

    def __str__(self) -> str:
        return f"{self.name:<17}{self.message}{f'; {self.fix}' if self.fix else ''}"


def failed(err: Exception) -> Check:
    """A check that ended with an error; one of ours has the fix as the last clause of its message."""
    if not isinstance(err, AnsorMlflowError):
        return Check("red", f"{type(err).__name__}: {one_line(err)}", "look for the cause in docs/errors.md")
    message, _, fix = str(err).rpartition("; ")
    return Check("red", message or str(err), fix if message else "look for the cause in docs/errors.md")


def check_versions(distribution: str = "ansor_mlflow") -> Check:
    """Compares packages with what the installed distribution asks for, and of its extras with what is installed."""
    if not _version(distribution):
        return Check("yellow", f"{distribution} is not installed, so that nothing says its pins", "pip install .")
    needs = list(map(Requirement, importlib.metadata.requires(distribution) or ()))
    needs = [need for need in needs if _version(need.name) or not need.marker or need.marker.evaluate({"extra": ""})]
    wrong = [need for need in needs if not need.specifier.contains(_version(need.name) or "0", prereleases=True)]
    if wrong:
        packages = (f"{need.name} {_version(need.name) or 'is missing'}, not {need.specifier}" for need in wrong)
        commands = " ".join(f"'{need.name}{need.specifier}'" for need in wrong)
        return Check("red", ", ".join(packages), f"pip install {commands}")
    versions = f"Python {platform.python_version()}, TVM {_version('apache-tvm')}, MLflow {_version('mlflow')}"
    return Check("green", f"{versions}; {len(needs)} packages fit the pins")


def _version(package: str) -> str:
    found = distribution_of(package)
    return found[1] if found else ""


def start_kernel(target: str) -> subprocess.Popen[str]:
    """Starts a process that compiles, links, loads and runs a kernel: versions that do not fit may end the process."""
    return subprocess.Popen(
        [sys.executable, "-c", _KERNEL, target],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "LC_ALL": "C"},
    )


def check_kernel(process: subprocess.Popen[str], timeout_s: float) -> Check | None:
    """Waits for the process of `start_kernel`; None where this host cannot run the target, as another check says."""
    with process:
        try:
            _, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            fix = "try again when the machine is quiet; if it never ends, reinstall TVM"
            return Check("yellow", f"compiling and running one did not end within {timeout_s:.0f} s", fix)
    if process.returncode == _ELSEWHERE:
        return None
    require_linker()
    if process.returncode < 0:
        ended = signal.Signals(-process.returncode).name
        return Check("red", f"TVM ended with {ended}: it and apache-tvm-ffi do not fit", _REINSTALL)
    if process.returncode:
        step, _, reason = (stderr.strip().splitlines() or ["import"])[-1].partition(" ")
        return Check("red", f"the step {step!r} failed: {reason}", _FIXES.get(step, _REINSTALL))
    if shutil.which("ld") is None:  # a compiler may have one of its own, which takes longer for each trial
        return Check("yellow", "one was compiled and run, but ld is not in PATH", "apt install binutils")
    return Check("green", "one was compiled, linked, loaded and run; its result is right")


def check_target(target: str, num_threads: int) -> Check:
    """Compares the target with the instructions of this CPU; raises where this host cannot run what is made for it."""
    device = Device.resolve(target, num_threads)
    device.require_measurable_here()
    found = f"{device.description} on {device.fingerprint.cpu_model}"
    if not device.platform.by_llvm:
        return Check("green", found)
    has = set(Device.resolve("auto", num_threads).fingerprint.features)
    if unused := sorted(_FAST_INSTRUCTIONS & has - set(device.fingerprint.features)):
        fix = "use target=auto, or name the CPU with -mcpu"
        return Check("yellow", f"{found}: instructions that it has are left unused, {', '.join(unused)}", fix)
    return Check("green", found)


def check_threads(threads: int, quota: float | None) -> Check:
    """Compares the threads of kernels with the CPUs that affinity and the quota of the cgroup leave to this process."""
    by_affinity = len(os.sched_getaffinity(0))
    found = f"{threads} of the host's {os.cpu_count()} CPUs"
    if quota is not None:
        found += f" ({by_affinity} by affinity, {quota:.3g} by the cgroup's quota)"
    if threads > by_affinity:
        return Check("red", f"{found}, but this process may use {by_affinity}", f"give num_threads={by_affinity}")
    if quota is not None and quota < threads:
        message = f"{found}: kernels are stopped in the middle, and times mean nothing"
        return Check("red", message, "raise the quota to whole CPUs")
    return Check("green", found)


def check_noise(num_threads: int) -> Check:
    """Times a short fixed computation again and again: beside other programs it takes longer."""
    load, spread = os.getloadavg()[0], probe_noise(num_threads, _PROBE_S)
    found = f"a fixed computation takes up to {spread:.0%} longer than undisturbed, load average {load:.1f}"
    if spread < _MAX_QUIET:
        return Check("green", found)
    fix = "end what else runs here (see top), or tune when it is quiet"
    return Check("yellow" if spread < _MAX_USABLE else "red", found, fix)


def check_memory(num_threads: int, worker_memory_mib: int, in_cgroup: int | None) -> Check:
    """Compares the memory that is free with what as many workers as threads may take; `in_cgroup` is in bytes."""
    free = psutil.virtual_memory().available
    left = free if in_cgroup is None else min(free, in_cgroup)
    free_mib, where = left // 2**20, " in the cgroup" if left < free else ""
    found = f"{left / 2**30:.1f} GiB are free{where}"
    if free_mib < _LEAST_MEMORY_MIB:
        return Check("red", f"{found}; the tuner alone takes {_LEAST_MEMORY_MIB / 1024:.0f}", "free some")
    if free_mib < num_threads * worker_memory_mib:
        message = f"{found}, and each worker may take {worker_memory_mib} MiB, {num_threads} at a time"
        fix = f"free some, or give worker_memory_mib={max(512, free_mib // num_threads)}"
        return Check("yellow", message, fix)
    return Check("green", found)


def check_disk(directory: Path) -> Check:
    """Looks whether the directory, and the one of temporary files, can be written to, and have space."""
    least, found = 2**63, []
    for path in dict.fromkeys([directory.resolve(), Path(tempfile.gettempdir()).resolve()]):
        try:
            with tempfile.NamedTemporaryFile(dir=path, prefix=".ansor-doctor-") as file:
                file.write(bytes(4096))
                file.flush()
                os.fsync(file.fileno())
            free = shutil.disk_usage(path).free
        except OSError as err:
            return Check("red", f"{path} cannot be written to: {err.strerror}", "free it, or work in another one")
        least = min(least, free)
        found.append(f"{free / 2**30:.1f} GiB are free in {path}")
    if least >= _ENOUGH_DISK_BYTES:
        return Check("green", ", ".join(found))
    status: Literal["yellow", "red"] = "yellow" if least >= _LEAST_DISK_BYTES else "red"
    fix = "free some, as a long tuning of a large network takes 2 GiB, or work in another directory"
    return Check(status, ", ".join(found), fix)


def check_project(directory: Path) -> Check | None:
    """Looks whether `mlflow run` works without a flag in a project's directory: with Conda, its default."""
    if not (directory / "MLproject").is_file():
        return None
    conda = get_conda_bin_executable("conda")
    if shutil.which(conda):
        return Check("green", f"mlflow run . makes an environment with {conda}")
    found = "mlflow run . makes an environment with Conda, which is not here"
    return Check("yellow", found, "give it --env-manager local or uv")
