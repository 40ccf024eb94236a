"""What is run in a session: programs of tasks, whole networks, and the reference kernel.

On our own servers the functions of `remote` do it, on TVM's what every TVM runtime has.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ansor_mlflow.errors import MachineError
from ansor_mlflow.files import scratch_directory
from ansor_mlflow.fleet.remote import MEASURE, RUN_NETWORK, MeasureRequest, read_arrays, write_arrays
from ansor_mlflow.fleet.session import ServerSession, this_connection
from ansor_mlflow.foreign import typed
from ansor_mlflow.measuring import ProbeTime
from ansor_mlflow.model import LibraryEntry, Manifest
from ansor_mlflow.processes import Outcome
from ansor_mlflow.records import is_time
from ansor_mlflow.tensors import Arrays, all_sizes
from ansor_mlflow.workers import Builder, random_tensor

_FASTEST_S = 1e-8
"""Calls that are said to be shorter are repeated as often as if they took this long."""
_MIN_CALLS, _MAX_CALLS = 10, 1000
_INPUTS, _OUTPUTS = "inputs.npz", "outputs.npz"
_RUN_S = 30.0
"""Time to upload and run the reference kernel."""
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


# -- programs of tasks -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeasuredProgram:
    """What a server said of a program."""

    run_s: tuple[float, ...]
    """Seconds per call."""
    waited: float = 0.0
    """Share of the time that other programs took, where the server knows it."""
    probe: ProbeTime | None = None
    """Time of the probe of the server's CPUs, where it probed them before."""


def measure_in_session(work: MeasureRequest) -> Outcome[MeasuredProgram]:
    """Measures a program in the session of this process. It `crashed` where nobody knows what became of it: the session
    ended, or the times are none.
    """
    from tvm.error import RPCError

    connection = this_connection()
    try:
        with connection.uploaded([work.job.path]):
            if MEASURE in connection.functions:
                request = asdict(replace(work, job=replace(work.job, path=Path(work.job.path.name))))
                del request["settings"]["platform"]  # it is a CPU
                found = typed(MeasuredProgram, connection.ask(MEASURE, request))
            else:
                found = MeasuredProgram(_measured_by_tvm(connection.session, work))
        if found.probe and not (is_time(found.probe.elapsed_s) and is_time(found.probe.cpu_s)):
            raise ValueError(f"it says that a probe took {found.probe}")
    except RPCError as err:  # the server lives and says so
        return Outcome(failure="failed", error=_without_stack(err))
    except Exception as err:  # noqa: BLE001 - TVM has no kind of its own for a connection that is gone
        return Outcome(failure="crashed", error=f"the session ended ({_without_stack(err)})")
    if not found.run_s or not all(map(is_time, found.run_s)):
        said = ", ".join(f"{seconds:g} s" for seconds in found.run_s[:5]) or "no time"
        return Outcome(failure="crashed", error=f"it says that a call takes {said}")
    return Outcome(found)


def _without_stack(err: Exception) -> str:
    """What an error says; TVM puts the caller's stack behind it."""
    text = str(err).removeprefix("RPCError: ").removeprefix("Error caught from RPC call:").strip()
    return text.partition("\n")[0] or type(err).__name__


def _measured_by_tvm(session: Any, work: MeasureRequest) -> tuple[float, ...]:
    """Measures with what every TVM runtime has. As the network runs them: with all but the first input cold."""
    settings, device = work.settings, session.cpu(0)
    session.get_function("runtime.config_threadpool")(1, settings.num_threads)
    module = session.load_module(work.job.path.name)
    infos = work.job.args_info
    arguments = [random_tensor(dtype, shape, device, session.get_function) for _, dtype, shape in infos]
    is_cold = settings.cache_flush or settings.rest is not None

    def timed(number: int, repeat: int, min_repeat_ms: int) -> list[float]:
        timer = module.time_evaluator(
            "main",
            device,
            number=number,
            repeat=repeat,
            min_repeat_ms=min_repeat_ms,
            f_preproc="cache_flush_cpu_non_first_arg" if is_cold else "",
        )
        return [float(seconds) for seconds in timer(*arguments).results]

    if not is_cold:
        return tuple(timed(settings.number, settings.repeat, settings.min_repeat_ms))
    (first_s,) = timed(1, 1, 0)  # only the first of several calls would be cold
    num_calls = max(settings.number, math.ceil(settings.min_repeat_ms / 1e3 / max(first_s, _FASTEST_S)))
    return tuple(median(timed(1, min(num_calls, _MAX_CALLS), 0)) for _ in range(settings.repeat))


# -- networks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NetworkWork:
    """A network to be run in a session."""

    library: Path
    """On this host; what stays with ONNX Runtime lies beside it."""
    network: Manifest
    entry: LibraryEntry
    examples: tuple[Arrays, ...]
    """Its inputs; of a network that is timed, one of each of its sizes."""
    measure_s: float | None = None
    """For how many seconds it is timed; None for not at all."""


@dataclass(frozen=True)
class NetworkReply:
    """What a network did."""

    outputs: tuple[Arrays, ...] = ()
    """Outputs for each example, where it was not timed."""
    samples_s: tuple[float, ...] = ()
    """Seconds of single calls, where it was."""
    waited: float = 0.0
    """Share of the time that other programs took, where the server knows it."""


