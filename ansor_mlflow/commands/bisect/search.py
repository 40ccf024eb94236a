"""Searches the smallest part of a network that is compiled wrongly."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ansor_mlflow.device import Device
from ansor_mlflow.errors import AnsorMlflowError
from ansor_mlflow.graphs import ancestors, extract, inputs_of, producers_of, static_shape
from ansor_mlflow.measuring import Deviation, compare_tensors, library_inference, outputs_of, reference_inference
from ansor_mlflow.model import LIBRARY_FILE, BuildJob, build_in_child_process
from ansor_mlflow.names import NETWORK_FILE
from ansor_mlflow.networks import input_specs, output_specs, write_onnx
from ansor_mlflow.settings import LoweringSettings
from ansor_mlflow.tensors import Arrays, NetworkShapes

_KNOWN_FROM_SHAPES = {"Shape", "Size"}
"""Operators whose results do not depend on the values of their input."""
_log = logging.getLogger("ansor_mlflow")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The outputs of a compiled model on one example, and those of ONNX Runtime."""

    model: onnx.ModelProto
    inputs: Arrays
    actual: Arrays
    expected: Arrays

    def deviation(self, name: str) -> Deviation:
        """How far an output is off; NaNs and infinities that both have are equal."""
        return compare_tensors(self.actual[name], self.expected[name])

    @property
    def worst(self) -> Deviation:
        """The largest errors of the outputs."""
        return Deviation.worst([self.deviation(name) for name in self.expected])

    def wrong(self, tolerance: float) -> list[str]:
        """The outputs that differ."""
        return [name for name in self.expected if not self.deviation(name).max_rel_error <= tolerance]

    def largest_difference(self, name: str) -> tuple[int, ...]:
        """Where an output of the right shape is most wrong: first of all where only one of both is finite."""
        actual, expected = (np.asarray(values[name], np.float64) for values in (self.actual, self.expected))
        with np.errstate(invalid="ignore"):
            errors = np.where((actual == expected) | (np.isnan(actual) & np.isnan(expected)), 0, abs(actual - expected))
        place = np.argmax(np.nan_to_num(errors, nan=np.inf))
        return tuple(int(index) for index in np.unravel_index(place, errors.shape))


@dataclass(frozen=True, kw_only=True)
class Laboratory:
    """Compiles models without tuning, and runs them."""

    device: Device
    lowering: LoweringSettings
    scratch: Path
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def compare(self, model: onnx.ModelProto, examples: Sequence[Arrays]) -> list[Comparison]:
        """Compares a model with ONNX Runtime; arrays of an example that are no inputs of the model are left out.

        Raises:
            AnsorMlflowError: One of both cannot compile or run it.
        """
        path, given, expected = self._reference(model, examples)
        job = BuildJob(
            network=str(path),
            records="",
            untuned=True,
            device=self.device.fingerprint,
            lowering=self.lowering,
            library=str(path.with_name(LIBRARY_FILE)),
        )
        shapes = NetworkShapes(input_specs(model), output_specs(model))
        run = partial(library_inference, Path(job.library), shapes, build_in_child_process(job))
        actual = outputs_of(run, given)
        return [
            Comparison(model=model, inputs=inputs, actual=computed, expected=right)
            for inputs, computed, right in zip(given, actual, expected, strict=True)
        ]

    def reference(self, model: onnx.ModelProto, example: Arrays) -> Arrays:
        """What ONNX Runtime computes; see `compare`."""
        return self._reference(model, [example])[2][0]

    def _reference(self, model: onnx.ModelProto, examples: Sequence[Arrays]) -> tuple[Path, list[Arrays], list[Arrays]]:
        path = self.scratch / str(next(self._numbers)) / NETWORK_FILE
        path.parent.mkdir()
        write_onnx(model, path)
        given = [{spec.name: example[spec.name] for spec in input_specs(model)} for example in examples]
        session = partial(reference_inference, path, self.device.num_threads, exact=True)
        return path, given, outputs_of(session, given)


