"""TVM's virtual machines for a library: as many calls run at once as this process has CPUs for their threads."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ansor_mlflow.device import available_cpus, set_num_threads
from ansor_mlflow.errors import ModelError, first_line
from ansor_mlflow.tensors import TensorSpec

_ALIGNMENT_BYTES = 64
"""Alignment that generated code expects of its arguments (TVM's `kAllocAlignment`)."""
_ZERO_COPY_BYTES = 1 << 14
"""Size from which an array is wrapped; a smaller one is copied sooner."""
_EXPORTED_KINDS = "biuf"
"""NumPy's kinds of types that it shares through DLPack; not among them are those of ml_dtypes, such as bfloat16."""


class VirtualMachines:
    """Virtual machines that share a library and its weights; safe to call from any number of threads.

    Calls run in threads of the model's own, one machine each, and in the order in which they come: as many at once as
    the CPUs carry, since kernels that share a CPU slow each other down. TVM keeps a pool of workers for every thread
    that calls it, which would otherwise be as many as there are callers, and of the size of whichever model each of
    them called first.

    Args:
        library: The shared library, whose digest was checked.
        inputs: The network's inputs, in the order of the function's parameters.
        num_threads: Threads of a kernel.
        device: Name of the device: cpu or cuda.

    Raises:
        ModelError: TVM cannot load the library.
    """

    def __init__(self, library: Path, inputs: Sequence[TensorSpec], num_threads: int, device: str) -> None:
        import tvm

        self._num_threads = num_threads
        self._own = threading.local()
        num_machines = max(1, available_cpus() // num_threads) if device == "cpu" else 1
        self._threads = ThreadPoolExecutor(num_machines, thread_name_prefix="ansor-mlflow-model")
        try:
            self._make = partial(VirtualMachine, tvm.runtime.load_module(str(library)), tvm.device(device), inputs)
            self._threads.submit(self._machine).result()  # what cannot be run is known now
        except (OSError, RuntimeError, ValueError, AttributeError) as err:
            raise ModelError(
                f"library {library}: TVM {tvm.__version__} cannot load it ({first_line(err)}); compile the network "
                "with this version, or install the one that the model asks for"
            ) from err

    def run(self, arrays: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        """Calls the network on arrays of its shapes and dtypes; those that it returns belong to the caller."""
        return self._threads.submit(self._run, arrays).result()

    def _run(self, arrays: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        return self._machine().run(arrays)

    def _machine(self) -> VirtualMachine:
        """The machine of this thread."""
        machine: VirtualMachine | None = getattr(self._own, "machine", None)
        if machine is None:
            set_num_threads(self._num_threads)
            machine = self._own.machine = self._make()
        return machine


class VirtualMachine:
    """A virtual machine with memory for its inputs, for one call at a time."""

    def __init__(self, module: Any, device: Any, inputs: Sequence[TensorSpec]) -> None:
        from tvm import relax, runtime

        self._main = relax.VirtualMachine(module, device)["main"]
        self._from_dlpack = runtime.from_dlpack
        self._is_on_cpu = device == runtime.cpu()
        self._slots = [self._slot(spec, device) for spec in inputs]

    def run(self, arrays: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        """See `VirtualMachines.run`."""
        result = self._main(*map(self._argument, arrays, self._slots))
        # Copies: the memory of an output may be that of an input, of another output or of a weight.
        return [self._copied(tensor) for tensor in (result if isinstance(result, Sequence) else [result])]

    def _slot(self, spec: TensorSpec, device: Any) -> tuple[Any, npt.NDArray[Any] | None]:
        """A tensor for an input, and the same memory as an array, where there is such an array."""
        from tvm import runtime

        if self._is_on_cpu and np.dtype(spec.dtype).kind in _EXPORTED_KINDS:
            array = _aligned_array(spec)
            return runtime.from_dlpack(array), array
        return runtime.empty(spec.shape, spec.dtype, device), None

    def _argument(self, array: npt.NDArray[Any], slot: tuple[Any, npt.NDArray[Any] | None]) -> Any:
        """The array itself where generated code may read it, else a copy."""
        tensor, memory = slot
        if memory is None:
            return tensor.copyfrom(array)
        if array.nbytes >= _ZERO_COPY_BYTES and _is_aligned(array):
            return self._from_dlpack(array)
        np.copyto(memory, array)
        return tensor

    def _copied(self, tensor: Any) -> npt.NDArray[Any]:
        if self._is_on_cpu and np.dtype(str(tensor.dtype)).kind in _EXPORTED_KINDS:
            return np.from_dlpack(tensor).copy()
        array: npt.NDArray[Any] = tensor.numpy()
        return array


def _aligned_array(spec: TensorSpec) -> npt.NDArray[Any]:
    dtype = np.dtype(spec.dtype)
    num_bytes = math.prod(spec.shape) * dtype.itemsize
    memory = np.empty(num_bytes + _ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT_BYTES
    return memory[start : start + num_bytes].view(dtype).reshape(spec.shape)


def _is_aligned(array: npt.NDArray[Any]) -> bool:
    """Whether generated code may read an array where it is. NumPy exports none that is read-only."""
    flags = array.flags
    return bool(flags.c_contiguous and flags.writeable and array.ctypes.data % _ALIGNMENT_BYTES == 0)
