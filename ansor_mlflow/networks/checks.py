"""Whether an ONNX file says what it may say: the libraries that read it do not all ask, and some crash.

`onnx.checker` asks for more, and so refuses files that all runtimes take.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from functools import cache
from graphlib import CycleError, TopologicalSorter

import onnx
from google.protobuf.message import Message  # type: ignore[import-untyped]
from onnx import TensorProto, external_data_helper, helper, inliner

from ansor_mlflow.errors import UserInputError, one_line
from ansor_mlflow.graphs import branches_of, inputs_of, nodes_of, producers_of, tensors_of

_MAX_TENSOR_BYTES = 2**33
"""No layer has a larger input, output or weight; what claims to is damaged, or would take all memory."""
_MAX_RANK = 26
"""TVM names axes by letters (`InitialLayout`)."""
_MAX_NODES = 1_000_000
"""Nodes of a graph whose functions are inlined: a few that call each other twice are billions."""
_MAX_NAME = 60
"""Characters of a name that messages show."""
_DOMAINS = {
    *("", "ai.onnx", "ai.onnx.ml", "ai.onnx.preview.training", "ai.onnx.training"),
    *("com.microsoft", "com.microsoft.experimental", "com.microsoft.nchwc", "com.ms.internal.nhwc"),
}
"""Domains whose operators ONNX or ONNX Runtime knows."""
_BITS = {"INT2": 2, "UINT2": 2, "INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4}
"""Types of which a byte holds several elements."""
_FIELDS: dict[int, str] = {
    TensorProto.FLOAT: "float_data",
    TensorProto.INT32: "int32_data",
    TensorProto.INT64: "int64_data",
    TensorProto.DOUBLE: "double_data",
    TensorProto.STRING: "string_data",
}
"""Where a tensor has its elements, one by one, if not as bytes."""


def require_sound(model: onnx.ModelProto, network: str) -> onnx.ModelProto:
    """Checks what a file says of itself, of its graph and of its weights; those in other files are not looked at.

    The model that is returned has no functions of its own, which are inlined, and its nodes in topological order: some
    tools that rewrite graphs add nodes at the end, and ONNX Runtime does not mind.
    """
    _check_texts(model, network)
    _check_versions(model, network)
    model = _without_functions(model, network)
    _check_operators(model, network)
    _sort(model.graph)
    _check_names(model.graph, network)
    require_data(model, network)
    return model


def require_data(model: onnx.ModelProto, network: str) -> None:
    """Checks that weights and constants are as large as they say; those in other files only that they are no giants."""
    for tensor in tensors_of(model.graph):
        size = require_tensor(tensor, network)
        if external_data_helper.uses_external_data(tensor):
            continue
        if tensor.HasField("raw_data"):
            wanted, found, unit = size, len(tensor.raw_data), "bytes"
        elif tensor.data_type in _FIELDS:
            wanted, found, unit = math.prod(tensor.dims), len(getattr(tensor, _FIELDS[tensor.data_type])), "elements"
        else:
            continue
        if wanted != found:
            dims = list(tensor.dims)
            raise _error(network, f"{_called(tensor)} has {found} {unit}, and its shape {dims} takes {wanted}")


def require_sizes(model: onnx.ModelProto, network: str) -> None:
    """Checks that no tensor whose shape is known would be too large, or has too many dimensions."""
    for value in (*model.graph.input, *model.graph.value_info, *model.graph.output):
        tensor = value.type.tensor_type
        dims = [dim.dim_value for dim in tensor.shape.dim]
        if tensor.elem_type and tensor.elem_type in TensorProto.DataType.values():  # 0 of a sequence
            _check_size(value.name, dims, tensor.elem_type, network)


def _check_texts(message: Message, network: str) -> None:
    """Checks that texts are UTF-8: protobuf does not, and gives bytes for others, which no library expects."""
    for field, content in message.ListFields():
        if field.type not in (field.TYPE_STRING, field.TYPE_MESSAGE):
            continue
        for part in [content] if isinstance(content, str | bytes | Message) else content:
            if isinstance(part, bytes):
                raise _error(network, f"its {field.full_name.removeprefix('onnx.')} {_shown(part)} is no text in UTF-8")
            if isinstance(part, Message):
                _check_texts(part, network)


def _check_versions(model: onnx.ModelProto, network: str) -> None:
    if model.ir_version < 1:
        raise _error(network, "the file names no version of ONNX's format")
    if model.ir_version > onnx.IR_VERSION:
        raise _error(
            network,
            f"it is of version {model.ir_version} of ONNX's format, and the package onnx {onnx.__version__} reads "
            f"versions up to {onnx.IR_VERSION}",
            "install a newer one, or export for an older version",
        )
    versions: dict[str, int] = {}
    for opset in model.opset_import:
        domain = "" if opset.domain == "ai.onnx" else opset.domain
        if versions.setdefault(domain, opset.version) != opset.version:
            raise _error(network, f"it names two versions of the operators of {domain or 'ONNX'}")
        if not 1 <= opset.version <= 1000:
            raise _error(network, f"it is of opset {opset.version} of {domain or 'ONNX'}")
    latest = onnx.defs.onnx_opset_version()
    if versions.get("", 1) > latest:
        raise _error(
            network,
            f"it is of opset {versions['']}, and the package onnx {onnx.__version__} knows them up to {latest}",
            "install a newer one, or export for an older opset",
        )


def _without_functions(model: onnx.ModelProto, network: str) -> onnx.ModelProto:
    """The model with its own functions inlined, which neither shape inference nor TVM does."""
    if not model.functions:
        return model
    functions = {_key(function): list(nodes_of(function.node)) for function in model.functions}
    calls = {key: [_key(node) for node in nodes if _key(node) in functions] for key, nodes in functions.items()}
    sizes: dict[tuple[str, str, str], int] = {}
    try:
        for key in TopologicalSorter(calls).static_order():
            sizes[key] = sum(sizes.get(_key(node), 1) for node in functions[key])
    except CycleError as err:
        name = err.args[1][0][1]
        raise _error(network, f"its function {_shown(name)} calls itself") from err
    if sum(sizes.get(_key(node), 1) for node in nodes_of(model.graph.node)) > _MAX_NODES:
        raise _error(network, f"with its functions inlined it has more than {_MAX_NODES} nodes")
    try:
        inlined: onnx.ModelProto = inliner.inline_local_functions(model)
    except Exception as err:  # it has errors of every kind for functions that do not fit
        raise _error(network, f"its functions cannot be inlined ({one_line(err)})") from err
    return inlined


def _check_operators(model: onnx.ModelProto, network: str) -> None:
    """Checks that operators are known to somebody, and that their attributes have the types that are read."""
    own = {_key(function) for function in model.functions}
    versions = {opset.domain: opset.version for opset in model.opset_import}
    for node in nodes_of(model.graph.node):
        if not node.op_type:
            raise _error(network, "a node has no operator")
        if node.domain not in _DOMAINS and _key(node) not in own:
            raise _error(
                network,
                f"the operator {_shown(f'{node.domain}.{node.op_type}')} is a custom one, which neither TVM nor ONNX "
                "Runtime knows",
                "export the model without it",
            )
        types = _attribute_types(node.op_type, versions.get(node.domain, 0), node.domain)
        for attribute in node.attribute:
            if attribute.type != types.get(attribute.name, attribute.type):
                raise _error(network, f"{_shown(attribute.name)} of a node {node.op_type} is of the wrong type")


@cache
def _attribute_types(op_type: str, version: int, domain: str) -> dict[str, int]:
    """The types of an operator's attributes; none where ONNX does not know it."""
    try:
        schema = onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return {}
    return {name: int(attribute.type.value) for name, attribute in schema.attributes.items()}  # type: ignore[attr-defined]


