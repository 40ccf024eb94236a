"""Operators that TVM imports wrongly, in part, or not at all compute what ONNX Runtime computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from helpers.exports import make_model, tensor
from helpers.one_operator import MICROSOFT, assert_computes_the_same, one_operator, run_lowered, run_onnxruntime
from onnx import TensorProto, helper, numpy_helper

from ansor_mlflow.graphs import fallback_reasons, raise_opset, rewrite_operators, without_numbers
from ansor_mlflow.lowering.lower import lower

if TYPE_CHECKING:
    from tvm.target import Target

RNG = np.random.default_rng(0)
IMAGE = {"x": RNG.normal(size=(1, 2, 6, 7)).astype(np.float32)}
MANY_PIXELS = {"x": RNG.normal(size=(1, 4, 40, 50)).astype(np.float32)}


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


SPECIAL = {"x": np.array([1, np.inf, -np.inf, np.nan], np.float32)}
INDICES = {"x": np.array([[0, 2], [-1, 7]])}
REGIONS = {
    "x": RNG.normal(size=(2, 3, 9, 8)).astype(np.float32),
    "r": np.array([[1, 1, 7.5, 6], [2.2, 3.1, 9, 9], [-3, -4, 15, 30], [5, 5, 5, 5], [6, 6, 5, 4]], np.float32),
    "i": ints(0, 1, 0, 1, 1),
}
ROI = {"output_height": 4, "output_width": 3, "sampling_ratio": 2}
INT32 = {"outputs": [TensorProto.INT32]}
CASES: dict[str, tuple[str, Mapping[str, np.ndarray], dict[str, Any]]] = {
    "positive infinity": ("IsInf", SPECIAL, {"detect_negative": 0, "outputs": [TensorProto.BOOL]}),
    "negative infinity": ("IsInf", SPECIAL, {"detect_positive": 0, "outputs": [TensorProto.BOOL]}),
    "celu": ("Celu", IMAGE, {"alpha": 0.5}),
    "quick gelu": ("QuickGelu", IMAGE, {"domain": MICROSOFT}),
    "power of an integer": ("Pow", IMAGE, {"constants": {"n": np.int64(2)}}),
    "dropout": ("Dropout", IMAGE, {"outputs": [TensorProto.FLOAT, TensorProto.BOOL]}),
    "one-hot": ("OneHot", INDICES, {"constants": {"depth": ints(5), "values": np.array([0.5, 2.0])}}),
    "one-hot, axis": ("OneHot", INDICES, {"constants": {"depth": np.int64(5), "values": np.arange(2.0)}, "axis": 1}),
    "sums": ("CumSum", IMAGE, {"constants": {"axis": np.int64(2)}}),
    "sums of those before": ("CumSum", IMAGE, {"constants": {"axis": np.int64(-1)}, "exclusive": 1}),
    "sums from the end": (
        "CumSum",
        INDICES,
        {"constants": {"axis": np.int64(0)}, "reverse": 1, "outputs": [TensorProto.INT64]},
    ),
    "sums that wrap": (
        "CumSum",
        {"x": np.array([[np.iinfo(np.int64).min, 3], [np.iinfo(np.int64).min + 5, -2]])},
        {"constants": {"axis": np.int64(0)}, "outputs": [TensorProto.INT64]},
    ),
    "one part": ("Split", IMAGE, {"constants": {"sizes": ints(2)}, "axis": 1, "opset": 13, "after_conv": True}),
    "unit length": ("LpNormalization", IMAGE, {"axis": 1}),
    "sum of one": ("LpNormalization", IMAGE, {"axis": -1, "p": 1}),
    "layer norm over axes": (
        "LayerNormalization",
        IMAGE,
        {"constants": {"s": np.ones((2, 6, 7)), "b": np.ones((2, 6, 7))}, "axis": 1, "opset": 17, "after_conv": True},
    ),
    "layer norm with statistics": (
        "LayerNormalization",
        IMAGE,
        {"constants": {"s": np.ones(7)}, "outputs": [TensorProto.FLOAT] * 3, "opset": 17},
    ),
    "root mean square": ("SimplifiedLayerNormalization", IMAGE, {"constants": {"s": np.arange(7.0)}}),
    "tiles": ("Tile", {"x": RNG.normal(size=(3, 4, 5)).astype(np.float32)}, {"constants": {"n": ints(6, 4, 2)}}),
    "mean of integers": ("ReduceMean", {"x": RNG.integers(-99, 99, (3, 4, 5), np.int32)}, {**INT32, "axes": [1]}),
    "mean of all integers": ("ReduceMean", {"x": np.arange(-9, 3)}, {"outputs": [TensorProto.INT64], "keepdims": 0}),
    "mean of many pixels": ("ReduceMean", MANY_PIXELS, {"axes": [2, 1], "keepdims": 0}),
    "sum of many pixels": ("ReduceSum", MANY_PIXELS, {"constants": {"a": ints(-1, 1)}, "opset": 13}),
    "average of many pixels": ("GlobalAveragePool", MANY_PIXELS, {"after_conv": True}),
    "responses of channels": ("LRN", MANY_PIXELS, {"size": 3, "alpha": 0.5, "beta": 0.75, "after_conv": True}),
    "regions": ("RoiAlign", REGIONS, {**ROI, "opset": 16, "spatial_scale": 0.5}),
    "regions, output": (
        "RoiAlign",
        REGIONS,
        {**ROI, "opset": 16, "coordinate_transformation_mode": "output_half_pixel"},
    ),
    "regions, as before": ("RoiAlign", REGIONS, {**ROI, "opset": 10, "spatial_scale": 0.3}),
    "regions of any size": ("RoiAlign", REGIONS, {**ROI, "opset": 10, "sampling_ratio": 0}),
    "windows from below": (
        "MaxPool",
        IMAGE,
        {"auto_pad": "SAME_LOWER", "kernel_shape": [3, 2], "strides": [2, 2], "after_conv": True},
    ),
}
"""Operator, data, and what else `one_operator` takes."""


@pytest.mark.parametrize("case", CASES)
def test_a_rewritten_operator_computes_what_onnxruntime_computes(host_target: Target, case: str) -> None:
    op_type, data, arguments = CASES[case]
    assert_computes_the_same(one_operator(op_type, data, **arguments), host_target, data)


@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
@pytest.mark.parametrize("width", [3, 64])
def test_rows_are_scattered(host_target: Target, reduction: str, width: int) -> None:
    """An index is the same for all elements of a row, as that of a neighbour in a graph."""
    places = np.array([4, 1, -2, 1 if reduction != "none" else 2, 0])
    data = {
        "x": RNG.normal(size=(6, 2, width)).astype(np.float32),
        "places": places.reshape(5, 1, 1),
        "updates": RNG.normal(size=(5, 2, width)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Expand", ["places", "shape"], ["indices"]),
        helper.make_node("ScatterElements", ["x", "indices", "updates"], ["y"], axis=0, reduction=reduction),
    ]
    inputs = [tensor(name, array.shape, helper.np_dtype_to_tensor_dtype(array.dtype)) for name, array in data.items()]
    model = make_model(nodes, inputs, [tensor("y", (6, 2, width))], {"shape": ints(5, 2, width)}, opset=18)
    lowered = assert_computes_the_same(model, host_target, data)
    assert "scatter_rows" in str(lowered.mod)


@pytest.mark.parametrize("marked", [[0, 1, 0, 0, 1, 1], [0] * 6, [0, 0, 0, 1, 0, 0]])
def test_as_many_rows_are_scattered_as_values_say(marked: list[int]) -> None:
    """A detector puts the regions of each level of a pyramid into their places so, in ONNX Runtime."""
    nodes = [
        helper.make_node("NonZero", ["marked"], ["found"]),
        helper.make_node("Reshape", ["found", "column"], ["places"]),
        helper.make_node("Gather", ["rows", "found"], ["gathered"], axis=0),
        helper.make_node("Squeeze", ["gathered", "first"], ["updates"]),
        helper.make_node("Shape", ["updates"], ["shape"]),
        helper.make_node("Expand", ["places", "shape"], ["indices"]),
        helper.make_node("ScatterElements", ["x", "indices", "updates"], ["y"], axis=0),
    ]
    inputs = [tensor("marked", (6,), TensorProto.INT64), tensor("rows", (6, 2, 3)), tensor("x", (6, 2, 3))]
    model = make_model(nodes, inputs, [tensor("y", (6, 2, 3))], {"column": ints(-1, 1, 1), "first": ints(0)}, opset=18)
    rewritten = rewrite_operators(model)
    assert {"ScatterElements", "ScatterND"} & {node.op_type for node in rewritten.graph.node} == {"ScatterND"}
    data = {name: RNG.normal(size=(6, 2, 3)).astype(np.float32) for name in ("rows", "x")} | {"marked": ints(*marked)}
    (expected,), (actual,) = (run_onnxruntime(each, data) for each in (model, rewritten))
    np.testing.assert_array_equal(actual, expected)


NORMALIZATIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "GroupNormalization": (21, {"num_groups": 2}),
    "InstanceNormalization": (17, {}),
    "LayerNormalization": (17, {"axis": 2}),
    "MeanVarianceNormalization": (13, {"axes": [2, 3]}),
}
"""Version of ONNX's operators and attributes."""


