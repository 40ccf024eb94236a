"""Sums of products of bytes: what was quantised stays bytes on CPUs that add these, in all forms that quantisers write.

The lowered networks run on this host, whose CPU may compute their sums in loops.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from helpers.exports import make_model, tensor
from helpers.one_operator import one_operator, run_lowered
from helpers.one_operator import run_onnxruntime as run_one
from onnx import TensorProto, helper, numpy_helper

from ansor_mlflow.device import WEIGHT_BITS, resolve_target, weight_bits
from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.measuring.compare import ReferenceSession
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.settings import LoweringSettings
from ansor_mlflow.sketches import find_programs

if TYPE_CHECKING:
    from tvm.target import Target

BITS = np.random.default_rng(3)
VNNI = "llvm -mcpu=znver4 -num-cores 2"
"""A CPU that adds products of all bytes; for another one what is lowered for it becomes plain loops."""


@pytest.fixture
def host_target(host_target: Target) -> Target:
    """This host, without AVX2 where that is exact with weights of 7 bits alone: what is lowered for it has no others.

    ONNX Runtime's sums saturate there unless it is told otherwise, and optimises.
    """
    return resolve_target("llvm -mcpu=x86-64", 2) if weight_bits(host_target) == WEIGHT_BITS - 1 else host_target


@pytest.mark.parametrize("zero_points", [(), (117,), (117, 2), ("of the data", 0)])
def test_products_of_bytes_stay_integers(
    zero_points: tuple[int | str, ...], host_target: Target, tmp_path: Path
) -> None:
    builder = GraphBuilder(seed=0)
    data, shapes = {"data": BITS.integers(0, 256, (2, 7, 64)).astype(np.uint8)}, [(2, 7, 64)]
    names = [builder.input("data", shapes[0], "uint8")]
    names.append(builder.constant("weight", BITS.integers(-120, 128, (64, 48)).astype(np.int8)))
    for name, value, dtype in zip(("zero", "weight_zero"), zero_points, (np.uint8, np.int8), strict=False):
        if isinstance(value, str):
            data["zero"] = BITS.integers(0, 256, ()).astype(np.uint8)
            names.append(builder.input("zero", (), "uint8"))
        else:
            names.append(builder.constant(name, dtype(value)))
    product = builder.node("MatMulInteger", "product", *names)
    output = builder.node("Relu", "output", builder.node("Cast", "floats", product, to=TensorProto.FLOAT))
    model = builder.build("bytes", {output: (2, 7, 48)})
    lowered = lower(model, resolve_target(VNNI, 2))
    (task,) = (task for task in lowered.tasks if "matmul_integer" in task.info.name)
    assert "uint8" in task.mod.script()
    (found,) = run_lowered(lowered, host_target, data)
    onnx.save(model, tmp_path / "bytes.onnx")
    (expected,) = ReferenceSession(tmp_path / "bytes.onnx", 1, exact=True).run(data).values()
    np.testing.assert_array_equal(found, expected)


def factors_of_steps(
    builder: GraphBuilder,
    shape: tuple[int, ...],
    weight: np.ndarray,
    *,
    dtype: type,
    zero_point: int,
    axis: int | None,
    bias_size: int,
) -> list[str]:
    """Data and weights that were quantised, these along an axis or with one scale, and a bias unless its size is 0."""
    steps = [builder.constant("scale", np.float32(0.03)), builder.constant("zero", dtype(zero_point))]
    levels = builder.node("QuantizeLinear", "levels", builder.input("data", shape), *steps)
    size, by_axis = ((), {}) if axis is None else ((weight.shape[axis],), {"axis": axis})
    weight_steps = [
        builder.constant("weight_scale", BITS.uniform(0.01, 0.02, size).astype(np.float32)),
        builder.constant("weight_zero", np.zeros(size, weight.dtype)),
    ]
    weight_levels = builder.constant("weight", weight)
    factors = [
        builder.node("DequantizeLinear", "values", levels, *steps),
        builder.node("DequantizeLinear", "weights", weight_levels, *weight_steps, **by_axis),
    ]
    if bias_size:
        factors.append(builder.constant("bias", BITS.normal(size=bias_size).astype(np.float32)))
    return factors


def product_of_steps(
    op_type: str = "MatMul",
    *,
    dtype: type = np.uint8,
    zero_point: int = 117,
    weight_dtype: type = np.int8,
    axis: int | None = 1,
    bias: bool = False,
    **attributes: Any,
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A product of 7 × 64 and 64 × 48 values that were quantised, by column, by row, or with one scale."""
    builder = GraphBuilder(seed=0)
    data = {"data": BITS.normal(size=(7, 64)).astype(np.float32)}
    shape, lowest = (48, 64) if attributes.get("transB") else (64, 48), np.iinfo(weight_dtype).min
    weight = BITS.integers(-120, 121, shape).clip(lowest).astype(weight_dtype)
    inputs = factors_of_steps(
        builder, (7, 64), weight, dtype=dtype, zero_point=zero_point, axis=axis, bias_size=48 if bias else 0
    )
    output = builder.node("Relu", "output", builder.node(op_type, "product", *inputs, **attributes))
    return builder.build("steps", {output: (7, 48)}), data