def _sort(graph: onnx.GraphProto) -> None:
    """Puts nodes in topological order, also those in branches; where there is none, they stay as they are."""
    for node in graph.node:
        for branch in branches_of(node):
            _sort(branch)
    producers = producers_of(graph)
    needs = {
        index: {producers[name] for name in inputs_of(node) if name in producers}
        for index, node in enumerate(graph.node)
    }
    if all(need < index for index, needed in needs.items() for need in needed):
        return
    try:
        order = list(TopologicalSorter(needs).static_order())
    except CycleError:
        return
    nodes = [graph.node[index] for index in order]
    del graph.node[:]
    graph.node.extend(nodes)


def _check_names(graph: onnx.GraphProto, network: str, around: frozenset[str] = frozenset()) -> None:
    """Checks that every tensor is made once, before it is used, also in branches."""
    if graph.sparse_initializer:
        name = graph.sparse_initializer[0].values.name
        raise _error(network, f"the weight {_shown(name)} is sparse, and only dense ones are read")
    weights = [weight.name for weight in graph.initializer]
    inputs = [value.name for value in graph.input]
    if "" in inputs:
        raise _error(network, "one of its inputs has no name")
    if not graph.output:
        raise _error(network, "it has no outputs")
    made = [name for node in graph.node for name in node.output if name]
    for group in (inputs, weights, [*dict.fromkeys([*inputs, *weights]), *made]):
        if doubles := [name for name, count in Counter(group).items() if count > 1]:
            raise _error(network, f"it has two tensors of the name {_shown(doubles[0])}")
    known = {*around, *inputs, *weights}
    for node in graph.node:
        for name in node.input:
            if name and name not in known:
                made_later = "one of its nodes depends on itself" if name in made else "no node makes it"
                raise _error(network, f"a node takes {_shown(name)}, and {made_later}")
        for branch in branches_of(node):
            _check_names(branch, network, frozenset(known))
        known.update(node.output)
    for output in graph.output:
        if output.name not in known:
            raise _error(network, f"no node makes its output {_shown(output.name)}")


