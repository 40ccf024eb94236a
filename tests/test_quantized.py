"""Networks quantised to 8 bits, in ONNX's QuantizeLinear and DequantizeLinear, compute what ONNX Runtime does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime
import pytest
from helpers.exports import make_model, tensor
from helpers.one_operator import MICROSOFT, assert_computes_the_same, one_operator, run_lowered
from helpers.one_operator import run_onnxruntime as run_one
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from ansor_mlflow.device import resolve_target
from ansor_mlflow.graphs import rewrite_operators
from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.measuring.compare import ReferenceSession, is_quantized
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.networks.load import Network, load_network
from ansor_mlflow.settings import Layout, LoweringSettings
from ansor_mlflow.sketches import products_of
from ansor_mlflow.tensors import TensorSpec, random_inputs

if TYPE_CHECKING:
    from tvm.target import Target

NUM_CALIBRATION_INPUTS = 4


class SeededInputs(CalibrationDataReader):
    """What the ranges of values are measured with."""

    def __init__(self, inputs: tuple[TensorSpec, ...]) -> None:
        self._inputs = iter([random_inputs(inputs, seed) for seed in range(NUM_CALIBRATION_INPUTS)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._inputs, None)


@pytest.fixture(scope="module")
def float_network(tmp_path_factory: pytest.TempPathFactory) -> Network:
    """Layers of every kind that the quantiser of ONNX Runtime knows in image classifiers; (1, 3, 20, 20) -> (1, 10).

    An average of nine steps never lies half-way between two, so that rounding errors do not decide on it.
    """
    builder = GraphBuilder(seed=0)
    data = builder.input("data", (1, 3, 20, 20))
    data = builder.relu("relu0", builder.batch_norm("bn", builder.conv("conv0", data, (8, 3, 3, 3), padding=1), 8))
    data = builder.pool("MaxPool", "max", data, (3, 3), stride=2, padding=1)
    branch = builder.relu("relu1", builder.conv("conv1", data, (8, 8, 3, 3), padding=1, bias=True))
    branch = builder.conv("conv2", branch, (8, 8, 1, 1))
    data = builder.relu("relu2", builder.node("Add", "add", branch, data))
    data = builder.conv("depthwise", data, (8, 1, 3, 3), groups=8, bias=True)
    data = builder.pool("AveragePool", "average", data, (3, 3), stride=2)
    data = builder.conv("odd", data, (34, 8, 1, 1), bias=True)
    data = builder.node("Flatten", "flatten", builder.node("GlobalAveragePool", "global", data), axis=1)
    builder.dense("logits", data, units=10, in_units=34)
    path = tmp_path_factory.mktemp("float") / "float.onnx"
    onnx.save(builder.build("float", {"logits": (1, 10)}), path)
    return load_network(str(path))


def quantized(
    network: Network, directory: Path, activations: str, *, per_channel: bool, form: QuantFormat = QuantFormat.QDQ
) -> Network:
    types = {"int8": QuantType.QInt8, "uint8": QuantType.QUInt8}
    quantize_static(
        network.path,
        directory / "quantized.onnx",
        SeededInputs(network.inputs),
        quant_format=form,
        activation_type=types[activations],
        weight_type=QuantType.QInt8,
        per_channel=per_channel,
    )
    return load_network(str(directory / "quantized.onnx"))


def run_onnxruntime(model: onnx.ModelProto, *, optimized: bool, **inputs: np.ndarray) -> np.ndarray:
    levels = onnxruntime.GraphOptimizationLevel
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimized else levels.ORT_DISABLE_ALL
    options.add_session_config_entry("session.x64quantprecision", "1")  # without VNNI sums of 16 bits saturate
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, inputs)[0]


def output_step(model: onnx.ModelProto) -> float:
    """The distance of neighbouring values of the output."""
    (last,) = (node for node in model.graph.node if node.output[0] == model.graph.output[0].name)
    (scale,) = (weight for weight in model.graph.initializer if weight.name == last.input[1])
    return float(numpy_helper.to_array(scale))


@pytest.mark.system
@pytest.mark.parametrize(
    ("activations", "per_channel", "layout"),
    [
        ("uint8", False, "NHWC"),
        ("int8", True, "NHWC"),
        pytest.param("uint8", True, "NCHW", marks=pytest.mark.nightly),
        pytest.param("int8", False, "NCHW", marks=pytest.mark.nightly),
    ],
)
def test_a_quantized_network_is_a_step_from_onnxruntime_at_most(
    float_network: Network, host_target: Target, tmp_path: Path, activations: str, per_channel: bool, layout: Layout
) -> None:
    """A value half-way between two steps goes up or down with the rounding of a sum, whose order is free."""
    network = quantized(float_network, tmp_path, activations, per_channel=per_channel)
    inputs = random_inputs(network.inputs, seed=10)
    lowered = lower(network.model, host_target, LoweringSettings(layout=layout))
    (output,) = run_lowered(lowered, host_target, inputs)
    step = output_step(network.model)
    for optimized in (False, True):
        expected = run_onnxruntime(network.model, optimized=optimized, **inputs)
        assert np.ptp(expected) > 50 * step
        np.testing.assert_allclose(output, expected, rtol=0, atol=1.01 * step)


def linear_model(dtype: int, scale: np.ndarray, zero_point: np.ndarray, **attributes: Any) -> onnx.ModelProto:
    """QuantizeLinear and DequantizeLinear of "x" (2, 3, 8)."""
    zero_point = zero_point.astype(helper.tensor_dtype_to_np_dtype(dtype))
    constants = {"scale": scale.astype(np.float32), "zero_point": zero_point}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero_point"], ["q"], **attributes),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero_point"], ["y"], **attributes),
    ]
    return make_model(nodes, [tensor("x", (2, 3, 8))], [tensor("y", (2, 3, 8))], constants)


@pytest.mark.parametrize("dtype", [TensorProto.INT8, TensorProto.UINT8])
@pytest.mark.parametrize("axis", [None, 1, -1])
def test_rounding_and_saturation_are_onnxs(host_target: Target, dtype: int, axis: int | None) -> None:
    """Ties go to even; the scales are powers of two, so that there are some."""
    shape = () if axis is None else (2, 3, 8)[axis]
    scale = 2.0 ** np.random.default_rng(0).integers(-2, 2, shape)
    zero_point = np.random.default_rng(1).integers(0, 100, shape)
    model = linear_model(dtype, scale, zero_point, **({} if axis is None else {"axis": axis}))
    x = np.arange(-24, 24).reshape(2, 3, 8).astype(np.float32) * 0.125
    x[:, :, 0] *= 1e6
    (expected,) = run_one(model, {"x": x})
    np.testing.assert_array_equal(run_lowered(lower(model, host_target), host_target, {"x": x})[0], expected)


def test_what_is_quantised_and_dequantised_alike_stays_a_float(host_target: Target) -> None:
    """Once, however many there are; what another scale is for goes through the integer."""
    constants = {name: np.array(value, np.float32) for name, value in (("scale", 0.1), ("other", 0.2))}
    constants |= {"zero": np.array(-7, np.int8)}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["first"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["again"]),
        helper.make_node("DequantizeLinear", ["q", "other", "zero"], ["twice"]),
        helper.make_node("Sum", ["first", "again", "twice"], ["y"]),
    ]
    model = make_model(nodes, [tensor("x", (2, 3, 8))], [tensor("y", (2, 3, 8))], constants)
    found = sorted(node.op_type for node in rewrite_operators(model).graph.node)
    assert found == ["Clip", "DequantizeLinear", "Div", "Identity", "Mul", "QuantizeLinear", "Round", "Sum"]
    x = np.random.default_rng(0).normal(scale=9, size=(2, 3, 8)).astype(np.float32)
    (expected,) = run_one(model, {"x": x})
    np.testing.assert_allclose(run_lowered(lower(model, host_target), host_target, {"x": x})[0], expected, rtol=1e-6)


def test_quantization_is_part_of_the_function_before_it(
    float_network: Network, host_target: Target, tmp_path: Path
) -> None:
    """No layout parts them: only the input is transposed, and what is flattened."""
    network = quantized(float_network, tmp_path, "uint8", per_channel=True)
    names = [
        task.info.name
        for task in lower(network.model, host_target, LoweringSettings(layout="NHWC", pad_channels="off")).tasks
    ]
    assert [name for name in names if "round" not in name and "max_pool" not in name] == []
    assert sum("transpose" in name for name in names) == 2


def test_nothing_but_the_input_is_divided_by_a_scale(float_network: Network, tmp_path: Path) -> None:
    """Scales and zero points are in the constants of sums of bytes; a maximum over windows is one of bytes."""
    network = quantized(float_network, tmp_path, "uint8", per_channel=True)
    tasks = lower(network.model, resolve_target("llvm -mcpu=znver4", 2), LoweringSettings(pad_channels="off")).tasks
    divided = [task.info.name for task in tasks if "divide" in task.info.name and "conv2d" in task.info.name]
    (pool,) = (task.mod["main"] for task in tasks if "max_pool" in task.info.name)
    assert divided == []
    assert {str(param.ty.dtype) for param in pool.params} == {"uint8"}


@pytest.mark.parametrize("cpu", ["haswell", "znver4"])
def test_layers_that_differ_in_their_scales_are_one_task(cpu: str) -> None:
    builder = GraphBuilder(seed=0)
    values = builder.input("data", (8, 32))
    for number in range(4):
        steps = [builder.constant(f"scale{number}", np.float32(0.02 + 0.01 * number))]
        steps.append(builder.constant(f"zero{number}", np.uint8(100 + number)))
        levels = builder.node("QuantizeLinear", f"levels{number}", values, *steps)
        rounded = builder.node("DequantizeLinear", f"rounded{number}", levels, *steps)
        values = builder.node(
            "MatMul", f"product{number}", rounded, builder.weight(f"weight{number}", BITS.normal(size=(32, 32)))
        )
    tasks = lower(builder.build("layers", {values: (8, 32)}), resolve_target(f"llvm -mcpu={cpu}", 2)).tasks
    assert [task.info.weight for task in tasks if "round" in task.info.name and "matmul" in task.info.name] == [3]


@pytest.mark.parametrize(
    ("cpu", "largest", "are_bytes"), [("znver4", 127, True), ("haswell", 64, True), ("haswell", 65, False)]
)
@pytest.mark.parametrize("op_type", ["MatMul", "MatMulInteger"])
def test_a_network_is_one_of_bytes_where_all_weights_are_exact(
    op_type: str, cpu: str, largest: int, are_bytes: bool
) -> None:
    """AVX2 adds two products in 16 bits: with weights of 8 a network is one of floats, as a whole."""
    builder = GraphBuilder(seed=0)
    values, zero_point = builder.input("data", (8, 32)), builder.constant("zero", np.uint8(9))
    for number, most in enumerate((64, largest)):
        weights = BITS.integers(-most, most, (32, 32)).astype(np.int8)
        weights[number, number] = -most
        name = builder.constant(f"weight{number}", weights)
        scale = builder.constant(f"scale{number}", np.float32(0.02))
        levels = builder.node("QuantizeLinear", f"levels{number}", values, scale, zero_point)
        if op_type == "MatMul":
            rounded = builder.node("DequantizeLinear", f"rounded{number}", levels, scale, zero_point)
            weight = builder.node("DequantizeLinear", f"floats{number}", name, scale)
            values = builder.node("MatMul", f"product{number}", rounded, weight)
        else:
            total = builder.node("MatMulInteger", f"total{number}", levels, name, zero_point)
            values = builder.node("Cast", f"product{number}", total, to=TensorProto.FLOAT)
    tasks = lower(builder.build("layers", {values: (8, 32)}), resolve_target(f"llvm -mcpu={cpu}", 2)).tasks
    of_products = [task for task in tasks if "matmul" in task.info.name]
    assert of_products
    assert {products_of(task.mod) for task in of_products} == {"int8" if are_bytes else "float32"}


@pytest.mark.system
def test_a_network_of_operators_on_8_bits_is_a_step_from_onnxruntime_at_most(
    float_network: Network, host_target: Target, tmp_path: Path
) -> None:
    """What the quantiser writes as QLinearConv, QLinearAdd and the like."""
    network = quantized(float_network, tmp_path, "uint8", per_channel=True, form=QuantFormat.QOperator)
    assert any(node.op_type.startswith("QLinear") for node in network.model.graph.node)
    inputs = random_inputs(network.inputs, seed=10)
    (output,) = run_lowered(lower(network.model, host_target), host_target, inputs)
    (expected,) = ReferenceSession(tmp_path / "quantized.onnx", 1, exact=True).run(inputs).values()
    np.testing.assert_allclose(output, expected, rtol=0, atol=1.01 * output_step(network.model))


BITS = np.random.default_rng(3)
DATA = BITS.integers(0, 256, (1, 4, 6, 7)).astype(np.uint8)
SCALES = {"xs": np.float32(0.0213), "xz": np.uint8(3), "ys": np.float32(0.0437), "yz": np.uint8(5)}
OPERATORS: dict[str, tuple[str, dict[str, np.ndarray], dict[str, Any], list[str]]] = {
    "QLinearAdd": (
        MICROSOFT,
        {"x": DATA, "b": DATA[:, ::-1].copy()},
        {"bs": np.float32(0.0113), "bz": np.uint8(0)},
        ["x", "xs", "xz", "b", "bs", "bz", "ys", "yz"],
    ),
    "QLinearMul": (
        MICROSOFT,
        {"x": DATA, "b": DATA[:, ::-1].copy()},
        {"bs": np.float32(0.0113), "bz": np.uint8(0)},
        ["x", "xs", "xz", "b", "bs", "bz", "ys", "yz"],
    ),
    "QLinearConcat": (
        MICROSOFT,
        {"x": DATA, "b": DATA[:, :2].copy()},
        {"bs": np.float32(0.0113), "bz": np.uint8(0)},
        ["ys", "yz", "x", "xs", "xz", "b", "bs", "bz"],
    ),
    "QLinearSigmoid": (MICROSOFT, {"x": DATA}, {}, ["x", "xs", "xz", "ys", "yz"]),
    "QLinearLeakyRelu": (MICROSOFT, {"x": DATA}, {}, ["x", "xs", "xz", "ys", "yz"]),
    "QLinearGlobalAveragePool": (MICROSOFT, {"x": DATA}, {}, ["x", "xs", "xz", "ys", "yz"]),
    "QLinearMatMul": (
        "",
        {"x": DATA},
        {"w": BITS.integers(0, 256, (7, 5)).astype(np.uint8), "ws": np.float32(0.011), "wz": np.uint8(9)},
        ["x", "xs", "xz", "w", "ws", "wz", "ys", "yz"],
    ),
    "QGemm": (
        MICROSOFT,
        {"x": DATA[0, 0]},
        {
            "w": BITS.integers(-128, 128, (7, 5)).astype(np.int8),
            "ws": np.linspace(0.01, 0.02, 5),
            "wz": np.zeros(5, np.int8),
            "b": BITS.integers(-500, 500, 5).astype(np.int32),
        },
        ["x", "xs", "xz", "w", "ws", "wz", "b", "ys", "yz"],
    ),
}
"""Domain, data, constants and inputs."""


@pytest.mark.parametrize("op_type", OPERATORS)
def test_an_operator_on_8_bits_is_a_step_from_onnxruntime_at_most(host_target: Target, op_type: str) -> None:
    domain, data, constants, inputs = OPERATORS[op_type]
    used = {name: value for name, value in (SCALES | constants).items() if name in inputs}
    attributes = {"axis": 1} if op_type == "QLinearConcat" else {}
    model = one_operator(op_type, data, used, inputs=inputs, outputs=[TensorProto.UINT8], domain=domain, **attributes)
    assert_computes_the_same(model, host_target, data, atol=1)


@pytest.mark.parametrize("num_products", [16, 300])
@pytest.mark.parametrize("op_type", ["MatMulInteger", "ConvInteger"])
def test_sums_of_integers_are_exact(host_target: Target, op_type: str, num_products: int) -> None:
    """Three hundred products of 8 bits may be more than a float32 holds exactly."""
    shapes = {"MatMulInteger": ((3, num_products), (num_products, 5)), "ConvInteger": ((1, 4, 8, 9), (5, 4, 3, 3))}
    if op_type == "ConvInteger" and num_products > 16:
        shapes["ConvInteger"] = ((1, 40, 5, 5), (5, 40, 3, 3))
    shape, weight_shape = shapes[op_type]
    data = {"x": BITS.integers(200, 256, shape).astype(np.uint8)}
    weight = BITS.integers(200, 256, weight_shape).astype(np.uint8)
    constants = {"w": weight, "xz": np.uint8(0), "wz": np.uint8(1)}
    model = one_operator(op_type, data, constants, outputs=[TensorProto.INT32])
    (output,) = run_lowered(lower(model, host_target), host_target, data)
    np.testing.assert_array_equal(output, run_one(model, data)[0])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("op_type", ["MatMulInteger", "ConvInteger"])
def test_sums_that_become_floats_are_floats_from_the_beginning(host_target: Target, op_type: str, bias: bool) -> None:
    """And their channels are padded: 37 of them have vectors of one element."""
    is_conv = op_type == "ConvInteger"
    shape, weight_shape = ((1, 60, 6, 7), (37, 60, 3, 3)) if is_conv else ((5, 600), (600, 37))
    builder = GraphBuilder(seed=0)
    names = [
        builder.input("data", shape, "uint8"),
        builder.constant("weight", BITS.integers(0, 256, weight_shape).astype(np.uint8)),
        builder.constant("zero", np.uint8(3)),
        builder.constant("weight_zero", np.uint8(131)),
    ]
    product = builder.node(op_type, "product", *names)
    if bias:
        values = BITS.integers(-500, 500, (1, 37, 1, 1) if is_conv else 37).astype(np.int32)
        product = builder.node("Add", "sum", product, builder.constant("bias", values))
    output = builder.node("Cast", "output", product, to=TensorProto.FLOAT)
    model = builder.build("integers", {output: (1, 37, 4, 5) if is_conv else (5, 37)})
    data = {"data": BITS.integers(0, 256, shape).astype(np.uint8)}
    lowered = lower(model, host_target)
    text = lowered.mod.script()
    assert "float64" not in text
    assert "int32" not in text
    shapes = [tuple(map(int, p.shape)) for task in lowered.tasks for p in task.mod["main"].params]
    assert any(shape[-1:] == (40,) for shape in shapes), shapes
    (found,) = run_lowered(lowered, host_target, data)
    (expected,) = run_one(model, data)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * abs(expected).max())


@pytest.mark.parametrize("values", [[-1.5, 0.25, 3.0], [1.0, 2.0, 4.0], [-4.0, -2.0, -1.0], [0.0, 0.0, 0.0]])
def test_the_range_of_values_is_onnxs(host_target: Target, values: list[float]) -> None:
    data = {"x": np.array(values, np.float32)}
    outputs = [TensorProto.UINT8, TensorProto.FLOAT, TensorProto.UINT8]
    assert_computes_the_same(one_operator("DynamicQuantizeLinear", data, outputs=outputs), host_target, data)


def test_channels_that_are_last_already_stay(tmp_path: Path) -> None:
    """ONNX Runtime's own optimisations write such convolutions."""
    data = {"x": np.ones((1, 5, 5, 4), np.uint8)}
    zero, scale = np.uint8(0), np.float32(0.5)
    constants = {"xs": scale, "xz": zero, "w": np.ones((6, 4, 3, 3), np.uint8), "ws": scale, "wz": zero}
    model = one_operator(
        "QLinearConv",
        data,
        {**constants, "ys": scale, "yz": zero},
        outputs=[TensorProto.UINT8],
        domain=MICROSOFT,
        channels_last=1,
    )
    assert rewrite_operators(model) is model
    onnx.save(model, tmp_path / "model.onnx")
    assert is_quantized(tmp_path / "model.onnx")


