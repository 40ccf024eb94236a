"""A loaded model: checks inputs, runs the library, returns arrays."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ansor_mlflow.errors import ModelError, UserInputError
from ansor_mlflow.model.package import LibraryEntry, Manifest, verify_package
from ansor_mlflow.targets import why_not_runnable
from ansor_mlflow.tensors import TensorSpec
from ansor_mlflow.threads import available_cpus, set_num_threads

_log = logging.getLogger(__name__)


class TunedModel:
    """A compiled network in memory. Safe to call from several threads, which take turns.

    Args:
        machine: TVM's virtual machine with the network as its function "main".
        inputs: The network's inputs, in the order of the function's parameters.
        outputs: The network's outputs, in order.
        entry: The library that was loaded.
    """

    def __init__(
        self, machine: Any, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], entry: LibraryEntry
    ) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.entry = entry
        self._machine = machine
        self._lock = threading.Lock()

    def run(self, inputs: Mapping[str, npt.ArrayLike]) -> dict[str, npt.NDArray[Any]]:
        """Runs the network once.

        Args:
            inputs: An array for each input, of exactly its shape and dtype.

        Returns:
            The outputs by name; the arrays belong to the caller.

        Raises:
            UserInputError: A name, a shape or a dtype is not as the network expects.
        """
        import tvm

        arrays = self._checked(inputs)
        with self._lock:
            result = self._machine["main"](*[tvm.runtime.tensor(array) for array in arrays])
        tensors = [result] if len(self.outputs) == 1 else list(result)
        return {spec.name: tensor.numpy() for spec, tensor in zip(self.outputs, tensors, strict=True)}

    def _checked(self, inputs: Mapping[str, npt.ArrayLike]) -> list[npt.NDArray[Any]]:
        names = [spec.name for spec in self.inputs]
        if set(inputs) != set(names):
            raise UserInputError(f"inputs {sorted(map(str, inputs))}: the model expects {self._expected()}")
        arrays = []
        for spec in self.inputs:
            array = np.asarray(inputs[spec.name])
            if array.shape != spec.shape or array.dtype != spec.dtype:
                given = f"{array.dtype} {array.shape}"
                raise UserInputError(f"input {spec.name!r} is {given}: the model expects {self._expected()}")
            arrays.append(np.ascontiguousarray(array))
        return arrays

    def _expected(self) -> str:
        return ", ".join(f"{spec.name!r}: {spec.dtype} {spec.shape}" for spec in self.inputs)


def load_package(directory: Path, manifest: Manifest) -> TunedModel:
    """Checks a model directory and loads its library for this host.

    TVM's kernels run on as many threads as the library was tuned for, in this process, from here on.

    Raises:
        ModelError: A digest does not match, or no library runs on this host.
    """
    verify_package(directory, manifest)
    entry = choose_library(directory, manifest)
    return open_library(directory / entry.path, manifest, entry)


def open_library(library: Path, manifest: Manifest, entry: LibraryEntry) -> TunedModel:
    """Loads a library whose digest was checked, or that was just built, with the threads that `entry` names."""
    from tvm import cpu, relax, runtime

    num_threads = entry.fingerprint.num_threads
    used = set_num_threads(min(num_threads, available_cpus()))
    if used != num_threads:
        _log.warning(
            "the model was tuned for %d threads and runs on %d here: this process may use fewer CPUs, or this thread "
            "ran TVM kernels on fewer before",
            num_threads,
            used,
        )
    machine = relax.VirtualMachine(runtime.load_module(str(library)), cpu())
    return TunedModel(machine, manifest.inputs, manifest.outputs, entry)


def choose_library(directory: Path, manifest: Manifest) -> LibraryEntry:
    """The library of a model that is loaded on this host.

    Raises:
        ModelError: None of them runs here.
    """
    reasons = []
    for entry in manifest.libraries:
        reason = why_not_runnable(entry.fingerprint)
        if reason is None:
            return entry
        reasons.append(reason)
    raise ModelError(f"model {directory}: no library runs here: {'; '.join(reasons)}; compile the network on this host")
