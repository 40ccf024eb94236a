"""Whole networks on a server: what they compute there, and how long they take."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from ansor_mlflow.device import DeviceFingerprint
from ansor_mlflow.errors import MachineError
from ansor_mlflow.files import scratch_directory
from ansor_mlflow.foreign import read_json, typed
from ansor_mlflow.model import LibraryEntry, Manifest
from ansor_mlflow.records import is_time
from ansor_mlflow.tensors import Arrays, all_sizes
from ansor_mlflow.tuning.fleet.lookout import FleetSettings
from ansor_mlflow.tuning.fleet.remote import (
    RUN_NETWORK,
    ServerDescription,
    network_request,
    read_arrays,
    write_arrays,
)
from ansor_mlflow.tuning.fleet.session import Connection, connect_with_any, ready_pool, this_connection

_MIN_CALLS, _MAX_CALLS = 10, 1000
_INPUTS, _OUTPUTS = "inputs.npz", "outputs.npz"


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
    """Of each example, where it was not timed."""
    samples_s: tuple[float, ...] = ()
    """Seconds of single calls, where it was."""
    waited: float = 0.0
    """Share of the time that other programs took, where the server knows it."""


class NetworkServer:
    """A server of a key, taken for one session. To be closed.

    Args:
        fleet: Where it is.

    Raises:
        MachineError: No server is free for too long, or it does not answer.
    """

    def __init__(self, fleet: FleetSettings) -> None:
        self._session_s = fleet.session_s
        self._pool = ready_pool()
        self.device: DeviceFingerprint | None = None
        """What it runs on; None where it does not say: one of TVM's own."""
        try:
            self.address, description = connect_with_any(fleet, self._pool)
            if description:
                self.device = ServerDescription.from_json(description).fingerprint
        except BaseException:
            self.close()
            raise

    def run(self, work: NetworkWork) -> NetworkReply:
        """Runs a network.

        Raises:
            MachineError: The server is lost, or cannot run it.
        """
        (found,) = self._pool.map(_run, [work], self._session_s)
        if found.value is None:
            raise MachineError(
                f"server {self.address} did not run the network: {found.error}; look at it, or give a larger "
                f"rpc_session_s than {self._session_s:g}"
            )
        return found.value

    def close(self) -> None:
        """Ends the session."""
        self._pool.close()


def _run(work: NetworkWork) -> NetworkReply:
    """Runs a network in the session of this process."""
    connection = this_connection()
    run_network = connection.functions[RUN_NETWORK]
    if run_network is None:
        return _run_by_tvm(connection.session, work)
    parts = {part.name for part in work.entry.parts if part.runs_in == "onnxruntime"}
    with scratch_directory() as scratch:
        inputs = Path(scratch, _INPUTS)
        write_arrays(work.examples, inputs)
        with _uploaded(connection, [work.library, inputs, *(work.library.with_name(part) for part in sorted(parts))]):
            request = network_request(work.library.name, work.network, work.entry, _INPUTS, _OUTPUTS, work.measure_s)
            found = read_json(str(run_network(request)))
            if work.measure_s is not None:
                samples_s = typed(tuple[float, ...], found["samples_s"])
                if not samples_s or not all(map(is_time, samples_s)):
                    raise ValueError("it says that calls take times that none can take")
                return NetworkReply(samples_s=samples_s, waited=typed(float, found["waited"]))
            outputs = read_arrays(BytesIO(bytes(connection.session.download(_OUTPUTS))))
            if len(outputs) != len(work.examples):
                raise ValueError(f"it answers {len(outputs)} calls, and {len(work.examples)} were asked for")
            if odd := {
                array.dtype for arrays in outputs for array in arrays.values() if array.dtype.kind not in "biuf"
            }:
                raise ValueError(f"it answers with {odd.pop()}, which are no numbers")
            return NetworkReply(outputs=tuple(outputs))


@contextlib.contextmanager
def _uploaded(connection: Connection, files: Sequence[Path]) -> Iterator[None]:
    """Has files in the directory of the session; another file of a name does not overwrite one that is in use."""
    for file in files:
        connection.session.upload(str(file))
    try:
        yield
    finally:
        for file in files:
            connection.session.remove(file.name)


def _run_by_tvm(session: Any, work: NetworkWork) -> NetworkReply:
    """Runs a network with what every TVM runtime has: its virtual machine, for all of the network in one size.

    Raises:
        MachineError: The network is in parts.
    """
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
    inputs, outputs = (all_sizes(work.network)[0].inputs, all_sizes(work.network)[0].outputs)

    def give(example: Arrays) -> None:
        machine.set_input(
            "main", *(tvm.runtime.tensor(np.ascontiguousarray(example[spec.name]), device) for spec in inputs)
        )

    def call(example: Arrays) -> Arrays:
        give(example)
        machine.invoke_stateful("main")
        found = machine.get_outputs("main")
        tensors = found if isinstance(found, tuple) else (found,)
        return {spec.name: tensor.numpy() for spec, tensor in zip(outputs, tensors, strict=True)}

    if work.measure_s is None:
        return NetworkReply(outputs=tuple(map(call, work.examples)))
    give(work.examples[0])
    machine.invoke_stateful("main")  # it takes its memory
    (second_s,) = _timed(machine, device, 1)
    return NetworkReply(samples_s=_timed(machine, device, int(work.measure_s / max(second_s, 1e-9))))


def _timed(machine: Any, device: Any, num_calls: int) -> tuple[float, ...]:
    repeat = 1 if num_calls <= 1 else min(_MAX_CALLS, max(_MIN_CALLS, num_calls))
    timer = machine.time_evaluator("invoke_stateful", device, number=1, repeat=repeat)
    return tuple(float(seconds) for seconds in timer("main").results)