@pytest.mark.parametrize("op_type", NORMALIZATIONS)
def test_a_normalization_keeps_its_digits_at_a_large_mean(host_target: Target, op_type: str) -> None:
    """ONNX Runtime does not, of those that it computes as ONNX defines them: by a difference of squares."""
    data = {"x": (RNG.normal(size=(1, 2, 6, 7)) + 3000).astype(np.float32)}
    sizes = {"GroupNormalization": 2, "InstanceNormalization": 2, "LayerNormalization": (6, 7)}.get(op_type)
    constants = {"s": np.ones(sizes), "b": np.zeros(sizes)} if sizes else {}
    opset, attributes = NORMALIZATIONS[op_type]
    lowered = lower(one_operator(op_type, data, constants, opset=opset, **attributes), host_target)
    x = data["x"].astype(np.float64)
    expected = (x - x.mean((2, 3), keepdims=True)) / np.sqrt(x.var((2, 3), keepdims=True) + 1e-5)
    np.testing.assert_allclose(run_lowered(lowered, host_target, data)[0], expected, atol=2e-3)


def variance(square: str, keepdims: int, dtype: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """The variance of (3, 40) along rows, as it is exported by hand."""

    def squared(name: str, output: str) -> onnx.NodeProto:
        return helper.make_node(square, [name, name if square == "Mul" else "two"], [output])

    reduced = {"axes": [1], "keepdims": keepdims}
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], **reduced),
        squared("x", "squares"),
        squared("mean", "square"),
        helper.make_node("ReduceMean", ["squares"], ["of squares"], **reduced),
        helper.make_node("Sub", ["of squares", "square"], ["y"]),
    ]
    y = tensor("y", (3, 1) if keepdims else (3,), dtype)
    return make_model(nodes, [tensor("x", (3, 40), dtype)], [y], {"two": np.float32(2)})