def run_network(session: ServerSession, work: NetworkWork) -> NetworkReply:
    """Runs a network on a server."""
    found = session.call(_run, work, session.fleet.session_s)
    if found.value is None:
        raise MachineError(
            f"server {session.server} did not run the network: {found.error}; look at it, or give a larger "
            f"rpc_session_s than {session.fleet.session_s:g}"
        )
    return found.value


def _run(work: NetworkWork) -> NetworkReply:
    connection = this_connection()
    if RUN_NETWORK not in connection.functions:
        return _run_by_tvm(connection.session, work)
    parts = sorted({part.name for part in work.entry.parts if part.runs_in != "tvm"})
    request = {
        "library": work.library.name,
        "network": work.network.to_dict(),
        "entry": asdict(work.entry),
        "inputs": _INPUTS,
        "outputs": _OUTPUTS,
        "measure_s": work.measure_s,
    }
    with scratch_directory() as scratch:
        inputs = Path(scratch, _INPUTS)
        write_arrays(work.examples, inputs)
        with connection.uploaded(list({work.library, inputs, *map(work.library.with_name, parts)})):
            found = connection.ask(RUN_NETWORK, request)
            if work.measure_s is not None:
                samples_s = typed(tuple[float, ...], found["samples_s"])
                if not samples_s or not all(map(is_time, samples_s)):
                    raise ValueError("it says that calls take times that none can take")
                return NetworkReply(samples_s=samples_s, waited=typed(float, found["waited"]))
            outputs = tuple(read_arrays(BytesIO(bytes(connection.session.download(_OUTPUTS)))))
    if len(outputs) != len(work.examples):
        raise ValueError(f"it answers {len(outputs)} calls, and {len(work.examples)} were asked for")
    if odd := {array.dtype for arrays in outputs for array in arrays.values() if array.dtype.kind not in "biuf"}:
        raise ValueError(f"it answers with {odd.pop()}, which are no numbers")
    return NetworkReply(outputs=outputs)


def _run_by_tvm(session: Any, work: NetworkWork) -> NetworkReply:
    """Runs a network in the virtual machine of every TVM runtime, which takes all of a network in one size."""
    import tvm
    from tvm import relax

    if work.entry.parts or work.network.sizes:
        raise MachineError(
            "it is one of TVM's own, and the network has several sizes, or parts in ONNX Runtime; start it with "
            "`ansor-mlflow fleet server`"
        )
    device = session.cpu(0)
    session.get_function("runtime.config_threadpool")(1, work.entry.fingerprint.num_threads)
    session.upload(str(work.library))
    machine = relax.VirtualMachine(session.load_module(work.library.name), device)
    session.remove(work.library.name)
    shapes = all_sizes(work.network)[0]

    def call(example: Arrays) -> Arrays:
        arrays = (np.ascontiguousarray(example[spec.name]) for spec in shapes.inputs)
        machine.set_input("main", *(tvm.runtime.tensor(array, device) for array in arrays))
        machine.invoke_stateful("main")
        found = machine.get_outputs("main")
        tensors = found if isinstance(found, tuple) else (found,)
        return {spec.name: tensor.numpy() for spec, tensor in zip(shapes.outputs, tensors, strict=True)}

    def timed(num_calls: int) -> tuple[float, ...]:
        timer = machine.time_evaluator("invoke_stateful", device, number=1, repeat=num_calls)
        return tuple(float(seconds) for seconds in timer("main").results)

    if work.measure_s is None:
        return NetworkReply(outputs=tuple(map(call, work.examples)))
    call(work.examples[0])  # it takes its memory
    (first_s,) = timed(1)
    return NetworkReply(samples_s=timed(min(_MAX_CALLS, max(_MIN_CALLS, int(work.measure_s / max(first_s, 1e-9))))))


# -- the reference kernel ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReferenceKernel:
    """A program whose results and whose time are known, by which servers are checked and compared.

    It halves and adds, a million times, in the first cache of a core.
    """

    path: Path
    """Its library."""
    num_calls: int = 20
    """Calls whose median counts."""
    upload_bytes: int = 0
    """Bytes that are uploaded at least, to time it."""


@dataclass(frozen=True)
class ReferenceTimes:
    """How long a server took for the reference kernel."""

    calls_s: tuple[float, ...]
    upload_s: float
    """Seconds to upload `upload_bytes`."""
    upload_bytes: int
    max_rel_error: float
    """Largest error of its results over the largest of them."""

    @property
    def median_s(self) -> float:
        return median(self.calls_s)


def build_reference_kernel(builder: Builder, *, num_calls: int = 20, upload_bytes: int = 0) -> ReferenceKernel:
    """Builds the reference kernel, as candidates are built."""
    import tvm

    (outcome,) = builder.build([tvm.script.from_source(_PROGRAM)])
    if outcome.value is None:
        raise MachineError(f"no program can be built for the fleet: {outcome.error}")
    return ReferenceKernel(outcome.value, num_calls, upload_bytes)


def run_reference_kernel(session: ServerSession, kernel: ReferenceKernel) -> ReferenceTimes:
    """Runs the reference kernel on a server."""
    ran = session.call(_run_reference_kernel, kernel, _RUN_S)
    if ran.value is None:
        raise MachineError(f"a known program cannot be run: {ran.error}")
    if not ran.value.max_rel_error <= _MAX_REL_ERROR:
        raise MachineError(f"it computes wrong results, max_rel_error={ran.value.max_rel_error:.2g} of a known program")
    return ran.value


def _run_reference_kernel(kernel: ReferenceKernel) -> ReferenceTimes:
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
    return ReferenceTimes(calls_s, upload_s, len(blob), float(error))
