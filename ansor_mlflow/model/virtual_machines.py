"""TVM's virtual machines for a library: as many calls run at once as this process has CPUs for their threads."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ansor_mlflow.device import HugePages, NewMemory, Platform, available_cpus, has_num_threads, set_num_threads
from ansor_mlflow.errors import ModelError, first_line
from ansor_mlflow.model.parts import (
    EXPORTED_KINDS,
    GIVEN_OUTPUTS,
    PartEntry,
    PartRunner,
    aligned_array,
    as_array,
    is_aligned,
    outputs_of_call,
)
from ansor_mlflow.model.sessions import open_sessions
from ansor_mlflow.tensors import NetworkShapes, TensorSpec

_log = logging.getLogger("ansor_mlflow")
_ZERO_COPY_BYTES = 1 << 14  # size from which an array is wrapped; a smaller one is copied sooner


def load_runtime_alone(platform: Platform) -> None:
    """Lets TVM load without its compiler, for a process that runs a library and does no more: it takes a third of the
    time. Nothing where TVM is loaded, or for a GPU: TVM loads the runtimes of GPUs with its compiler alone.
    """
    if platform.in_process and "tvm" not in sys.modules:
        os.environ["TVM_USE_RUNTIME_LIB"] = "1"  # read once, when TVM is imported


class VirtualMachines:
    """Virtual machines that share a library and its weights; safe to call from any number of threads.

    As many calls run at once as the CPUs carry, since kernels that share a CPU slow each other down. TVM keeps a pool
    of workers for every thread that calls it, which would be as many as there are callers, and of the size of whichever
    model each of them called first. So calls run in threads of the model's own, in the order in which they come. Only
    those of the thread that loaded the model run in it, as to pass a call on and its results back takes a tenth of a
    millisecond.
    """

    def __init__(
        self,
        library: Path,
        sizes: Sequence[NetworkShapes],
        parts: Sequence[PartEntry],
        num_threads: int,
        platform: Platform,
        *,
        huge_pages: bool,
    ) -> None:
        import tvm

        self._num_threads = num_threads
        self._max_machines = max(1, available_cpus() // num_threads) if platform.in_process else 1
        self._loaded_in = threading.get_ident()
        self._threads = ThreadPoolExecutor(
            self._max_machines, "ansor-mlflow-model", initializer=set_num_threads, initargs=(num_threads,)
        )
        self._machines: list[VirtualMachine] = []
        self._making = threading.Lock()
        self._instrumented: VirtualMachine | None = None
        self._instrumenting = threading.Lock()
        self._memory = NewMemory() if huge_pages and platform.in_process else None
        self.huge_pages = HugePages()
        """The memory that is in huge pages: that of the weights, and after a call also that of activations."""
        try:
            module = tvm.runtime.load_module(str(library))
            sessions = open_sessions(library.parent, parts, num_threads)
            self._make = partial(VirtualMachine, module, tvm.device(platform.name), sizes, parts, sessions)
            self._machines.append(self._make())  # what cannot be run is known now
            self._collapse()
        except (OSError, RuntimeError, ValueError, AttributeError) as err:
            raise ModelError(
                f"library {library}: TVM {tvm.__version__} cannot load it ({first_line(err)}); compile the network "
                "with this version, or install the one that the model asks for"
            ) from err

    def run(self, arrays: Sequence[npt.NDArray[Any]], size: int = 0) -> list[npt.NDArray[Any]]:
        """Calls the network on arrays of a size's shapes and dtypes; those that it returns belong to the caller."""
        if threading.get_ident() == self._loaded_in and has_num_threads(self._num_threads):
            return self._run(arrays, size)
        return self._threads.submit(self._run, arrays, size).result()

    def seconds_of_parts(self, arrays: Sequence[npt.NDArray[Any]], size: int = 0) -> list[float]:
        """How long each part takes in a call; empty where "main" is all of the network."""

        def call() -> list[float]:
            machine = self._taken_machine()
            try:
                machine.run(arrays, size)
                return machine.seconds_of_parts(size)
            finally:
                machine.turn.release()

        return self._threads.submit(call).result()

    def seconds_of_kernels(self, arrays: Sequence[npt.NDArray[Any]], size: int = 0) -> list[tuple[str, float]]:
        """The names of the functions that a call runs, in their order, and how long each takes.

        What is timed from outside of the kernels, by a machine of its own, is some microseconds too long.
        """

        def call() -> list[tuple[str, float]]:
            taken = self._taken_machine()  # only so that there is a CPU
            try:
                with self._instrumenting:
                    machine = self._instrumented = self._instrumented or self._make(is_instrumented=True)
                    self._run_on(machine, arrays, size)
                    return list(machine.seconds_of_kernels)
            finally:
                taken.turn.release()

        return self._threads.submit(call).result()

    def _run(self, arrays: Sequence[npt.NDArray[Any]], size: int) -> list[npt.NDArray[Any]]:
        machine = self._taken_machine()
        try:
            return self._run_on(machine, arrays, size)
        finally:
            machine.turn.release()

    def _run_on(self, machine: VirtualMachine, arrays: Sequence[npt.NDArray[Any]], size: int) -> list[npt.NDArray[Any]]:
        results = machine.run(arrays, size)
        if size not in machine.sizes_run:  # it has its memory now
            machine.sizes_run.add(size)
            self._collapse()
        return results

    def _collapse(self) -> None:
        if self._memory:
            self.huge_pages = self._memory.collapse()

    def _taken_machine(self) -> VirtualMachine:
        """A machine whose turn is the caller's, who gives it back; a semaphore of Python's would take a microsecond."""
        for machine in self._machines:
            if machine.turn.acquire(blocking=False):
                return machine
        with self._making:
            if len(self._machines) < self._max_machines:
                machine = self._make()
                machine.turn.acquire()
                self._machines.append(machine)
                return machine
        machine = self._machines[0]
        machine.turn.acquire()  # at most one call waits for it: calls are the threads', and the loading thread's one
        return machine