@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("square", ["Mul", "Pow"])
def test_a_difference_of_squares_becomes_a_variance(host_target: Target, square: str, keepdims: int) -> None:
    data = {"x": (RNG.normal(size=(3, 40)) + 3000).astype(np.float32)}
    outputs = run_lowered(lower(variance(square, keepdims), host_target), host_target, data)
    np.testing.assert_allclose(outputs[0], data["x"].astype(np.float64).var(1, keepdims=bool(keepdims)), rtol=1e-3)


def test_a_difference_of_rounded_squares_stays_one(host_target: Target) -> None:
    data = {"x": np.arange(120, dtype=np.int32).reshape(3, 40)}
    assert_computes_the_same(variance("Mul", 1, TensorProto.INT32), host_target, data)


def test_a_mean_of_integers_along_axes_that_are_no_constants_stays() -> None:
    model = one_operator("ReduceMean", {**INDICES, "axes": ints(1)}, outputs=[TensorProto.INT64], opset=18)
    assert rewrite_operators(model) is model


@pytest.mark.parametrize("is_constant", [False, True])
def test_an_image_that_is_not_there_is_the_nearest(host_target: Target, is_constant: bool) -> None:
    """ONNX Runtime says that it is an error; TVM would read beyond the tensor."""
    images = {"i": ints(-9, 1, 0, 1 << 40, 1)}
    data = {name: array for name, array in REGIONS.items() if name != "i"}
    given = (data, images) if is_constant else ({**data, **images}, {})
    lowered = lower(one_operator("RoiAlign", *given, opset=16, **ROI), host_target)
    (output,) = run_lowered(lowered, host_target, given[0])
    expected = run_onnxruntime(
        one_operator("RoiAlign", REGIONS, opset=16, **ROI), {**REGIONS, "i": ints(0, 1, 0, 1, 1)}
    )
    np.testing.assert_allclose(output, expected[0], atol=1e-5)