@pytest.mark.parametrize(
    ("arguments", "are_bytes"),
    [
        ({}, True),
        ({"dtype": np.int8, "zero_point": -5, "axis": None}, True),
        ({"zero_point": 0, "op_type": "Gemm", "bias": True}, True),
        ({"op_type": "Gemm", "transB": 1, "axis": 0}, True),
        ({"axis": 0}, False),
        ({"weight_dtype": np.uint8}, False),
        ({"op_type": "Gemm", "alpha": 2.0}, False),
    ],
    ids=str,
)
def test_products_of_what_was_quantised_are_those_of_bytes(
    arguments: dict[str, Any], are_bytes: bool, host_target: Target
) -> None:
    model, data = product_of_steps(**arguments)
    lowered = lower(model, resolve_target(VNNI, 2))
    assert any("matmul_integer" in task.info.name for task in lowered.tasks) == are_bytes
    (found,) = run_lowered(lowered, host_target, data)
    np.testing.assert_allclose(found, run_one(model, data)[0], rtol=0, atol=1e-5)


def convolution_of_steps(
    shape: tuple[int, ...] = (2, 16, 9, 8),
    *,
    channels: int = 8,
    dtype: type = np.uint8,
    zero_point: int = 0,
    axis: int | None = 0,
    bias: bool = False,
    **attributes: Any,
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A convolution with a kernel of three along each axis of values that were quantised."""
    builder = GraphBuilder(seed=0)
    num_axes, group = len(shape) - 2, attributes.get("group", 1)
    data = {"data": BITS.normal(size=shape).astype(np.float32)}
    kernel = BITS.integers(-120, 121, (channels, shape[1] // group, *[3] * num_axes)).astype(np.int8)
    inputs = factors_of_steps(
        builder, shape, kernel, dtype=dtype, zero_point=zero_point, axis=axis, bias_size=channels if bias else 0
    )
    output = builder.node("Relu", "output", builder.node("Conv", "convolution", *inputs, **attributes))
    model = builder.build("steps", {output: ()})
    outputs = run_one(model, data)
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info(output, TensorProto.FLOAT, outputs[0].shape))
    return model, data


@pytest.mark.parametrize(
    ("arguments", "are_bytes"),
    [
        ({"pads": [1, 1, 1, 1], "bias": True}, True),
        ({"pads": [1, 0, 2, 1], "zero_point": 117, "axis": None}, True),
        ({"dtype": np.int8, "zero_point": -5, "strides": [2, 1], "pads": [0, 1, 0, 1]}, True),
        ({"shape": (1, 3, 11, 10), "zero_point": 9, "pads": [1, 1, 1, 1]}, True),
        ({"shape": (1, 8, 30), "dilations": [4], "pads": [4, 4]}, True),
        ({"shape": (1, 4, 5, 6, 7), "channels": 4}, True),
        ({"group": 2}, False),
        ({"channels": 6}, False),
        ({"auto_pad": "SAME_UPPER"}, False),
    ],
    ids=str,
)
def test_convolutions_of_what_was_quantised_are_those_of_bytes(
    arguments: dict[str, Any], are_bytes: bool, host_target: Target
) -> None:
    model, data = convolution_of_steps(**arguments)
    lowered = lower(model, resolve_target(VNNI, 2))
    assert any('"int8"' in task.mod.script() for task in lowered.tasks if "conv" in task.info.name) == are_bytes
    (found,) = run_lowered(lowered, host_target, data)
    np.testing.assert_allclose(found, run_one(model, data)[0], rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    "arguments",
    [
        {"zero_point": 117, "pads": [1, 1, 1, 1], "bias": True},
        {"dtype": np.int8, "zero_point": -5, "strides": [2, 1], "axis": None},
        {"shape": (1, 16, 30), "dilations": [2], "pads": [4, 0]},
    ],
    ids=str,
)
def test_quantised_convolutions_of_single_channels_read_bytes(arguments: dict[str, Any], host_target: Target) -> None:
    model, data = convolution_of_steps(channels=16, group=16, **arguments)
    lowered = lower(model, resolve_target(VNNI, 2))
    (convolution,) = (task for task in lowered.tasks if "conv" in task.info.name)
    assert str(convolution.mod["main"].params[0].ty.dtype) in ("int8", "uint8")
    (found,) = run_lowered(lowered, host_target, data)
    np.testing.assert_allclose(found, run_one(model, data)[0], rtol=0, atol=5e-5)


@pytest.mark.parametrize("cpu", [VNNI, "llvm -mcpu=haswell"])
@pytest.mark.parametrize("scale", [0.0, 1e-40, 1e30, 0.125])
def test_what_is_quantised_with_a_scale_that_has_no_reciprocal_saturates(
    scale: float, cpu: str, host_target: Target
) -> None:
    """It is divided by it, as ONNX says."""
    model, data = convolution_of_steps(pads=[1, 1, 1, 1])
    model.graph.initializer.append(numpy_helper.from_array(np.float32(scale), "last_scale"))
    model.graph.initializer.append(numpy_helper.from_array(np.int8(3), "last_zero"))
    node = helper.make_node("QuantizeLinear", [model.graph.node[-2].output[0], "last_scale", "last_zero"], ["y"])
    model.graph.node.append(node)
    shape = [dim.dim_value for dim in model.graph.output[0].type.tensor_type.shape.dim]
    model.graph.output.append(helper.make_tensor_value_info("y", TensorProto.INT8, shape))
    lowered = lower(model, resolve_target(cpu, 2))
    expected, found = run_one(model, data), run_lowered(lowered, host_target, data)
    steps = abs(expected[1].astype(int) - found[1].astype(int))
    assert (len(np.unique(expected[1])) <= 2) == (scale != 0.125)
    if scale == 0.125:
        assert steps.max() <= 1
    assert np.mean(steps > 0) <= 0.01  # a sum that is almost zero may be on its other side


@pytest.mark.parametrize("opset", [10, 13, 19, 21, 23])
def test_quantised_layers_of_all_versions_of_onnx_stay_bytes(opset: int, host_target: Target) -> None:
    constants = {
        "scale": np.float32(0.05),
        "zero": np.uint8(100),
        "levels": BITS.integers(-120, 121, (8, 4, 3, 3)).astype(np.int8),
        "weight_scale": np.float32(0.01),
        "weight_zero": np.int8(0),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["bytes"]),
        helper.make_node("DequantizeLinear", ["bytes", "scale", "zero"], ["data"]),
        helper.make_node("DequantizeLinear", ["levels", "weight_scale", "weight_zero"], ["weights"]),
        helper.make_node("Conv", ["data", "weights"], ["y"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
    ]
    shape = (2, 4, 6, 7)
    model = make_model(nodes, [tensor("x", shape)], [tensor("y", (2, 8, 6, 7))], constants, opset=opset)
    lowered, data = lower(model, resolve_target(VNNI, 2)), {"x": BITS.normal(size=shape).astype(np.float32)}
    (convolution,) = (task.mod["main"] for task in lowered.tasks if "conv" in task.info.name)
    assert {str(param.ty.dtype) for param in convolution.params} >= {"uint8", "int8"}
    np.testing.assert_allclose(run_lowered(lowered, host_target, data)[0], run_one(model, data)[0], rtol=0, atol=5e-5)


def test_the_zero_points_around_an_image_are_part_of_its_convolution() -> None:
    """What quantises it asks nothing about places then, and puts its channels beside each other."""
    model, _ = convolution_of_steps(shape=(1, 3, 64, 64), zero_point=9, pads=[1, 1, 1, 1])
    target = resolve_target(VNNI, 2)
    tasks = lower(model, target).tasks
    (image,) = (task for task in tasks if "pad" in task.info.name)
    (convolution,) = (task for task in tasks if "conv2d" in task.info.name)
    assert (image.info.name.count("pad"), convolution.mod.script().count("if_then_else")) == (1, 1)
    programs = find_programs(image.mod, target)
    assert programs is not None
    assert programs.first_decision == "rows: lanes 1, parallel, columns 4"


@pytest.mark.parametrize(("weight_dtype", "zero_point"), [(np.int8, 3), (np.uint8, 3), (np.int8, "of the data")])
def test_convolutions_of_integers(weight_dtype: type, zero_point: int | str, host_target: Target) -> None:
    is_known = isinstance(zero_point, int)
    data = {"x": BITS.integers(0, 256, (1, 8, 7, 6)).astype(np.uint8)}
    if not is_known:
        data["zero"] = BITS.integers(0, 256, ()).astype(np.uint8)
    constants = {"w": BITS.integers(0, 100, (4, 8, 3, 3)).astype(weight_dtype)}
    constants |= {"zero": np.uint8(zero_point)} if is_known else {}
    inputs = ["x", "w", "zero"]
    model = one_operator("ConvInteger", data, constants, inputs=inputs, outputs=[TensorProto.INT32], pads=[1, 1, 1, 1])
    lowered = lower(model, resolve_target(VNNI, 2))
    are_bytes = any('"int8"' in task.mod.script() for task in lowered.tasks if "conv" in task.info.name)
    assert are_bytes == (is_known and weight_dtype is np.int8)
    (found,) = run_lowered(lowered, host_target, data)
    np.testing.assert_array_equal(found, run_one(model, data)[0])


def test_bytes_stay_bytes_where_all_else_has_16_bits(host_target: Target) -> None:
    model, data = product_of_steps()
    lowered = lower(model, resolve_target(VNNI, 2), LoweringSettings(dtype="float16"))
    assert any("matmul_integer" in task.info.name for task in lowered.tasks)
    (found,) = run_lowered(lowered, host_target, data)
    np.testing.assert_allclose(found, run_one(model, data)[0], rtol=0, atol=0.1)


@pytest.mark.parametrize(
    ("shape", "weight_zero"),
    [((32, 8), 0), ((30, 8), 128), ((32, 6), 128)],
    ids=["weights beyond 8 bits", "terms that are no packs of four", "columns that are no vectors"],
)
def test_other_products_of_integers_are_floats(shape: tuple[int, int], weight_zero: int, host_target: Target) -> None:
    data = {"x": BITS.integers(0, 256, (5, shape[0])).astype(np.uint8)}
    weight = BITS.integers(0, 256, shape).astype(np.uint8)
    constants = {"w": weight, "xz": np.uint8(9), "wz": np.uint8(weight_zero)}
    model = one_operator("MatMulInteger", data, constants, outputs=[TensorProto.INT32])
    lowered = lower(model, resolve_target(VNNI, 2))
    assert not any("matmul_integer" in task.info.name for task in lowered.tasks)
    (found,) = run_lowered(lowered, host_target, data)
    np.testing.assert_array_equal(found, run_one(model, data)[0])


@pytest.mark.parametrize("shape", [(128, 384), (257, 129), (3,)])
def test_a_range_is_measured_and_used_in_one_function(shape: tuple[int, ...], host_target: Target) -> None:
    """On CPUs that add products of bytes. It had been two sums, some numbers, and a function of all elements."""
    data = {"x": BITS.normal(size=shape).astype(np.float32)}
    outputs = [TensorProto.UINT8, TensorProto.FLOAT, TensorProto.UINT8]
    model = one_operator("DynamicQuantizeLinear", data, outputs=outputs)
    lowered = lower(model, resolve_target(VNNI, 2))
    assert lowered.tasks == ()
    expected, found = run_one(model, data), run_lowered(lowered, host_target, data)
    steps = abs(expected[0].astype(int) - found[0].astype(int))
    assert steps.max() <= 1
    assert steps.mean() <= 1e-4
    np.testing.assert_array_equal(found[1:], expected[1:])


@pytest.mark.parametrize("places", [[0], [63], [*range(64)], [*range(16, 64)], [*range(99)]])
def test_a_range_with_nan_in_it_is_none(places: list[int], host_target: Target) -> None:
    """ONNX Runtime's is one only where the last vector of its extrema has numbers."""
    data = {"x": np.linspace(-1, 2, 100, dtype=np.float32)}
    data["x"][places] = np.nan
    model = one_operator(
        "DynamicQuantizeLinear", data, outputs=[TensorProto.UINT8, TensorProto.FLOAT, TensorProto.UINT8]
    )
    assert np.isnan(run_lowered(lower(model, resolve_target(VNNI, 2)), host_target, data)[1])