class VirtualMachine:
    """A virtual machine with memory for its inputs, for one call at a time."""

    def __init__(
        self,
        module: Any,
        device: Any,
        sizes: Sequence[NetworkShapes],
        parts: Sequence[PartEntry],
        sessions: Mapping[str, Any],
        *,
        is_instrumented: bool = False,
    ) -> None:
        from tvm import runtime
        from tvm.runtime import vm

        functions = vm.VirtualMachine(module, device)
        self.turn = threading.Lock()  # of the call that has it
        self._is_on_cpu = device == runtime.cpu()
        self.seconds_of_kernels: list[tuple[str, float]] = []  # of the last call, if it is instrumented
        if is_instrumented:
            functions.set_instrument(self._instrument(device))
        runners = [
            PartRunner([part for part in parts if part.size == number], functions, sessions, size, device)
            for number, size in enumerate(sizes if parts else ())
        ]
        self._functions: Sequence[Callable[..., Any]] = runners or [functions["main"]]
        self._from_dlpack = runtime.from_dlpack
        self._slots = [[self._slot(spec, device) for spec in size.inputs] for size in sizes]
        self.sizes_run: set[int] = set()  # in which it was called before
        self._arrays: list[npt.NDArray[Any]] = []
        self._into: Callable[..., Any] | None = None
        """What writes outputs to `_arrays`; None where a call returns them."""
        # The functions of an instrumented machine are those of the network.
        if not (runners or is_instrumented) and functions.module.implements_function(GIVEN_OUTPUTS):
            slots = [self._slot(spec, device) for spec in sizes[0].outputs]
            tensors, function = [tensor for tensor, _ in slots], functions[GIVEN_OUTPUTS]
            self._arrays = [array for _, array in slots if array is not None]
            if len(self._arrays) == len(slots):
                self._into = lambda *inputs: function(*inputs, *tensors)

    def _instrument(self, device: Any) -> Callable[..., None]:
        """What TVM calls before and after each function."""
        started = 0.0

        def note(_function: Any, name: str, before: bool, *_: Any) -> None:
            nonlocal started
            if not self._is_on_cpu:
                device.sync()  # a GPU may still compute what came before, or only have begun
            if before:
                started = time.perf_counter()
            else:
                self.seconds_of_kernels.append((name, time.perf_counter() - started))

        return note

    def seconds_of_parts(self, size: int) -> list[float]:
        """See `VirtualMachines.seconds_of_parts`; of the last call."""
        function = self._functions[size]
        return list(function.seconds) if isinstance(function, PartRunner) else []

    def run(self, arrays: Sequence[npt.NDArray[Any]], size: int) -> list[npt.NDArray[Any]]:
        arguments = list(map(self._argument, arrays, self._slots[size]))
        if self._into is not None:
            try:
                self._into(*arguments)
                return [array.copy() for array in self._arrays]
            except ValueError:
                _log.debug("the library's outputs are not those of the model, or its inputs", exc_info=True)
        self.seconds_of_kernels.clear()
        result = self._functions[size](*arguments)
        # The memory of TVM's output may be that of an input, of another output or of a weight.
        return [array if array.flags.owndata else array.copy() for array in map(as_array, outputs_of_call(result))]

    def _slot(self, spec: TensorSpec, device: Any) -> tuple[Any, npt.NDArray[Any] | None]:
        """A tensor for an input, and the same memory as an array, where there is such an array."""
        from tvm import runtime

        if self._is_on_cpu and np.dtype(spec.dtype).kind in EXPORTED_KINDS:
            array = aligned_array(spec)
            return runtime.from_dlpack(array), array
        return runtime.empty(spec.shape, spec.dtype, device), None

    def _argument(self, array: npt.NDArray[Any], slot: tuple[Any, npt.NDArray[Any] | None]) -> Any:
        """The array itself where generated code may read it, else a copy."""
        tensor, memory = slot
        if memory is None:
            return tensor.copyfrom(array)
        if array.nbytes >= _ZERO_COPY_BYTES and is_aligned(array):
            return self._from_dlpack(array)
        memory[...] = array  # a third of the time of NumPy's copyto
        return tensor