@pytest.mark.parametrize("op_type", ["Max", "Mean", "Min", "Sum"])
@pytest.mark.parametrize("num_inputs", [1, 2, 3])
def test_any_number_of_tensors_is_combined(host_target: Target, op_type: str, num_inputs: int) -> None:
    shapes = {"x": (1, 2, 6, 7), "y": (2, 1, 1), "z": (7,)}
    data = {name: RNG.normal(size=shape).astype(np.float32) for name, shape in list(shapes.items())[:num_inputs]}
    assert_computes_the_same(one_operator(op_type, data, after_conv=True), host_target, data)


@pytest.mark.parametrize(
    "op_type", ["Sub", *(pytest.param(op, marks=pytest.mark.nightly) for op in ("Add", "Div", "Mul"))]
)
@pytest.mark.parametrize("shape", [(), (1,), (2, 1, 1), (7,), (1, 2, 6, 7)])
@pytest.mark.parametrize("first", [True, False])
def test_a_constant_takes_no_transpose_with_it(
    host_target: Target, op_type: str, shape: tuple[int, ...], *, first: bool
) -> None:
    constants = {"c": RNG.uniform(1, 2, size=shape)}
    order = ["c", "x"] if first and op_type != "Div" else ["x", "c"]
    model = one_operator(op_type, IMAGE, constants, inputs=order, after_conv=True)
    lowered = assert_computes_the_same(model, host_target, IMAGE)
    assert len(lowered.tasks) == 3  # the convolution with the operator, and the transposes of input and output


RESIZES: dict[str, dict[str, Any]] = {
    "linear, by a scale": {"scales": [1, 1, 1.7, 0.6], "mode": "linear"},
    "cubic, by a scale": {"scales": [1, 1, 0.6, 0.8], "mode": "cubic"},
    "cubic, without the outside": {"scales": [1, 1, 0.6, 2.3], "mode": "cubic", "exclude_outside": 1},
    "nearest, by a scale": {"scales": [1, 1, 1.7, 0.6], "mode": "nearest", "nearest_mode": "ceil"},
    "corners": {"scales": [1, 1, 0.6, 1.8], "mode": "linear", "coordinate_transformation_mode": "align_corners"},
    "symmetric": {"scales": [1, 1, 1.7, 2], "mode": "linear", "coordinate_transformation_mode": "half_pixel_symmetric"},
    "axes": {"scales": [2, 3], "mode": "linear", "axes": [3, 2]},
    "aspect ratio": {"sizes": [9, 9], "mode": "linear", "axes": [2, 3], "keep_aspect_ratio_policy": "not_larger"},
    "as TVM does it": {"scales": [1, 1, 2, 2], "mode": "nearest"},
}


@pytest.mark.parametrize("case", RESIZES)
def test_resizing_is_onnxs(host_target: Target, case: str) -> None:
    arguments = dict(RESIZES[case])
    if "scales" in arguments:
        constants, inputs = {"s": np.array(arguments.pop("scales"), np.float32)}, ["x", "", "s"]
    else:
        constants, inputs = {"s": ints(*arguments.pop("sizes"))}, ["x", "", "", "s"]
    model = one_operator("Resize", IMAGE, constants, inputs=inputs, opset=19, after_conv=True, **arguments)
    assert_computes_the_same(model, host_target, IMAGE)


