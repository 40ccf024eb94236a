"""The command `bisect`: the first tensor of a network that is wrong, and the smallest model that shows it."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx

from ansor_mlflow.device import Device
from ansor_mlflow.errors import AnsorMlflowError, UserInputError
from ansor_mlflow.files import scratch_directory
from ansor_mlflow.foreign import for_shell
from ansor_mlflow.measuring import Deviation, choose_examples, require_examples, tolerance_for
from ansor_mlflow.model import require_linker
from ansor_mlflow.networks import write_onnx
from ansor_mlflow.parameters import BisectOptions
from ansor_mlflow.steps.bisection.cutting import CuttableGraph
from ansor_mlflow.steps.bisection.finding import (
    INPUTS_FILE,
    MODEL_FILE,
    Bisection,
    WrongTensor,
    require_own_directory,
    save,
    save_report,
)
from ansor_mlflow.steps.bisection.laboratory import Comparison, Laboratory
from ansor_mlflow.tensors import Arrays, all_sizes
from ansor_mlflow.tracking import describe_environment, network_of

_log = logging.getLogger("ansor_mlflow")
_KEPT = ("tolerance", "layout", "dtype", "pad_channels", "target", "num_threads", "output")
"""Parameters of the command line that compares the smallest model."""


def bisect_network(options: BisectOptions) -> Bisection:
    """Compiles a network without tuning, and looks for the operator that is compiled wrongly.

    If the outputs of the whole network differ from those of ONNX Runtime, the shortest beginning of the graph is
    searched whose outputs differ. Of its last node a model is made, with the inputs that ONNX Runtime computes; where
    that is right, of as many nodes before it as it takes. The smallest model that shows a difference is saved with its
    inputs.

    Raises:
        AnsorMlflowError: The options are not usable, or the whole network cannot be compiled or run.
    """
    require_examples(options.data)
    directory = Path(options.output)
    require_own_directory(directory)
    network = network_of(options)
    if network.sizes:
        raise UserInputError(f"input_shapes gives {network.name} several sizes; give the one whose outputs are wrong")
    device = Device.resolve(options.target, options.num_threads)
    device.require_measurable_here()
    require_linker()
    with scratch_directory() as scratch:
        file = Path(scratch, "network.onnx")
        write_onnx(network.model, file)
        examples = choose_examples(options.data, all_sizes(network), options.seed, file)
        tolerance = tolerance_for(options.tolerance, file, options.dtype)
        laboratory = Laboratory(device=device, lowering=options.lowering, scratch=Path(scratch))
        _log.info("compiling %s for %s, and comparing it on %d inputs", network.name, device.description, len(examples))
        whole = laboratory.compare(network.model, examples)
        error = Deviation.worst([comparison.worst for comparison in whole])
        bisection = Bisection(
            network=network.name,
            target=device.description,
            num_nodes=len(network.model.graph.node),
            tolerance=tolerance,
            max_abs_error=error.max_abs_error,
            max_rel_error=error.max_rel_error,
            wrong=None,
            note=_note(whole),
        )
        first = next((comparison for comparison in whole if comparison.wrong(tolerance)), None)
        if first is None:
            return bisection
        nodes = network.model.graph.node
        search = _Search(CuttableGraph(network.model), laboratory, tolerance, first.inputs)
        shown, tensor = search.smallest(_Shown(network.model, first))
    save(directory, shown.model, shown.comparison.inputs, shown.comparison.expected, shown.comparison.actual)
    bisection = replace(bisection, wrong=_described(shown, tensor, nodes, directory, _command(options, directory)))
    save_report(directory, bisection, describe_environment(device.fingerprint))
    return bisection


def _note(whole: Sequence[Comparison]) -> str:
    outputs = (values for comparison in whole for values in comparison.expected.values())
    if all(np.isfinite(values).all() for values in outputs):
        return ""
    return "ONNX Runtime's outputs hold infinities or NaNs on these inputs; give data= for which they do not"


def _command(options: BisectOptions, directory: Path) -> str:
    kept = {name: text for name, text in options.changed().items() if name in _KEPT}
    files = {"data": str(directory / INPUTS_FILE), **kept}
    flags = (f"--{name.replace('_', '-')} {for_shell(text, name.upper())}" for name, text in files.items())
    return f"ansor-mlflow bisect {shlex.quote(str(directory / MODEL_FILE))} {' '.join(flags)}"


@dataclass(frozen=True)
class _Shown:
    """A model whose outputs differ, and how."""

    model: onnx.ModelProto
    comparison: Comparison


@dataclass(frozen=True)
class _Search:
    """Takes parts of a network that is wrong until the smallest is found."""

    graph: CuttableGraph
    laboratory: Laboratory
    tolerance: float
    example: Arrays

    def smallest(self, whole: _Shown) -> tuple[_Shown, str]:
        """The smallest model that shows a difference, and the first tensor that differs."""
        prefix, right = self._shortest_prefix(whole)
        wrong = sorted(prefix.comparison.wrong(self.tolerance), key=self.graph.place_of)
        tensor = next((name for name in wrong if self.graph.place_of(name) >= right), wrong[0])
        _log.info("the first wrong tensor is %s", tensor)
        return self._fewest_ancestors(tensor) or prefix, tensor

    def _shortest_prefix(self, whole: _Shown) -> tuple[_Shown, int]:
        """The shortest beginning that differs, and the number of nodes up to which nothing does."""
        lengths = [0, *self.graph.prefix_lengths()]
        shown = {lengths[-1]: whole}

        def differs(position: int) -> bool:
            length = lengths[position]
            outputs = self.graph.outputs_of_prefix(length)
            found = self._try(self.graph.cut(outputs), self.example, f"the first {length} nodes") if outputs else None
            if found:
                shown[length] = found
            return found is not None

        last = _first(differs, 0, len(lengths) - 1)
        return shown[lengths[last]], lengths[last - 1]

    def _fewest_ancestors(self, tensor: str) -> _Shown | None:
        """A model of as few of the nodes before a tensor as show that it differs; None where they do not."""
        ancestors = self.graph.ancestors(tensor)
        shown: dict[int, _Shown] = {}

        def differs(number: int) -> bool:
            found = self._try_alone(tensor, ancestors[:number])
            if found:
                shown[number] = found
            return found is not None

        number, right = 1, 0
        while not differs(number):
            if number == len(ancestors):
                return None
            number, right = min(2 * number, len(ancestors)), number
        return shown[_first(differs, right, number)]

    def _try_alone(self, tensor: str, nodes: Sequence[int]) -> _Shown | None:
        """A model of some nodes with the inputs that ONNX Runtime computes, if it differs."""
        taken = self.graph.taken_from_others(nodes)
        if not all(map(self.graph.has_static_shape, taken)):
            return None
        values = self.laboratory.reference(self.graph.cut(taken), self.example) if taken else {}
        given = [name for name in taken if self.graph.is_varying(name)]
        constants = {name: value for name, value in values.items() if name not in given}
        model = self.graph.cut([tensor], given, constants)
        return self._try(model, {**self.example, **values}, f"the last {len(nodes)} of them alone")

    def _try(self, model: onnx.ModelProto, example: Arrays, called: str) -> _Shown | None:
        """The model, if its outputs differ; one that cannot be compiled alone shows nothing."""
        try:
            (comparison,) = self.laboratory.compare(model, [example])
        except AnsorMlflowError as err:
            _log.info("%s: not comparable (%s)", called, err)
            return None
        _log.info("%s: largest relative error %.3g", called, comparison.worst.max_rel_error)
        return _Shown(model, comparison) if comparison.wrong(self.tolerance) else None


def _first(is_true: Callable[[int], bool], low: int, high: int) -> int:
    """A number that something is true of, and not of the one before it, by bisection: true of `high`, not of `low`."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_true(middle) else (middle, high)
    return high


def _described(
    shown: _Shown, tensor: str, nodes: Sequence[onnx.NodeProto], directory: Path, command: str
) -> WrongTensor:
    comparison = shown.comparison
    actual, expected = comparison.actual[tensor], comparison.expected[tensor]
    is_of_same_shape = actual.shape == expected.shape
    index = comparison.largest_difference(tensor) if is_of_same_shape else ()
    place, node = next((place, node) for place, node in enumerate(nodes) if tensor in node.output)
    return WrongTensor(
        tensor=tensor,
        operator=f"{node.domain}.{node.op_type}".lstrip("."),
        node=node.name,
        place=place,
        shape=expected.shape,
        actual_shape=actual.shape,
        dtype=str(expected.dtype),
        max_abs_error=comparison.deviations[tensor].max_abs_error,
        max_rel_error=comparison.deviations[tensor].max_rel_error,
        index=index,
        actual=float(actual[index]) if is_of_same_shape else None,
        expected=float(expected[index]) if is_of_same_shape else None,
        operators=tuple(node.op_type for node in shown.model.graph.node),
        directory=str(directory),
        command=command,
    )
