"""What runs in a session of our own RPC server: a program is measured there as it is on the tuning host.

The functions take and return JSON, since that is what TVM's RPC carries for every release of both sides. A server
without them, TVM's own, is served by `programs` with what every TVM runtime has.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from io import BytesIO
from pathlib import Path

import numpy as np

from ansor_mlflow.device import DeviceFingerprint, available_cpus, fingerprint, host_attributes, measuring_cpus
from ansor_mlflow.errors import MachineError, one_line
from ansor_mlflow.files import path_below, require_stored
from ansor_mlflow.foreign import read_json, typed
from ansor_mlflow.measuring import library_inference, measure_turn, time_probe, timed_call
from ansor_mlflow.model import LibraryEntry, Manifest
from ansor_mlflow.processes import bound_process
from ansor_mlflow.tensors import Arrays
from ansor_mlflow.workers import MeasureSettings, RunJob, measure_program

DESCRIBE = "ansor_mlflow.fleet.describe_1"
MEASURE = "ansor_mlflow.fleet.measure_1"
RUN_NETWORK = "ansor_mlflow.fleet.run_network_1"
"""Names of the functions, with the version of what they take and return."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_IDLE_S = 0.2
"""Time without work after which the CPUs are probed again."""
_busy_until_s = [-math.inf]
"""When the last measurement of this process ended."""


@dataclass(frozen=True, kw_only=True)
class MeasureRequest:
    """A program to be measured in a session: what `MEASURE` takes, as JSON."""

    job: RunJob
    settings: MeasureSettings
    memory_bytes: int | None
    """Data memory that the session may take; None for no bound."""
    limit_s: float
    """Seconds after which the session ends itself."""


@dataclass(frozen=True)
class ServerDescription:
    """What a server runs on: what `DESCRIBE` returns, as JSON."""

    fingerprint: DeviceFingerprint
    """Fingerprint of its CPU, with every thread that it may use."""
    boot_id: str
    """Linux's name of the start of its machine."""

    @staticmethod
    def from_json(text: str) -> ServerDescription:
        """Reads what `DESCRIBE` returns."""
        try:
            return typed(ServerDescription, read_json(text))
        except ValueError as err:
            raise MachineError(f"a server describes itself wrongly ({one_line(err)}); look at it") from err

    @property
    def is_here(self) -> bool:
        """Whether the server runs on this machine."""
        return self.boot_id == _BOOT_ID.read_text().strip()


def write_arrays(examples: Sequence[Arrays], file: Path) -> None:
    """Writes the inputs, or outputs, of several calls to one .npz file."""
    named = {f"{number}/{name}": array for number, arrays in enumerate(examples) for name, array in arrays.items()}
    np.savez(file, allow_pickle=False, **named)


def read_arrays(file: Path | BytesIO) -> list[Arrays]:
    """Reads what `write_arrays` wrote; a ValueError where it is something else, or would unpack to more than it is."""
    with np.load(file, allow_pickle=False) as arrays:
        require_stored(arrays.zip, file.stat().st_size if isinstance(file, Path) else file.getbuffer().nbytes)
        keys = [key.partition("/") for key in arrays.files]
        if not {int(number) for number, _, _ in keys} <= set(range(len(keys))):  # each call has an array
            raise ValueError("it numbers calls that it has no arrays of")
        examples: list[Arrays] = [{} for _ in range(1 + max((int(number) for number, _, _ in keys), default=-1))]
        for number, _, name in keys:
            examples[int(number)][name] = arrays[f"{number}/{name}"]
    return examples


def register_functions() -> None:
    """Makes the functions known to the sessions of this process's server."""
    import tvm_ffi

    for name, function in ((DESCRIBE, _describe), (MEASURE, _measure), (RUN_NETWORK, _run_network)):
        tvm_ffi.register_global_func(name, function, override=True)


def _describe() -> str:
    import tvm

    target = tvm.target.Target(host_attributes())
    return json.dumps(asdict(ServerDescription(fingerprint(target, available_cpus()), _BOOT_ID.read_text().strip())))


def _measure(request: str) -> str:
    """Measures a program that was uploaded.

    A program that hangs or needs too much memory ends the session's process, and nothing else.
    """
    asked = typed(MeasureRequest, read_json(request))
    job = replace(asked.job, path=_uploaded(str(asked.job.path)))
    num_threads = asked.settings.num_threads
    _bound(asked.memory_bytes, num_threads)
    # after a while without work, as `LocalRunner` does, which also wakes the CPUs up
    probe = time_probe(num_threads) if time.monotonic() - _busy_until_s[0] > _IDLE_S else None
    signal.setitimer(signal.ITIMER_REAL, asked.limit_s)
    try:
        run_s, waited = measure_program((job, asked.settings))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        _busy_until_s[0] = time.monotonic()
    return json.dumps({"run_s": run_s, "waited": waited, "probe": probe and asdict(probe)})


def _run_network(request: str) -> str:
    """Runs a network that was uploaded, as its users do: writes the outputs, or times calls."""
    asked = read_json(request)
    network, entry = Manifest.from_dict(asked["network"]), typed(LibraryEntry, asked["entry"])
    run = library_inference(_uploaded(asked["library"]), network, entry)
    examples = read_arrays(_uploaded(asked["inputs"]))
    if asked["measure_s"] is None:
        write_arrays([run(inputs) for inputs in examples], _uploaded(asked["outputs"]))
        return json.dumps({"samples_s": [], "waited": 0.0})
    samples_s, waited = measure_turn(lambda: timed_call(lambda: run, examples), asked["measure_s"])
    return json.dumps({"samples_s": samples_s, "waited": waited})


def _uploaded(name: str) -> Path:
    return path_below(Path.cwd(), name)  # nothing outside of the session's own directory


@cache
def _bound(memory_bytes: int | None, num_threads: int) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a handler in Python would not be called while a kernel loops
    bound_process(memory_bytes)
    os.sched_setaffinity(0, measuring_cpus(num_threads))
