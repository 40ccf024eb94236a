"""A program whose results and whose time are known, by which servers are checked and compared."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from ansor_mlflow.errors import MachineError
from ansor_mlflow.fleet.session import ServerSession, this_connection
from ansor_mlflow.workers import Builder

_RUN_S = 30.0
"""Time to upload and run it."""
_MAX_REL_ERROR = 1e-5
_NUM_ELEMENTS = 4096
_NUM_STEPS = 256
_PROGRAM = f"""
@I.ir_module
class Module:
    @T.prim_func(s_tir=True)
    def main(data: T.Buffer(({_NUM_ELEMENTS},), "float32"), result: T.Buffer(({_NUM_ELEMENTS},), "float32")):
        T.func_attr({{"global_symbol": "main", "tirx.noalias": True}})
        for i in T.serial({_NUM_ELEMENTS}):
            with T.sblock("first"):
                v_i = T.axis.spatial({_NUM_ELEMENTS}, i)
                result[v_i] = data[v_i]
        for step, i in T.grid({_NUM_STEPS}, {_NUM_ELEMENTS}):
            with T.sblock("next"):
                v_step, v_i = T.axis.remap("RS", [step, i])
                result[v_i] = result[v_i] * T.float32(0.5) + data[v_i]
"""


@dataclass(frozen=True)
class ReferenceKernel:
    """The program, built for a device: it halves and adds, a million times, in the first cache of a core."""

    path: Path
    """Its library."""
    num_calls: int = 20
    """Calls whose median counts."""
    upload_bytes: int = 0
    """Bytes that are uploaded at least, to time it."""


@dataclass(frozen=True)
class ReferenceTimes:
    """How long a server took for the program."""

    calls_s: tuple[float, ...]
    upload_s: float
    """Seconds to upload `upload_bytes`."""
    upload_bytes: int

    @property
    def median_s(self) -> float:
        """Median of the calls."""
        return median(self.calls_s)


def build_reference_kernel(builder: Builder, *, num_calls: int = 20, upload_bytes: int = 0) -> ReferenceKernel:
    """Builds the program, as candidates are built.

    Raises:
        MachineError: It cannot be built: the target has no compiler here.
    """
    import tvm

    (outcome,) = builder.build([tvm.script.from_source(_PROGRAM)])
    if outcome.value is None:
        raise MachineError(f"no program can be built for the fleet: {outcome.error}")
    return ReferenceKernel(outcome.value, num_calls, upload_bytes)


def run_reference_kernel(session: ServerSession, kernel: ReferenceKernel) -> ReferenceTimes:
    """Runs the program on a server.

    Raises:
        MachineError: It cannot be run there, or computes something else.
    """
    ran = session.call(_run, kernel, _RUN_S)
    if ran.value is None:
        raise MachineError(f"a known program cannot be run: {ran.error}")
    times, max_rel_error = ran.value
    if not max_rel_error <= _MAX_REL_ERROR:
        raise MachineError(f"it computes wrong results, max_rel_error={max_rel_error:.2g} of a known program")
    return times


def _run(kernel: ReferenceKernel) -> tuple[ReferenceTimes, float]:
    """The times, and the largest error; in the process of the session."""
    import tvm

    session = this_connection().session
    blob = bytearray(kernel.path.read_bytes())
    blob += bytes(max(0, kernel.upload_bytes - len(blob)))  # zeros after the end of a library do no harm
    started_s = time.perf_counter()
    session.upload(blob, kernel.path.name)
    upload_s = time.perf_counter() - started_s
    module, device = session.load_module(kernel.path.name), session.cpu(0)
    session.remove(kernel.path.name)  # the next upload must not write into a library that is in use
    data = np.linspace(-1, 1, _NUM_ELEMENTS, dtype=np.float32)
    expected = data.copy()
    for _ in range(_NUM_STEPS):
        expected = expected * np.float32(0.5) + data
    given, found = tvm.runtime.tensor(data, device), tvm.runtime.tensor(np.zeros_like(data), device)
    module["main"](given, found)
    error = np.abs(found.numpy() - expected).max() / np.abs(expected).max()
    timer = module.time_evaluator("main", device, number=1, repeat=kernel.num_calls)
    calls_s = tuple(float(seconds) for seconds in timer(given, found).results)
    return ReferenceTimes(calls_s, upload_s, len(blob)), float(error)