def test_a_part_without_elements_is_left_out(host_target: Target) -> None:
    """As a roll by zero is exported; the slice that makes it is gone, too."""
    starts = {"begin": ints(0), "end": ints(0), "axes": ints(1)}
    nodes = [
        helper.make_node("Slice", ["x", *starts], ["nothing"]),
        helper.make_node("Concat", ["x", "nothing"], ["same"], axis=1),
        helper.make_node("Concat", ["same", "nothing", "x"], ["y"], axis=1),
    ]
    model = make_model(nodes, [tensor("x", (1, 2, 6, 7))], [tensor("y", (1, 4, 6, 7))], starts)
    assert not lower(model, host_target).parts
    assert_computes_the_same(model, host_target, IMAGE)


def test_sizes_may_stand_beside_scales_without_elements(host_target: Target) -> None:
    """As PyTorch exports them; TVM's importer takes them for both."""
    constants = {"none": np.zeros(0, np.float32), "s": ints(1, 2, 12, 14)}
    inputs = ["x", "none", "none", "s"]
    model = one_operator("Resize", IMAGE, constants, inputs=inputs, opset=13, after_conv=True, mode="linear")
    before = model.SerializeToString()
    assert len(rewrite_operators(model).graph.node[-1].input[1]) == 0
    assert model.SerializeToString() == before
    assert not lower(model, host_target).parts
    assert_computes_the_same(model, host_target, IMAGE)


OLD: dict[str, tuple[str, int, dict[str, Any]]] = {
    "slice": ("Slice", 7, {"starts": [1], "ends": [5], "axes": [2]}),
    "pad": ("Pad", 7, {"pads": [0, 0, 1, 2, 0, 0, 0, 1], "value": 1.0}),
    "upsample": ("Upsample", 7, {"scales": [1.0, 1.0, 2.0, 3.0], "mode": "linear"}),
    "upsample by an input": ("Upsample", 9, {"constants": {"s": np.array([1.0, 1.0, 2.0, 2.0])}}),
    "resize": ("Resize", 10, {"constants": {"s": np.array([1.0, 1.0, 0.6, 0.8])}}),
    "softmax": ("Softmax", 7, {"axis": 1}),
}
"""Operator, version of ONNX's operators, and what else `one_operator` takes."""


@pytest.mark.parametrize("case", OLD)
def test_older_operators_compute_what_onnxruntime_computes(host_target: Target, case: str) -> None:
    op_type, opset, arguments = OLD[case]
    assert_computes_the_same(one_operator(op_type, IMAGE, opset=opset, **arguments), host_target, IMAGE)


def test_a_model_that_cannot_be_converted_stays() -> None:
    model = one_operator("Strange", IMAGE, opset=7)
    assert raise_opset(model) is model