def nibble_product(
    rows: tuple[int, ...], terms: int, columns: int, block: int, zeros: str = "", *, bits: int = 4, bias: bool = False
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A product with weights of a few bits, as of a language model, and its data."""
    rng, num_blocks = np.random.default_rng(0), -(-terms // block)
    constants: dict[str, Any] = {
        "w": rng.integers(0, 256, (columns, num_blocks, block * bits // 8), np.uint8),
        "s": rng.random((columns, num_blocks), np.float32) / 10 + 0.01,
    }
    if zeros == "uint8":
        constants["z"] = rng.integers(0, 256, (columns, -(-num_blocks // 2)), np.uint8)
    elif zeros:
        constants["z"] = 15 * rng.random((columns, num_blocks), np.float32)
    if bias:
        constants["b"] = rng.random(columns, np.float32)
    names = ["x", "w", "s", "z" if zeros else "", "", "b" if bias else ""]
    data = {"x": rng.normal(size=(*rows, terms)).astype(np.float32)}
    settings = {"K": terms, "N": columns, "bits": bits, "block_size": block}
    model = one_operator("MatMulNBits", data, constants, inputs=names, domain=MICROSOFT, **settings)
    model.graph.output[0].CopyFrom(tensor("y0", (*rows, columns)))  # ONNX infers none for operators of Microsoft's
    return model, data


@pytest.mark.parametrize("target", ["", "llvm -mcpu=x86-64"])
@pytest.mark.parametrize(
    ("rows", "terms", "columns", "block", "zeros", "bias"),
    [
        ((1,), 64, 48, 32, "", False),
        ((1,), 4096, 64, 128, "float32", False),
        ((2, 3), 144, 64, 16, "uint8", True),
        ((8,), 256, 32, 64, "", True),
        ((2, 1, 5), 96, 16, 32, "uint8", False),
        ((3, 10), 96, 32, 32, "uint8", True),
        ((1,), 80, 1000, 32, "uint8", False),
        ((40,), 80, 13, 32, "float32", False),
    ],
)
def test_products_with_weights_of_4_bits_are_right(
    rows: tuple[int, ...],
    terms: int,
    columns: int,
    block: int,
    zeros: str,
    bias: bool,
    target: str,
    host_target: Target,
) -> None:
    model, data = nibble_product(rows, terms, columns, block, zeros, bias=bias)
    lowered = lower(model, resolve_target(target, 2) if target else host_target)
    assert not lowered.parts
    assert any("matmul" in task.info.name for task in lowered.tasks) == (np.prod(rows) > 16)
    (found,) = run_lowered(lowered, host_target, data)
    (expected,) = run_one(model, data)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * abs(expected).max())


def test_weights_of_8_bits_for_each_block_stay_with_onnx_runtime(host_target: Target) -> None:
    model, _ = nibble_product((1,), 64, columns=32, block=32, bits=8)
    assert [part.graph.runs_in for part in lower(model, host_target).parts] == ["onnxruntime"]
