"""Other runtimes for the parts of a network that TVM does not compute: ONNX Runtime, and OpenVINO."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ansor_mlflow.device import HugePages
from ansor_mlflow.errors import MachineError, ModelError, first_line
from ansor_mlflow.model.parts import RUNTIME_TITLES, PartEntry, has_library

Array = npt.NDArray[Any]
_OPENVINO_WHERE = re.compile(r"(Exception from|Check '[^']*' failed at) \S+:\d+:\s*")
"""The lines of C++ that an error of OpenVINO's has passed, which come before what it says."""


class Session(Protocol):
    """A part of a network in another runtime than TVM; safe to call from several threads."""

    def run(self, output_names: Sequence[str], input_feed: Mapping[str, Array]) -> list[Array]:
        """Computes outputs, which belong to the caller, in the order of their names."""


class OpenVinoSession:
    """A network in OpenVINO, for the latency of one call, in its own types or those that OpenVINO prefers."""

    def __init__(self, network: Path, num_threads: int, *, is_exact: bool = True) -> None:
        import openvino

        config: dict[str, Any] = {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,
            "INFERENCE_NUM_THREADS": num_threads,
            # where the CPU has instructions for bfloat16, OpenVINO takes that for float32 by default
            "EXECUTION_MODE_HINT": "ACCURACY" if is_exact else "PERFORMANCE",
        }
        try:
            self._compiled = openvino.Core().compile_model(str(network), "CPU", config)
        except RuntimeError as err:
            raise RuntimeError(_OPENVINO_WHERE.sub("", str(err))) from err
        self._places = {name: place for place, output in enumerate(self._compiled.outputs) for name in output.names}
        self._of_thread = threading.local()  # a request serves one thread

    def run(self, output_names: Sequence[str], input_feed: Mapping[str, Array]) -> list[Array]:
        """See `Session.run`."""
        found = self.views(input_feed)
        return [np.array(found[self._places[name]]) for name in output_names]

    def views(self, input_feed: Mapping[str, Array]) -> Any:
        """The outputs by their numbers; this thread's next call overwrites them."""
        request = getattr(self._of_thread, "request", None)
        if request is None:
            request = self._of_thread.request = self._compiled.create_infer_request()
        return request.infer(dict(input_feed), share_inputs=True)


def open_sessions(
    directory: Path, parts: Sequence[PartEntry], num_threads: int, *, may_spin: bool | None = None
) -> dict[str, Session]:
    """Loads what TVM does not compute, by the names of the parts.

    Their threads may spin while they wait, by default where there are none of TVM's, which need the CPUs.
    """
    may_spin = not has_library(parts) if may_spin is None else may_spin
    return {
        part.name: _open(directory / part.name, part.runs_in, num_threads, may_spin=may_spin)
        for part in parts
        if part.runs_in != "tvm"
    }


def _open(network: Path, runtime: str, num_threads: int, *, may_spin: bool) -> Session:
    title, version = RUNTIME_TITLES[runtime], "which is not installed"
    try:
        if runtime == "openvino":
            import openvino

            version = openvino.__version__
            return OpenVinoSession(network, num_threads)
        import onnxruntime

        version = onnxruntime.__version__
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        if not may_spin:
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session: Session = onnxruntime.InferenceSession(str(network), options, providers=["CPUExecutionProvider"])
        return session
    except ImportError as err:
        raise MachineError(f"a part of this network runs in {title}, {version}; pip install {runtime}") from err
    except Exception as err:  # ONNX Runtime has an error class for each of its status codes, without a common base
        raise ModelError(
            f"{network}: {title} {version} cannot load a part ({first_line(err)}); install the version that the model "
            "asks for"
        ) from err


class Sessions:
    """Other runtimes in the place of a library, for networks that they compute faster; safe to call from any number of
    threads.
    """

    huge_pages = HugePages()  # its memory is the runtimes' own

    def __init__(self, directory: Path, parts: Sequence[PartEntry], num_threads: int) -> None:
        sessions = open_sessions(directory, parts, num_threads)
        self._parts = [(sessions[part.name].run, part.outputs, part.inputs) for part in parts]  # one for each size
        # `Session.run` of a network of one size, where it refuses other types and shapes: OpenVINO converts them.
        self.whole = self._parts[0][0] if [part.runs_in for part in parts] == ["onnxruntime"] else None

    def run(self, arrays: Sequence[Array], size: int = 0) -> list[Array]:
        """See `VirtualMachines.run`."""
        run, outputs, inputs = self._parts[size]
        return run(outputs, dict(zip(inputs, arrays, strict=True)))

    def seconds_of_parts(self, arrays: Sequence[Array], size: int = 0) -> list[float]:
        """See `VirtualMachines.seconds_of_parts`."""
        started = time.perf_counter()
        self.run(arrays, size)
        return [time.perf_counter() - started]

    def seconds_of_kernels(self, arrays: Sequence[Array], size: int = 0) -> list[tuple[str, float]]:
        """None: the kernels of other runtimes are not those of a library."""
        del arrays, size
        return []
