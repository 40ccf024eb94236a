"""ONNX's own backend cases, as models of one operator in each dtype and form that ONNX allows it."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

CONSTANT_INPUTS = {
    "BatchNormalization": {1, 2, 3, 4},
    "Clip": {1, 2},
    "Conv": {1, 2},
    "ConvTranspose": {1, 2},
    "CumSum": {1},
    "DequantizeLinear": {1, 2},
    "Dropout": {1, 2},
    "Expand": {1},
    "GRU": {1, 2, 3, 4},
    "InstanceNormalization": {1, 2},
    "LSTM": {1, 2, 3, 4, 7},
    "LayerNormalization": {1, 2},
    "OneHot": {1, 2},
    "Pad": {1, 2, 3},
    "QLinearConv": {*range(1, 9)},
    "QuantizeLinear": {1, 2},
    "RNN": {1, 2, 3, 4},
    **{
        f"Reduce{name}": {1}
        for name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
    },
    "Reshape": {1},
    "Resize": {1, 2, 3},
    "RoiAlign": {2},
    "Slice": {1, 2, 3, 4},
    "Split": {1},
    "Squeeze": {1},
    "Tile": {1},
    "TopK": {1},
    "Trilu": {1},
    "Unsqueeze": {1},
}
"""Inputs that are constants in exported models, by operator."""
RANDOM = {"Bernoulli", "Multinomial", "RandomNormalLike", "RandomUniformLike"}
_DTYPES = {
    TensorProto.DataType.Name(dtype).lower(): dtype
    for dtype in (
        *(TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.BOOL),
        *(TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64),
        *(TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64),
    )
}
_OPSETS = (21, 18, 17, 13, 11)
"""Older versions of ONNX's operators, of which exported models are; a case's own is the newest."""
_MAX_FORMS = 1
"""Cases of an operator that are tried in other dtypes than their own."""


@dataclass(frozen=True)
class Case:
    """A model of one operator, with the inputs of ONNX's backend case."""

    operator: str
    form: str
    opset: int
    dtype: str
    model: onnx.ModelProto
    inputs: dict[str, np.ndarray]
    varied: tuple[str, ...]
    """Inputs of the dtype, which get values of every class."""

    @property
    def name(self) -> str:
        return f"{self.form}, version {self.opset}, {self.dtype}"


@dataclass(frozen=True)
class Plan:
    """What a case is made of."""

    backend_case: Any
    dtype: int
    opsets: tuple[int, ...]
    """Versions of ONNX's operators that TVM imports by the same code, of which the first that loads is taken."""

    @property
    def operator(self) -> str:
        return str(self.backend_case.model.graph.node[0].op_type)


def plans() -> Iterator[Plan]:
    """Yields all of them, in an order that does not change."""
    num_forms: Counter[str] = Counter()
    for case in _backend_cases():
        node = case.model.graph.node[0]
        num_forms[node.op_type] += 1
        versions = _versions(node, _opset(case.model))
        for dtype in _dtypes(node, versions[0][0], case, num_forms[node.op_type] <= _MAX_FORMS):
            yield from (Plan(case, dtype, opsets) for opsets in versions)


def make(plan: Plan) -> Case | None:
    """The case of a plan; None where ONNX Runtime does not load its model."""
    made = (_case(plan.backend_case, opset, plan.dtype) for opset in plan.opsets)
    return next((case for case in made if case is not None and _loads(case.model)), None)


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """ONNX Runtime with the nodes as they are."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _loads(model: onnx.ModelProto) -> bool:
    try:
        session(model)
    except Exception:  # noqa: BLE001  ONNX Runtime has an error class for each status
        return False
    return True


def _versions(node: onnx.NodeProto, native: int) -> list[tuple[int, ...]]:
    """Versions of ONNX's operators that the node may be of, by the code with which TVM imports it."""
    from tvm.relax.frontend.onnx import onnx_frontend

    known = onnx_frontend._get_convert_map()
    by_code: dict[str, list[int]] = {}
    for opset in (native, *(older for older in _OPSETS if older < native)):
        if (code := _import_code(node, opset, known)) is None:
            continue
        schema = _schema(node, opset)
        fits = schema.min_input <= len(node.input) <= schema.max_input and len(node.output) <= schema.max_output
        if fits and all(attribute.name in schema.attributes for attribute in node.attribute):
            by_code.setdefault(code, []).append(opset)
    return [tuple(opsets) for opsets in by_code.values()] or [(native,)]