def require_tensor(tensor: TensorProto, network: str) -> int:
    """The bytes that a weight or constant takes, if it has a type and a shape and is no giant."""
    if tensor.data_type not in TensorProto.DataType.values() or tensor.data_type == TensorProto.UNDEFINED:
        raise _error(network, f"{_called(tensor)} is of type {tensor.data_type}, which ONNX {onnx.__version__} has not")
    if any(dim < 0 for dim in tensor.dims):
        raise _error(network, f"{_called(tensor)} has the shape {list(tensor.dims)}")
    return _check_size(tensor.name, tensor.dims, tensor.data_type, network)


def _check_size(name: str, dims: Iterable[int], data_type: int, network: str) -> int:
    """The bytes of a tensor."""
    dims = list(dims)
    kind = helper.tensor_dtype_to_string(data_type).rpartition(".")[2]
    is_known = data_type not in (TensorProto.UNDEFINED, TensorProto.STRING)  # of others NumPy has no such size
    item_bytes = helper.tensor_dtype_to_np_dtype(data_type).itemsize if is_known else 1
    bits = _BITS.get(kind, 8 * item_bytes)
    size = -(-math.prod(dims) * bits // 8)
    if size > _MAX_TENSOR_BYTES:
        raise _error(
            network,
            f"its tensor {_shown(name)} of shape {dims} would take {size / 2**30:.4g} GiB, and "
            f"{_MAX_TENSOR_BYTES // 2**30} GiB are the most",
            "give smaller shapes, or export the model again",
        )
    if len(dims) > _MAX_RANK:
        raise _error(network, f"its tensor {_shown(name)} has {len(dims)} dimensions, and {_MAX_RANK} are the most")
    return size


def _key(of: onnx.NodeProto | onnx.FunctionProto) -> tuple[str, str, str]:
    """The key that a node and the function that it calls share."""
    name = of.name if isinstance(of, onnx.FunctionProto) else of.op_type
    return of.domain, name, getattr(of, "overload", "")


def _called(tensor: TensorProto) -> str:
    return f"the weight {_shown(tensor.name)}" if tensor.name else "a constant"


def _shown(name: str | bytes) -> str:
    """A name as messages show it, on one line."""
    return repr(name) if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]!r}…"


def _error(network: str, reason: str, hint: str = "export the model again") -> UserInputError:
    return UserInputError(f"network={network}: {reason}; {hint}")