def test_large_weights_pass_by_the_converter() -> None:
    """It writes and reads a model several times."""
    weights = {"w": np.random.default_rng(0).random((512, 512), np.float32)}
    model = one_operator("MatMul", {"x": np.ones((2, 512), np.float32)}, weights, opset=8)
    before = model.SerializeToString()
    sizes = []
    raised = without_numbers(model, lambda light: (sizes.append(light.ByteSize()), raise_opset(light))[1])
    assert sizes[0] < 1000
    assert raised.opset_import[0].version == 11
    np.testing.assert_array_equal(numpy_helper.to_array(raised.graph.initializer[0]), weights["w"])
    np.testing.assert_array_equal(numpy_helper.to_array(raise_opset(model).graph.initializer[0]), weights["w"])
    assert model.SerializeToString() == before


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (one_operator("LpPool", IMAGE, opset=18, kernel_shape=[2, 2], ceil_mode=1), "windows beyond the end"),
        (
            one_operator("Pad", IMAGE, {"p": ints(0, 0, -1, 0, 0, 0, 0, 2)}, opset=19, mode="wrap"),
            "a cropped tensor that is continued",
        ),
        *(
            (
                one_operator("LayerNormalization", {"x": np.zeros(shape, np.float16)}, scale, opset=17, **more),
                "statistics, several axes or a scale that is broadcast, in another type than float32",
            )
            for shape, scale, more in [
                ((2, 3, 4), {"s": np.ones((3, 4), np.float16)}, {"outputs": [TensorProto.FLOAT16], "axis": 1}),
                ((2, 4), {"s": np.ones((1, 4), np.float16)}, {"outputs": [TensorProto.FLOAT16]}),
            ]
        ),
        (one_operator("BitShift", INDICES, {"n": ints(1)}, opset=18, direction="LEFT"), "a shift of signed integers"),
        (
            one_operator("Mod", {"x": np.ones(2, np.float32), "y": np.ones(2, np.float32)}, opset=18),
            "a remainder of floats with the divisor's sign",
        ),
        (one_operator("RoiAlign", REGIONS, opset=16, output_height=2), "regions that may be empty"),
        *(
            (one_operator(name, data, constants, opset=18, noop_with_empty_axes=1), "a reduction over no axis")
            for name, data, constants in [
                ("ReduceSumSquare", IMAGE, {}),
                ("ReduceSum", IMAGE, {"axes": ints()}),
                ("ReduceMean", INDICES, {}),
                ("ReduceMean", INDICES, {"axes": ints()}),
            ]
        ),
        (
            one_operator(
                "Resize",
                IMAGE,
                {"s": ints(1, 2, 3, 3)},
                inputs=["x", "", "", "s"],
                opset=18,
                mode="linear",
                antialias=1,
            ),
            "antialiasing",
        ),
        (
            one_operator(
                "Resize",
                {"x": np.zeros((1, 2, 6, 7), np.uint8)},
                {"s": np.array([1, 1, 0.6, 0.8], np.float32)},
                inputs=["x", "", "s"],
                outputs=[TensorProto.UINT8],
                mode="linear",
            ),
            "values between integers",
        ),
        (
            one_operator("ReduceSum", {"x": np.zeros((2, 0, 3), np.float32)}, {"a": ints(1)}),
            "a tensor without elements",
        ),
        (one_operator("Relu", IMAGE), None),
    ],
    ids=lambda value: value.graph.name if isinstance(value, onnx.ModelProto) else None,
)
def test_what_tvm_would_compute_wrongly_is_known(model: onnx.ModelProto, reason: str | None) -> None:
    assert fallback_reasons(rewrite_operators(model)) == ({} if reason is None else {0: reason})


@pytest.mark.parametrize("square", ["Mul", "Pow"])
@pytest.mark.parametrize("is_one", [True, False])
def test_a_normalisation_of_nine_operators_is_one_function(square: str, is_one: bool, host_target: Target) -> None:
    """Its variance keeps its digits beside a large mean; one that is over another power is none."""
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[-1]),
        helper.make_node("Sub", ["x", "mean"], ["centred"]),
        helper.make_node(square, ["centred", "centred" if square == "Mul" else "power"], ["squares"]),
        helper.make_node("ReduceMean", ["squares"], ["variance"], axes=[-1]),
        helper.make_node("Add", ["variance", "epsilon"], ["shifted"]),
        helper.make_node("Sqrt", ["shifted"], ["root"]),
        helper.make_node("Div", ["centred", "root"], ["normal"]),
        helper.make_node("Mul", ["scale", "normal"], ["scaled"]),
        helper.make_node("Add", ["scaled", "bias"], ["y"]),
    ]
    constants = {
        "power": np.float32(2 if is_one else 4),
        "epsilon": np.float32(1e-6),
        "scale": RNG.normal(size=96).astype(np.float32),
        "bias": RNG.normal(size=96 if is_one else (5, 96)).astype(np.float32),
    }
    model = make_model(nodes, [tensor("x", (2, 5, 96))], [tensor("y", (2, 5, 96))], constants)
    data = {"x": RNG.normal(1000, size=(2, 5, 96)).astype(np.float32)}
    lowered = lower(model, host_target)
    assert [task.info.name.startswith("layer_norm") for task in lowered.tasks] == [True] or not is_one
    assert is_one or not any("layer_norm" in task.info.name for task in lowered.tasks)
    (found,), (expected,) = run_lowered(lowered, host_target, data), run_onnxruntime(model, data)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
