"""The programs that `evaluate` runs and times, each in a child process: a factory makes the call.

Imports are inside the factories, so that a process loads only what its contender needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from ansor_mlflow.errors import UserInputError, one_line
from ansor_mlflow.tensors import Arrays, Padded

if TYPE_CHECKING:
    from ansor_mlflow.model import LibraryEntry

Inference = Callable[[Mapping[str, npt.NDArray[Any]]], Arrays]
"""Runs a network once: inputs by name to outputs by name."""
MakeInference = Callable[[], Inference]


def timed_call(make_inference: MakeInference, examples: Sequence[Arrays]) -> Callable[[], Any]:
    """A call that runs the network on all examples: one of each of its sizes."""
    run = make_inference()
    if len(examples) == 1:
        return partial(run, examples[0])
    return lambda: [run(inputs) for inputs in examples]


def outputs_call(
    make_inference: MakeInference, examples: Sequence[Mapping[str, npt.NDArray[Any]]]
) -> Callable[[], list[Any]]:
    """A call that returns the outputs for several inputs."""
    run = make_inference()
    return lambda: [run(inputs) for inputs in examples]


def tuned_inference(directory: Path) -> Inference:
    """The model as its users load it."""
    from ansor_mlflow.model import LoadOptions, Manifest, load_package

    manifest = Manifest.read(directory)
    return load_package(directory, manifest, LoadOptions(device=manifest.device)).run


def reference_inference(network: Path, num_threads: int, *, exact: bool = False) -> Inference:
    """ONNX Runtime, as `explained`."""
    from ansor_mlflow.measuring.reference import ReferenceSession

    advice = "; export the model again"
    return explained("ONNX Runtime", lambda: ReferenceSession(network, num_threads, exact=exact).run, advice)


def explained(runtime: str, load: Callable[[], Inference], advice: str = "") -> Inference:
    """A runtime whose errors have no class in common: what it cannot load, or compute, is a `UserInputError`."""
    try:
        run = load()
    except Exception as err:
        raise UserInputError(f"{runtime} cannot load the network: {one_line(err)}{advice}") from err

    def run_explained(inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        try:
            return run(inputs)
        except Exception as err:
            raise UserInputError(
                f"{runtime} cannot compute the network from the inputs: {one_line(err)}; give others"
            ) from err

    return run_explained


def library_inference(library: Path, network: Padded, entry: LibraryEntry) -> Inference:
    """A library whose digest was checked, or that was just built."""
    from ansor_mlflow.model import open_library

    return open_library(library, network, entry).run
