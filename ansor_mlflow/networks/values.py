"""Gives inputs values for good, and takes the branches that are decided then: those of `If` whose condition is known.

ONNX Runtime takes them, too, and may crash over it where a branch holds others (version 1.31).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from ansor_mlflow.errors import UserInputError, shortened
from ansor_mlflow.graphs import own_names, rename
from ansor_mlflow.tensors import Arrays, TensorSpec

_MAX_ANCESTORS = 64
"""A condition that takes more nodes than these is left as it is."""


def take_known_branches(model: onnx.ModelProto) -> None:
    """Puts the nodes of the branch that is taken in place of every `If` whose condition is known. Changes `model`."""
    graph = model.graph
    weights = {weight.name: weight for weight in graph.initializer}
    makers = {output: index for index, node in enumerate(graph.node) for output in node.output}
    nodes: list[onnx.NodeProto] = []
    is_taken = False
    for node in graph.node:
        branch = _known_branch(model, weights, makers, node) if node.op_type == "If" and node.input else None
        is_taken |= branch is not None
        nodes.extend([node] if branch is None else _inlined(model, node, branch))
    if is_taken:
        del graph.node[:]
        graph.node.extend(nodes)
        take_known_branches(model)  # those within


def _known_branch(
    model: onnx.ModelProto, weights: Mapping[str, onnx.TensorProto], makers: Mapping[str, int], node: onnx.NodeProto
) -> onnx.GraphProto | None:
    """The branch of an `If` that is taken; None where the node is damaged, which shape inference reports."""
    condition = _known_value(model, weights, makers, node.input[0])
    if condition is None or condition.size != 1 or not node.output:
        return None
    wanted = "then_branch" if condition.item() else "else_branch"
    branch = next((attribute.g for attribute in node.attribute if attribute.name == wanted), None)
    return branch if branch is not None and len(branch.output) == len(node.output) else None


def _inlined(model: onnx.ModelProto, node: onnx.NodeProto, branch: onnx.GraphProto) -> Iterable[onnx.NodeProto]:
    """The nodes of a branch with names that are its own, and what hands its outputs over; its weights go to `model`."""
    inner = onnx.GraphProto()
    inner.CopyFrom(branch)
    names = {name: f"{node.output[0]}/{name}" for name in own_names(inner)}
    for weight in inner.initializer:
        weight.name = names[weight.name]
    _add_weights(model, inner.initializer)
    for inner_node in inner.node:
        rename(inner_node, names)
    identities = (
        helper.make_node("Identity", [names.get(value.name, value.name)], [output], name=f"{node.name}/{output}")
        for value, output in zip(inner.output, node.output, strict=True)
        if output
    )
    return [*inner.node, *identities]


def _known_value(
    model: onnx.ModelProto, weights: Mapping[str, onnx.TensorProto], makers: Mapping[str, int], name: str
) -> npt.NDArray[Any] | None:
    """The value of a tensor that follows from initializers and constants alone; `makers` has the place of each node."""
    needed = set[int]()
    wanted, seen = [name], {name}
    while wanted:
        tensor = wanted.pop()
        if tensor in weights:
            continue
        if tensor not in makers or len(needed) == _MAX_ANCESTORS:
            return None
        needed.add(makers[tensor])
        others = {other for other in model.graph.node[makers[tensor]].input if other} - seen
        seen |= others
        wanted.extend(others)
    nodes = [model.graph.node[index] for index in sorted(needed)]
    constants = [weights[tensor] for tensor in seen if tensor in weights]
    graph = helper.make_graph(nodes, "condition", [], [helper.make_empty_tensor_value_info(name)], constants)
    try:
        (value,) = ReferenceEvaluator(helper.make_model(graph, opset_imports=model.opset_import)).run(None, {})
    except Exception:  # noqa: BLE001 - the evaluator has no error class of its own
        return None
    return np.asarray(value)


def typed_values(network: str, dtypes: Mapping[str, str], values: Mapping[str, Any]) -> Arrays:
    """Values in the dtypes of their inputs."""
    for name in values:
        if name not in dtypes:
            raise UserInputError(
                f"input_values names {name!r}, which is not an input of {network}; its inputs are {', '.join(dtypes)}"
            )
    if values and len(values) == len(dtypes):
        raise UserInputError(
            f"input_values gives all inputs of {network} a value; leave out one that differs between calls"
        )
    return {name: _typed(network, name, dtypes[name], value) for name, value in values.items()}


def require_shape(network: str, name: str, array: npt.NDArray[Any], shape: Sequence[int | str] | None) -> None:
    """Checks that a value can be repeated to the shape of its input, whose dynamic dimensions take any size."""
    if shape is None:
        return
    pairs = zip(reversed(shape), reversed(array.shape), strict=False)
    if array.ndim > len(shape) or not all(size in (1, dim) or isinstance(dim, str) for dim, size in pairs):
        raise UserInputError(
            f"input_values gives {name!r} of {network} a value of shape {list(array.shape)}; it must be a number, or "
            f"of shape ({', '.join(map(str, shape))})"
        )


def fix_values(model: onnx.ModelProto, network: str, specs: Sequence[TensorSpec], values: Arrays) -> None:
    """Makes inputs initializers with their values, which are repeated to their shapes as NumPy does."""
    kept = [value for value in model.graph.input if value.name not in values]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    for spec in specs:
        if spec.name in values:
            require_shape(network, spec.name, values[spec.name], spec.shape)
            array = np.broadcast_to(values[spec.name], spec.shape).copy()
            _add_weights(model, [numpy_helper.from_array(array, spec.name)])


def _add_weights(model: onnx.ModelProto, weights: Iterable[onnx.TensorProto]) -> None:
    """Adds initializers to a model, and to the inputs that they are listed among before IR version 4."""
    for weight in weights:
        model.graph.initializer.append(weight)
        if model.ir_version < 4:
            model.graph.input.append(helper.make_tensor_value_info(weight.name, weight.data_type, weight.dims))


def _typed(network: str, name: str, dtype: str, value: Any) -> npt.NDArray[Any]:
    given = f"input_values gives {name!r} of {network} {shortened(str(value), 60)}"
    numbers = np.array(value, dtype=object)
    if not all(isinstance(number, bool | int | float) for number in numbers.flat):
        raise UserInputError(f"{given}; it must be a number, or lists of numbers that form an array")
    with np.errstate(over="ignore", invalid="ignore"), contextlib.suppress(OverflowError, ValueError):
        array = numbers.astype(dtype)
        if all(_is_kept(number, kept.item()) for number, kept in zip(numbers.flat, array.flat, strict=True)):
            return array
    raise UserInputError(f"{given}, which is no {dtype}; give values of that type")


def _is_kept(number: bool | int | float, kept: bool | int | float) -> bool:
    """Whether a dtype has a number; a float may be rounded, but not to infinity."""
    if isinstance(kept, float):
        return bool(np.isfinite(kept)) or not np.isfinite(float(number))
    return number == kept
