"""The command `bisect`: which operator of a network is compiled wrongly, and the smallest model that shows it."""

from __future__ import annotations

import functools
import itertools
import logging
import shlex
import zipfile
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pydantic_core
from onnx import helper, numpy_helper

from ansor_mlflow import measuring
from ansor_mlflow.device import Device
from ansor_mlflow.errors import AnsorMlflowError, CorrectnessError, UserInputError
from ansor_mlflow.files import scratch_directory, write_text
from ansor_mlflow.foreign import Report, Reported, Table, for_shell
from ansor_mlflow.graphs import ancestors, extract, inputs_of, producers_of, static_shape
from ansor_mlflow.model import LIBRARY_FILE, BuildJob, build_in_child_process, require_linker
from ansor_mlflow.names import NETWORK_FILE
from ansor_mlflow.networks import input_specs, output_specs, write_onnx
from ansor_mlflow.parameters import BisectOptions
from ansor_mlflow.settings import LoweringSettings
from ansor_mlflow.tensors import Arrays, NetworkShapes, all_sizes
from ansor_mlflow.tracking import describe_environment, network_of

_REPORT_FILE = "bisection.json"
_KNOWN_FROM_SHAPES = {"Shape", "Size"}
"""Operators whose results do not depend on the values of their input."""
_KEPT = ("tolerance", "layout", "dtype", "pad_channels", "target", "num_threads", "output")
"""Parameters of the command line that compares the smallest model."""
_log = logging.getLogger("ansor_mlflow")


@dataclass(frozen=True, kw_only=True)
class WrongTensor:
    """The first tensor of a network that is not what ONNX Runtime computes, and the smallest model that shows it."""

    tensor: str
    operator: str
    """The operator that makes it, such as "Softmax"."""
    node: str
    place: int
    """The number of nodes before it in the graph."""
    shape: tuple[int, ...]
    """Its shape in ONNX Runtime."""
    actual_shape: tuple[int, ...]
    dtype: str
    max_abs_error: float
    max_rel_error: float
    index: tuple[int, ...]
    """Where in the tensor the largest difference is; empty where the shapes differ."""
    actual: float | None
    """The value there of the compiled network."""
    expected: float | None
    operators: tuple[str, ...]
    directory: str
    command: str
    """Command line that compares the smallest model."""


@dataclass(frozen=True, kw_only=True)
class Bisection(Reported):
    """Whether a network is compiled rightly, and if not, where it goes wrong."""

    network: str
    target: str
    num_nodes: int
    tolerance: float
    max_abs_error: float
    """Largest absolute error of the whole network's outputs."""
    max_rel_error: float
    wrong: WrongTensor | None
    """None where the outputs do not differ by more than the tolerance."""
    note: str

    def require_equal(self) -> None:
        """Raises a CorrectnessError if an output differs."""
        if self.wrong is not None:
            raise CorrectnessError(
                f"the outputs of {self.network} differ from ONNX Runtime's by max_rel_error={self.max_rel_error:.3g}, "
                f"allowed is {self.tolerance:g}; the first wrong tensor is {self.wrong.tensor!r} of "
                f"{self.wrong.operator}: report it with what is in {self.wrong.directory}"
            )

    def report(self) -> Report:
        title, notes = f"{self.network} for {self.target}", [self.note] if self.note else []
        rows = {
            "nodes": str(self.num_nodes),
            "outputs, largest relative error": f"{self.max_rel_error:.3g}, allowed is {self.tolerance:g}",
        }
        wrong = self.wrong
        if wrong is None:
            return Report(title, [Table([*rows.items()]), "nothing differs from ONNX Runtime", *notes])
        node = f" (node {wrong.node!r})" if wrong.node else ""
        rows["first wrong tensor"] = f"{wrong.tensor}: {wrong.dtype} {wrong.shape}"
        rows["its operator"] = f"{wrong.operator}{node}, after {wrong.place} others"
        if wrong.actual_shape != wrong.shape:
            rows["its shape"] = f"{wrong.actual_shape}, in ONNX Runtime {wrong.shape}"
        else:
            rows["its largest error"] = f"{wrong.max_abs_error:.3g}, relative {wrong.max_rel_error:.3g}"
            rows["where, and the values"] = f"{wrong.index}: {wrong.actual:.9g}, in ONNX Runtime {wrong.expected:.9g}"
        last = wrong.operators if len(wrong.operators) <= 8 else ("…", *wrong.operators[-8:])
        rows["smallest model"] = f"{len(wrong.operators)} nodes: {', '.join(last)}"
        where = {"model, inputs and outputs": wrong.directory, "compare it": wrong.command}
        return Report(title, [Table([*rows.items()]), *notes], where)


