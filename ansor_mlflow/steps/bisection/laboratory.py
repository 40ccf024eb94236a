"""Compiles parts of a network, and compares what they compute with ONNX Runtime."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import onnx

from ansor_mlflow.device import Device
from ansor_mlflow.measuring import Deviation, compare_tensors, library_inference, outputs_of, reference_inference
from ansor_mlflow.model import LIBRARY_FILE, BuildJob, LibraryEntry, Manifest, build_in_child_process
from ansor_mlflow.names import NETWORK_FILE
from ansor_mlflow.networks import input_specs, output_specs, write_onnx
from ansor_mlflow.settings import LoweringSettings
from ansor_mlflow.tensors import Arrays


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A model's outputs on one example."""

    inputs: Arrays
    actual: Arrays
    expected: Arrays
    deviations: dict[str, Deviation]
    """By the outputs' names."""

    @staticmethod
    def of(inputs: Arrays, actual: Arrays, expected: Arrays) -> Comparison:
        """Compares outputs; NaNs and infinities that both have are equal."""
        deviations = {name: compare_tensors(actual[name], value) for name, value in expected.items()}
        return Comparison(inputs=inputs, actual=actual, expected=expected, deviations=deviations)

    @property
    def worst(self) -> Deviation:
        """The largest errors of the outputs."""
        return Deviation.worst(list(self.deviations.values()))

    def wrong(self, tolerance: float) -> list[str]:
        """The outputs that differ."""
        return [name for name, deviation in self.deviations.items() if not deviation.max_rel_error <= tolerance]

    def largest_difference(self, name: str) -> tuple[int, ...]:
        """Where an output of the right shape is most wrong: first of all where only one of both is finite."""
        actual, expected = (np.asarray(values[name], np.float64) for values in (self.actual, self.expected))
        with np.errstate(invalid="ignore"):
            errors = np.where((actual == expected) | (np.isnan(actual) & np.isnan(expected)), 0, abs(actual - expected))
        place = np.argmax(np.nan_to_num(errors, nan=np.inf))
        return tuple(int(index) for index in np.unravel_index(place, errors.shape))


@dataclass(frozen=True, kw_only=True)
class Laboratory:
    """Where models are compiled without tuning, and run."""

    device: Device
    lowering: LoweringSettings
    scratch: Path
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def compare(self, model: onnx.ModelProto, examples: Sequence[Arrays]) -> list[Comparison]:
        """Compares a model with ONNX Runtime, on several examples.

        Args:
            model: The model.
            examples: Values of its inputs; what else is in them is left out.

        Raises:
            AnsorMlflowError: One of both cannot compile or run it.
        """
        path = self._write(model)
        inputs, library = input_specs(model), path.with_name(LIBRARY_FILE)
        given = [{spec.name: example[spec.name] for spec in inputs} for example in examples]
        expected = self._reference(path, given)
        job = BuildJob(
            network=str(path),
            records="",
            plain=True,
            target=self.device.fingerprint.target,
            num_threads=self.device.num_threads,
            lowering=self.lowering,
            library=str(library),
        )
        built = build_in_child_process(job)
        entry = LibraryEntry(
            path=LIBRARY_FILE,
            fingerprint=self.device.fingerprint,
            coverage=built.coverage,
            provenance={},
            parts=built.parts,
        )
        manifest = Manifest(network="", inputs=inputs, outputs=output_specs(model), libraries=(entry,), files={})
        actual = outputs_of(partial(library_inference, library, manifest, entry), given)
        return [Comparison.of(*found) for found in zip(given, actual, expected, strict=True)]

    def reference(self, model: onnx.ModelProto, example: Arrays) -> Arrays:
        """What ONNX Runtime computes; see `compare`."""
        given = {spec.name: example[spec.name] for spec in input_specs(model)}
        return self._reference(self._write(model), [given])[0]

    def _write(self, model: onnx.ModelProto) -> Path:
        directory = self.scratch / str(next(self._numbers))
        directory.mkdir()
        write_onnx(model, directory / NETWORK_FILE)
        return directory / NETWORK_FILE

    def _reference(self, path: Path, examples: Sequence[Arrays]) -> list[Arrays]:
        return outputs_of(partial(reference_inference, path, self.device.num_threads, exact=True), examples)
