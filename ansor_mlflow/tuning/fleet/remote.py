"""What runs in a session of our own RPC server: a program is measured there as it is on the tuning host.

The functions take and return JSON, since that is what TVM's RPC carries for every release of both sides. A server
without them, TVM's own, is served by `session` with what every TVM runtime has.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ansor_mlflow.device import DeviceFingerprint, available_cpus, fingerprint, measuring_cpus
from ansor_mlflow.measuring import ProbeTime, time_probe
from ansor_mlflow.tuning.workers.pool import bound_process
from ansor_mlflow.tuning.workers.surroundings import RestOfNetwork
from ansor_mlflow.tuning.workers.timing import MeasureSettings, RunJob, measure_program

_IDLE_S = 0.2
_busy_until_s = [-math.inf]
"""When the last measurement of this process ended."""
DESCRIBE = "ansor_mlflow.fleet.describe_1"
MEASURE = "ansor_mlflow.fleet.measure_1"
"""Names of the functions, with the version of what they take and return."""


def measure_request(name: str, job: RunJob, settings: MeasureSettings, memory_bytes: int | None, limit_s: float) -> str:
    """What `MEASURE` takes.

    Args:
        name: The library's file, as it was uploaded.
        job: What is measured.
        settings: How it is measured.
        memory_bytes: Data memory that the session may take; None for no bound.
        limit_s: Seconds after which the session ends itself.
    """
    return json.dumps(
        {
            "job": {**asdict(job), "path": name},
            "settings": asdict(settings),
            "memory_bytes": memory_bytes,
            "limit_s": limit_s,
        }
    )


def register_functions() -> None:
    """Makes the functions known to the sessions of this process's server."""
    import tvm_ffi

    functions: dict[str, Callable[..., str]] = {DESCRIBE: _describe, MEASURE: _measure}
    for name, function in functions.items():
        tvm_ffi.register_global_func(name, function, override=True)


@dataclass(frozen=True)
class ServerDescription:
    """What a server runs on."""

    fingerprint: DeviceFingerprint
    """Of its CPU, with every thread that it may use."""
    boot_id: str
    """Of the start of its machine: see `boot_id`."""

    @staticmethod
    def from_json(text: str) -> ServerDescription:
        """Reads what `DESCRIBE` returns."""
        fields = json.loads(text)
        return ServerDescription(DeviceFingerprint.from_dict(fields["fingerprint"]), str(fields["boot_id"]))

    @property
    def is_here(self) -> bool:
        """Whether the server runs on this machine."""
        return self.boot_id == boot_id()


def boot_id() -> str:
    """Linux's name of this start of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _describe() -> str:
    """What the server runs on: see `ServerDescription`."""
    import tvm

    cpu = str(tvm.get_global_func("target.llvm_get_system_cpu")())
    num_cpus = available_cpus()
    target = tvm.target.Target({"kind": "llvm", "mcpu": cpu})
    return json.dumps(asdict(ServerDescription(fingerprint(target, num_cpus), boot_id())))


def _measure(request: str) -> str:
    """Measures a program that was uploaded.

    A program that hangs or needs too much memory ends the session's process, and nothing else.
    """
    asked = json.loads(request)
    job, settings = _job_of(asked["job"]), _settings_of(asked["settings"])
    _bound(asked["memory_bytes"], settings.num_threads)
    probe = _probe(settings.num_threads)
    signal.setitimer(signal.ITIMER_REAL, asked["limit_s"])
    try:
        run_s, waited = measure_program((job, settings))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        _busy_until_s[0] = time.monotonic()
    return json.dumps({"run_s": run_s, "waited": waited, "probe": None if probe is None else asdict(probe)})


def _probe(num_threads: int) -> ProbeTime | None:
    """Probes the CPUs after a while without work, as `LocalRunner` does, which also wakes them up."""
    is_idle = time.monotonic() - _busy_until_s[0] > _IDLE_S
    return time_probe(num_threads) if is_idle else None


@cache
def _bound(memory_bytes: int | None, num_threads: int) -> None:
    """Sets the bounds of this process, once."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a handler in Python would not be called while a kernel loops
    bound_process(memory_bytes)
    os.sched_setaffinity(0, measuring_cpus(num_threads))


def _job_of(fields: Mapping[str, Any]) -> RunJob:
    args_info = tuple((kind, dtype, tuple(shape)) for kind, dtype, shape in fields["args_info"])
    path = Path.cwd() / Path(fields["path"]).name  # nothing outside of the session's own directory
    return RunJob(**{**fields, "path": path, "args_info": args_info, "constants": tuple(fields["constants"])})


def _settings_of(fields: Mapping[str, Any]) -> MeasureSettings:
    rest = fields["rest"]
    return MeasureSettings(**{**fields, "rest": None if rest is None else RestOfNetwork(**rest)})