def bisect_network(options: BisectOptions) -> Bisection:
    """Compiles a network without tuning, and looks for the operator that is compiled wrongly.

    If the outputs of the whole network differ from those of ONNX Runtime, the shortest beginning of the graph is
    searched whose outputs differ. Of its last node a model is made, with the inputs that ONNX Runtime computes; where
    that is right, of as many nodes before it as it takes. The smallest model that shows a difference is saved.
    """
    measuring.require_examples(options.data)
    directory = Path(options.output)
    is_free = not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))
    if not is_free and not (directory / _REPORT_FILE).is_file():
        raise UserInputError(
            f"output={directory}: it exists, and bisect did not write it; give the path of a new directory"
        )
    network = network_of(options)
    if network.sizes:
        raise UserInputError(f"input_shapes gives {network.name} several sizes; give the one whose outputs are wrong")
    device = Device.resolve(options.target, options.num_threads)
    device.require_measurable_here()
    require_linker()
    with scratch_directory() as scratch:
        file = Path(scratch, "network.onnx")
        write_onnx(network.model, file)
        examples = measuring.choose_examples(options.data, all_sizes(network), options.seed, file)
        search = Search(
            graph=CuttableGraph(network.model),
            device=device,
            lowering=options.lowering,
            tolerance=measuring.tolerance_for(options.tolerance, file, options.dtype),
            scratch=Path(scratch),
        )
        _log.info("compiling %s for %s, and comparing it on %d inputs", network.name, device.description, len(examples))
        whole = search.compare(network.model, examples)
        error = measuring.Deviation.worst([comparison.worst for comparison in whole])
        tolerance = measuring.allowed_error(
            error.max_rel_error, options.tolerance, file, options.dtype, device.num_threads, examples
        )
        are_finite = all(np.isfinite(values).all() for found in whole for values in found.expected.values())
        infinite = "ONNX Runtime's outputs hold infinities or NaNs on these inputs; give data= for which they do not"
        bisection = Bisection(
            network=network.name,
            target=device.description,
            num_nodes=len(network.model.graph.node),
            tolerance=tolerance,
            max_abs_error=error.max_abs_error,
            max_rel_error=error.max_rel_error,
            wrong=None,
            note="" if are_finite else infinite,
        )
        first = next((comparison for comparison in whole if comparison.wrong(tolerance)), None)
        if first is None:
            return bisection
        shown, tensor = replace(search, tolerance=tolerance).smallest(first)
    kept = {name: text for name, text in options.changed().items() if name in _KEPT}
    flags = {"data": str(directory / "inputs.npz"), **kept}
    words = (f"--{name.replace('_', '-')} {for_shell(text, name.upper())}" for name, text in flags.items())
    command = f"ansor-mlflow bisect {shlex.quote(str(directory / 'model.onnx'))} {' '.join(words)}"
    bisection = replace(bisection, wrong=_described(shown, tensor, network.model.graph.node, str(directory), command))
    directory.mkdir(parents=True, exist_ok=True)
    write_onnx(shown.model, directory / "model.onnx")
    for name, arrays in {"inputs": shown.inputs, "expected": shown.expected, "actual": shown.actual}.items():
        # `numpy.savez` takes no array that is called "file"
        with zipfile.ZipFile(directory / f"{name}.npz", "w") as archive:
            for key, array in arrays.items():
                with archive.open(f"{key}.npy", "w", force_zip64=True) as archived:
                    np.lib.format.write_array(archived, array, allow_pickle=False)
    fields = {"bisection": bisection, "environment": describe_environment(device.fingerprint)}
    write_text(directory / _REPORT_FILE, pydantic_core.to_json(fields, indent=1, inf_nan_mode="null").decode())
    return bisection


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The outputs of a compiled model on one example, and those of ONNX Runtime."""

    model: onnx.ModelProto
    inputs: Arrays
    actual: Arrays
    expected: Arrays

    def deviation(self, name: str) -> measuring.Deviation:
        """How far an output is off; NaNs and infinities that both have are equal."""
        return measuring.compare_tensors(self.actual[name], self.expected[name])

    @property
    def worst(self) -> measuring.Deviation:
        return measuring.Deviation.worst([self.deviation(name) for name in self.expected])

    def wrong(self, tolerance: float) -> list[str]:
        return [name for name in self.expected if not self.deviation(name).max_rel_error <= tolerance]

    def largest_difference(self, name: str) -> tuple[int, ...]:
        """Where an output of the right shape is most wrong: first of all where only one of both is finite."""
        actual, expected = (np.asarray(values[name], np.float64) for values in (self.actual, self.expected))
        with np.errstate(invalid="ignore"):
            errors = np.where((actual == expected) | (np.isnan(actual) & np.isnan(expected)), 0, abs(actual - expected))
        place = np.argmax(np.nan_to_num(errors, nan=np.inf))
        return tuple(int(index) for index in np.unravel_index(place, errors.shape))


def _reversed(inputs: Arrays) -> Arrays:
    """Other inputs of the same values: a call with them leaves memory that a kernel may wrongly go on with."""
    return {name: values.ravel()[::-1].reshape(values.shape) for name, values in inputs.items()}


def _described(
    shown: Comparison, tensor: str, nodes: Sequence[onnx.NodeProto], directory: str, command: str
) -> WrongTensor:
    actual, expected, deviation = shown.actual[tensor], shown.expected[tensor], shown.deviation(tensor)
    is_of_same_shape = actual.shape == expected.shape
    index = shown.largest_difference(tensor) if is_of_same_shape else ()
    place, node = next((place, node) for place, node in enumerate(nodes) if tensor in node.output)
    return WrongTensor(
        tensor=tensor,
        operator=f"{node.domain}.{node.op_type}".lstrip("."),
        node=node.name,
        place=place,
        shape=expected.shape,
        actual_shape=actual.shape,
        dtype=str(expected.dtype),
        max_abs_error=deviation.max_abs_error,
        max_rel_error=deviation.max_rel_error,
        index=index,
        actual=float(actual[index]) if is_of_same_shape else None,
        expected=float(expected[index]) if is_of_same_shape else None,
        operators=tuple(node.op_type for node in shown.model.graph.node),
        directory=directory,
        command=command,
    )


class CuttableGraph:
    """What the search asks of a graph with inferred shapes, whose nodes are in topological order."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model, graph = model, model.graph
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
        model = extract(self.model, places, self._values)
        graph = model.graph
        kept_inputs = [value for value in graph.input if value.name not in constants]
        kept_outputs = [v for v in graph.output if v.name in outputs and self.has_static_shape(v.name)]
        for values, kept in ((graph.input, kept_inputs), (graph.output, kept_outputs)):
            del values[:]
            values.extend(kept)
        graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
        return model

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