class CuttableGraph:
    """What the search asks of a graph.

    Args:
        model: Its nodes are in topological order, and its shapes were inferred. Stays as it is.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model, graph = model, model.graph
        self._taken = [[name for name in inputs_of(node) if name] for node in graph.node]
        self.makers = producers_of(graph)
        """The place of the node that makes a tensor."""
        self._values = {value.name: value for value in (*graph.input, *graph.value_info, *graph.output)}
        self.varying = {value.name for value in graph.input} - {weight.name for weight in graph.initializer}
        """The tensors that depend on the values of the model's inputs."""
        for node, taken in zip(graph.node, self._taken, strict=True):
            if node.op_type not in _KNOWN_FROM_SHAPES and not self.varying.isdisjoint(taken):
                self.varying.update(filter(None, node.output))

    def part(
        self, places: Sequence[int], outputs: Collection[str], constants: Mapping[str, Any] = {}
    ) -> onnx.ModelProto:
        """The model of some nodes, with some of their outputs, and with constants for some of what they take."""
        model = extract(self._model, places, self._values)
        graph = model.graph
        kept_inputs = [value for value in graph.input if value.name not in constants]
        kept_outputs = [value for value in graph.output if value.name in outputs]
        for values, kept in ((graph.input, kept_inputs), (graph.output, kept_outputs)):
            del values[:]
            values.extend(kept)
        graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
        return model

    def prefix_lengths(self) -> list[int]:
        """How many nodes the beginning of the graph may have, rising, so that it can be cut off there."""
        last_uses = {name: index for index, taken in enumerate(self._taken) for name in taken}
        made = self.varying & self.makers.keys()
        blocked = {
            length
            for name in made
            if not self.has_static_shape(name)
            for length in range(self.makers[name] + 1, last_uses.get(name, 0) + 1)
        }
        return sorted({*({self.makers[name] + 1 for name in made} - blocked), len(self._taken)})

    def ancestors(self, tensors: Iterable[str]) -> list[int]:
        """Places of the nodes that compute tensors, in order."""
        return ancestors(self._model.graph, tensors)

    def taken_from_others(self, places: Sequence[int]) -> set[str]:
        """The tensors that nodes take from other nodes."""
        taken = {name for index in places for name in self._taken[index]}
        return {name for name in taken if name in self.makers and self.makers[name] not in places}

    def has_static_shape(self, tensor: str) -> bool:
        """Whether a tensor can be an input or output of a part: it has a static shape, and a type of NumPy's."""
        value = self._values.get(tensor)
        if value is None or static_shape(value) is None:
            return False
        kind = value.type.tensor_type.elem_type
        if kind in (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING):
            return False
        return helper.tensor_dtype_to_np_dtype(kind).isbuiltin == 1


@dataclass(frozen=True)
class Search:
    """Takes parts of a network that is wrong until the smallest is found."""

    graph: CuttableGraph
    laboratory: Laboratory
    tolerance: float
    example: Arrays

    def smallest(self, whole: Comparison) -> tuple[Comparison, str]:
        """The smallest model that shows a difference, and the first tensor that differs."""
        prefix, right = self._shortest_prefix(whole)
        wrong = sorted(prefix.wrong(self.tolerance), key=self.graph.makers.__getitem__)
        tensor = next((name for name in wrong if self.graph.makers[name] >= right), wrong[0])
        _log.info("the first wrong tensor is %s", tensor)
        return self._fewest_ancestors(tensor) or prefix, tensor

    def _shortest_prefix(self, whole: Comparison) -> tuple[Comparison, int]:
        """The shortest beginning that differs, and the number of nodes up to which nothing does."""
        lengths = [0, *self.graph.prefix_lengths()]
        shown = {lengths[-1]: whole}

        def differs(position: int) -> bool:
            length = lengths[position]
            model = self.graph.part(range(length), self.graph.varying)
            found = self._try(model, self.example, f"the first {length} nodes")
            if found:
                shown[length] = found
            return found is not None

        last = _first(differs, 0, len(lengths) - 1)
        return shown[lengths[last]], lengths[last - 1]

    def _fewest_ancestors(self, tensor: str) -> Comparison | None:
        """A model of as few of the nodes before a tensor as show that it differs; None where they do not."""
        nodes = self.graph.ancestors([tensor])
        shown: dict[int, Comparison] = {}

        def differs(number: int) -> bool:
            found = self._try_alone(tensor, nodes[-number:])
            if found:
                shown[number] = found
            return found is not None

        number, right = 1, 0
        while not differs(number):
            if number == len(nodes):
                return None
            number, right = min(2 * number, len(nodes)), number
        return shown[_first(differs, right, number)]

    def _try_alone(self, tensor: str, places: Sequence[int]) -> Comparison | None:
        """A model of some nodes with the inputs that ONNX Runtime computes, if it differs."""
        graph, taken = self.graph, self.graph.taken_from_others(places)
        if not all(map(graph.has_static_shape, taken)):
            return None
        before = graph.part(graph.ancestors(taken), taken)
        values = self.laboratory.reference(before, self.example) if taken else {}
        constants = {name: value for name, value in values.items() if name not in graph.varying}
        model = graph.part(places, [tensor], constants)
        return self._try(model, {**self.example, **values}, f"the last {len(places)} of them alone")

    def _try(self, model: onnx.ModelProto, example: Arrays, called: str) -> Comparison | None:
        """The model, if its outputs differ; one that cannot be compiled alone shows nothing."""
        if not model.graph.output:
            return None
        try:
            (comparison,) = self.laboratory.compare(model, [example])
        except AnsorMlflowError as err:
            _log.info("%s: not comparable (%s)", called, err)
            return None
        _log.info("%s: largest relative error %.3g", called, comparison.worst.max_rel_error)
        return comparison if comparison.wrong(self.tolerance) else None


def _first(is_true: Callable[[int], bool], low: int, high: int) -> int:
    """A number that something is true of, and not of the one before it, by bisection: true of `high`, not of `low`."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_true(middle) else (middle, high)
    return high
