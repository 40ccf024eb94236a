"""Models of one operator, computed by ONNX Runtime and, untuned, by TVM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from ansor_mlflow.codegen import pass_config, tir_pipeline
from ansor_mlflow.lowering import LoweredNetwork
from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.settings import LoweringSettings

if TYPE_CHECKING:
    from tvm.target import Target

MICROSOFT = "com.microsoft"


def one_operator(
    op_type: str,
    data: Mapping[str, np.ndarray],
    constants: Mapping[str, Any] | None = None,
    *,
    inputs: Sequence[str] | None = None,
    outputs: Sequence[int] = (TensorProto.FLOAT,),
    opset: int = 13,
    domain: str = "",
    after_conv: bool = False,
    **attributes: Any,
) -> onnx.ModelProto:
    """A model of one node, whose inputs are the data, then the constants, unless `inputs` names them. With `after_conv`
    the first of the data goes through a convolution, so that a layout decides on the operator.
    """
    values = dict(constants or {})
    names = list(inputs or [*data, *values])
    nodes = []
    if after_conv:
        first, array = next(iter(data.items()))
        channels = array.shape[1]
        values["kernel"] = np.random.default_rng(7).normal(size=(channels, channels, *[1] * (array.ndim - 2)))
        nodes.append(helper.make_node("Conv", [first, "kernel"], ["conv"]))
        names = ["conv" if name == first else name for name in names]
    results = {f"y{index}": dtype for index, dtype in enumerate(outputs)}
    nodes.append(helper.make_node(op_type, names, list(results), domain=domain, **attributes))
    graph = helper.make_graph(
        nodes,
        op_type,
        [helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for k, v in data.items()],
        [
            helper.make_tensor_value_info(name, dtype, None)
            for name, dtype in zip(results, outputs, strict=True)
            if dtype
        ],
        [numpy_helper.from_array(_array(value), name) for name, value in values.items()],
    )
    opsets = [helper.make_opsetid("", opset), *([helper.make_opsetid(domain, 1)] if domain else [])]
    return helper.make_model(graph, ir_version=8, opset_imports=opsets)


def run_onnxruntime(model: onnx.ModelProto, data: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """The outputs, computed as the nodes say."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, dict(data))


def run_lowered(lowered: LoweredNetwork, target: Target, data: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """The outputs of the untuned functions, compiled as a model's library is."""
    import tvm

    with tvm.transform.PassContext(config=pass_config(target)):
        compiled = tvm.compile(lowered.mod, target, tir_pipeline=tir_pipeline(target))
    machine = tvm.relax.VirtualMachine(compiled, tvm.cpu())
    result = machine["main"](*(tvm.runtime.tensor(np.asarray(value)) for value in data.values()))
    return [output.numpy() for output in ([result] if hasattr(result, "numpy") else result)]


def assert_computes_the_same(
    model: onnx.ModelProto, target: Target, data: Mapping[str, np.ndarray], *, atol: float = 1e-5
) -> LoweredNetwork:
    """Compares TVM with ONNX Runtime in the layout with the channels last."""
    lowered = lower(model, target, LoweringSettings(layout="NHWC"))
    outputs = run_lowered(lowered, target, data)
    for output, expected in zip(outputs, run_onnxruntime(model, data), strict=True):
        assert output.dtype == expected.dtype
        np.testing.assert_allclose(output.astype(np.float64), expected.astype(np.float64), rtol=1e-4, atol=atol)
    return lowered


def _array(value: Any) -> np.ndarray:
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype == np.float64 else array