@dataclass(frozen=True, kw_only=True)
class Search:
    """Compiles a graph and parts of it without tuning, until the smallest part that is wrong is found."""

    graph: CuttableGraph
    device: Device
    lowering: LoweringSettings
    tolerance: float
    scratch: Path
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def compare(self, model: onnx.ModelProto, examples: Sequence[Arrays]) -> list[Comparison]:
        """Compares a model with ONNX Runtime; arrays of an example that are no inputs of the model are left out."""
        path, given, expected = self._reference(model, examples)
        job = BuildJob(
            network=str(path),
            records="",
            device=self.device.fingerprint,
            lowering=self.lowering,
            library=str(path.with_name(LIBRARY_FILE)),
        )
        shapes = NetworkShapes(input_specs(model), output_specs(model))
        run = functools.partial(measuring.library_inference, Path(job.library), shapes, build_in_child_process(job))
        calls = [inputs for inputs in given for inputs in (_reversed(inputs), inputs)]
        return [
            Comparison(model=model, inputs=inputs, actual=computed, expected=right)
            for inputs, computed, right in zip(given, measuring.outputs_of(run, calls)[1::2], expected, strict=True)
        ]

    def _reference(self, model: onnx.ModelProto, examples: Sequence[Arrays]) -> tuple[Path, list[Arrays], list[Arrays]]:
        """The file of a model, its inputs, and what ONNX Runtime computes."""
        path = self.scratch / str(next(self._numbers)) / NETWORK_FILE
        path.parent.mkdir()
        write_onnx(model, path)
        given = [{spec.name: example[spec.name] for spec in input_specs(model)} for example in examples]
        run = functools.partial(measuring.reference_inference, path, self.device.num_threads, exact=True)
        return path, given, measuring.outputs_of(run, given)

    def smallest(self, whole: Comparison) -> tuple[Comparison, str]:
        """The smallest model that shows a difference, and the first tensor that differs."""
        lengths = range(1, len(self.graph.model.graph.node) + 1)

        @functools.cache
        def beginning(length: int) -> Comparison | None:
            if length == lengths[-1]:
                return whole
            model = self.graph.part(range(length), self.graph.varying)
            return self._try(model, whole.inputs, f"the first {length} nodes")

        length = lengths[bisect_left(lengths, True, key=lambda length: beginning(length) is not None)]
        prefix = beginning(length) or whole
        wrong = sorted(prefix.wrong(self.tolerance), key=self.graph.makers.__getitem__)
        tensor = next((name for name in wrong if self.graph.makers[name] == length - 1), wrong[0])
        _log.info("the first wrong tensor is %s", tensor)
        return self._fewest_ancestors(tensor, whole.inputs) or prefix, tensor

    def _fewest_ancestors(self, tensor: str, example: Arrays) -> Comparison | None:
        """A model of as few of the nodes before a tensor as show that it differs; None where they do not."""
        nodes = ancestors(self.graph.model.graph, [tensor])

        @functools.cache
        def last(number: int) -> Comparison | None:
            return self._try_alone(tensor, nodes[-number:], example)

        number = 1  # which mostly suffices, so that it is doubled
        while not last(number):
            if number == len(nodes):
                return None
            number = min(2 * number, len(nodes))
        numbers = range(number // 2 + 1, number + 1)
        return last(numbers[bisect_left(numbers, True, key=lambda few: last(few) is not None)])

    def _try_alone(self, tensor: str, places: Sequence[int], example: Arrays) -> Comparison | None:
        """A model of some nodes with the inputs that ONNX Runtime computes, if it differs."""
        graph, taken = self.graph, self.graph.taken_from_others(places)
        if not all(map(graph.has_static_shape, taken)):
            return None
        before = graph.part(ancestors(graph.model.graph, taken), taken)
        values = self._reference(before, [example])[2][0] if taken else {}
        constants = {name: value for name, value in values.items() if name not in graph.varying}
        model = graph.part(places, [tensor], constants)
        return self._try(model, {**example, **values}, f"the last {len(places)} of them alone")

    def _try(self, model: onnx.ModelProto, example: Arrays, called: str) -> Comparison | None:
        """The model, if its outputs differ; one that cannot be compiled alone shows nothing."""
        if not model.graph.output:
            return None
        try:
            (comparison,) = self.compare(model, [example])
        except AnsorMlflowError as err:
            _log.info("%s: not comparable (%s)", called, err)
            return None
        _log.info("%s: largest relative error %.3g", called, comparison.worst.max_rel_error)
        return comparison if comparison.wrong(self.tolerance) else None
