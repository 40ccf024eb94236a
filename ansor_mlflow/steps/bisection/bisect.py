"""The command `bisect`: the first tensor of a network that is wrong, and the smallest model that shows it."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx

from ansor_mlflow.device import Device
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.files import scratch_directory
from ansor_mlflow.foreign import for_shell
from ansor_mlflow.measuring import Deviation, choose_examples, require_examples, tolerance_for
from ansor_mlflow.model import require_linker
from ansor_mlflow.networks import write_onnx
from ansor_mlflow.parameters import BisectOptions
from ansor_mlflow.steps.bisection.finding import (
    INPUTS_FILE,
    MODEL_FILE,
    Bisection,
    WrongTensor,
    require_own_directory,
    save,
    save_report,
)
from ansor_mlflow.steps.bisection.search import Comparison, CuttableGraph, Laboratory, Search
from ansor_mlflow.tensors import all_sizes
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
        shown, tensor = Search(CuttableGraph(network.model), laboratory, tolerance, first.inputs).smallest(first)
    save(directory, shown.model, shown.inputs, shown.expected, shown.actual)
    wrong = _described(shown, tensor, network.model.graph.node, directory, _command(options, directory))
    bisection = replace(bisection, wrong=wrong)
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


def _described(
    shown: Comparison, tensor: str, nodes: Sequence[onnx.NodeProto], directory: Path, command: str
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
        directory=str(directory),
        command=command,
    )