def _backend_cases() -> list[Any]:
    from onnx.backend.test.case.node import collect_testcases

    os.environ["ALLOW_RELEASED_ONNX_OPSET_ONLY"] = "0"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: list[Any] = collect_testcases(None)
    return [
        case
        for case in found
        if len(case.model.graph.node) == 1
        and case.model.graph.node[0].op_type not in RANDOM
        and case.model.graph.node[0].domain in ("", "ai.onnx")
        and all(isinstance(array, np.ndarray | np.generic) for array in case.data_sets[0][0])
        and all(value.type.HasField("tensor_type") for value in case.model.graph.input)
    ]


def _opset(model: onnx.ModelProto) -> int:
    return next(int(opset.version) for opset in model.opset_import if opset.domain in ("", "ai.onnx"))


def _schema(node: onnx.NodeProto, opset: int) -> Any:
    return onnx.defs.get_schema(node.op_type, opset, "")


def _import_code(node: onnx.NodeProto, opset: int, known: Any) -> str | None:
    """The name of TVM's function for a version of an operator; None where ONNX or TVM knows none that is so old."""
    try:
        _schema(node, opset)
        return str(known[node.op_type].get_converter(opset).__name__) if node.op_type in known else ""
    except Exception:  # noqa: BLE001  TVM raises errors of many kinds
        return None


def _dtypes(node: onnx.NodeProto, opset: int, case: Any, is_varied: bool) -> list[int]:
    first = case.model.graph.input[0].type.tensor_type.elem_type if case.model.graph.input else 0
    schema = _schema(node, opset)
    if not is_varied or not schema.inputs:
        return [first]
    allowed = schema.inputs[0].types
    others = [dtype for name, dtype in _DTYPES.items() if f"tensor({name})" in allowed and dtype != first]
    return [first, *others]


def _case(case: Any, opset: int, dtype: int) -> Case | None:
    """A case with all inputs and outputs that share the type of the first in another one."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx"):
            entry.version = opset
    graph = model.graph
    (node,) = graph.node
    schema = _schema(node, opset)
    values = {value.name: np.asarray(array) for value, array in zip(graph.input, case.data_sets[0][0], strict=True)}
    native = graph.input[0].type.tensor_type.elem_type if graph.input else 0
    names = _sharing(node.input, schema.inputs), _sharing(node.output, schema.outputs)
    variable = schema.inputs[0].type_str if schema.inputs else ""
    varied = [name for name, kind in names[0].items() if kind == variable and name in values]
    if dtype != native:
        for name in varied:
            values[name] = _cast(values[name], dtype)
        for value in (*graph.input, *graph.output):
            if {**names[0], **names[1]}.get(value.name) == variable:
                value.type.tensor_type.elem_type = dtype
    positions = CONSTANT_INPUTS.get(node.op_type, set())
    for position in positions & set(range(len(node.input))):
        if (name := node.input[position]) in values:
            graph.initializer.append(numpy_helper.from_array(values.pop(name), name))
            graph.input.remove(next(value for value in graph.input if value.name == name))
    if not values or any(array.dtype.kind in "OUS" for array in values.values()):
        return None
    model.ir_version = min(model.ir_version, 10)
    name = case.name.removeprefix("test_")
    kind = TensorProto.DataType.Name(dtype).lower()
    return Case(node.op_type, name, opset, kind, model, values, tuple(n for n in varied if n in values))


def _sharing(names: Any, formal: Any) -> dict[str, str]:
    """The type variable of each tensor of a node; the last formal one may stand for many."""
    if not formal:
        return {}
    return {name: formal[min(place, len(formal) - 1)].type_str for place, name in enumerate(names) if name}


def _cast(array: np.ndarray, dtype: int) -> np.ndarray:
    """The numbers in another dtype, with more than zeros and ones among them."""
    target = helper.tensor_dtype_to_np_dtype(dtype)
    if array.dtype.kind == "f" and np.dtype(target).kind in "iu":
        array = np.round(array * 4)
    if np.dtype(target).kind == "u" and array.dtype.kind in "fi":
        array = np.abs(array)
    if np.dtype(target).kind in "iu" and array.dtype.kind in "fiu":
        limits = np.iinfo(target)
        array = np.clip(array, max(limits.min, -100), 100)
    return array.astype(target)
