"""`quantize=int8`: what a network may lose, which layers stay floats for it, and what is left of both in MLflow."""

from __future__ import annotations

import json
from pathlib import Path

import mlflow
import numpy as np
import onnx
import onnxruntime
import pytest
from helpers.commands import RunCommand
from onnx import TensorProto, helper, numpy_helper

from ansor_mlflow import api, names
from ansor_mlflow.device.targets import resolve_target
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.measuring import find_loss, is_quantized
from ansor_mlflow.networks import Network, load_network
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.parameters import PlanOptions
from ansor_mlflow.steps.quantizing import Quantization, quantized

SHAPE = (1, 3, 12, 12)
WIDE = 2000.0
"""What the first channel of the sensitive layer is multiplied with: the others have no steps of their own left."""


@pytest.fixture(scope="module")
def network_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image classifier of which one layer is hard to quantise; (1, 3, 12, 12) -> (1, 10)."""
    builder = GraphBuilder(seed=0)
    data = builder.input("data", SHAPE)
    data = builder.relu("relu0", builder.batch_norm("bn", builder.conv("conv0", data, (8, 3, 3, 3), padding=1), 8))
    scales = np.ones((1, 8, 1, 1), np.float32)
    scales[0, 0] = WIDE
    data = builder.node("Mul", "widen", data, builder.constant("wide", scales))
    narrow = builder.constant("narrow", 1 / scales)
    data = builder.conv("sensitive", data, (8, 8, 1, 1))
    data = builder.node("Mul", "narrowed", data, narrow)
    data = builder.relu("relu1", builder.conv("conv1", data, (16, 8, 3, 3), padding=1, bias=True))
    data = builder.node("Flatten", "flatten", builder.node("GlobalAveragePool", "global", data), axis=1)
    builder.dense("logits", data, units=10, in_units=16)
    path = tmp_path_factory.mktemp("float") / "classifier.onnx"
    onnx.save(builder.build("classifier", {"logits": (1, 10)}), path)
    return path


@pytest.fixture(scope="module")
def network(network_file: Path) -> Network:
    return load_network(str(network_file))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "data.npz"
    np.savez(path, data=np.random.default_rng(0).normal(size=(20, *SHAPE[1:])).astype(np.float32))
    return str(path)


def quantize(network: Network, cpu: str = "znver4", **given: object) -> tuple[Network, Quantization]:
    made, found = quantized(network, PlanOptions(quantize="int8", **given), resolve_target(f"llvm -mcpu={cpu}", 1))
    assert found is not None
    return made, found


def num_quantized(network: Network) -> int:
    """Layers whose weights are 8 bits."""
    bytes_ = {weight.name for weight in network.model.graph.initializer if weight.data_type == TensorProto.INT8}
    return sum(node.op_type == "DequantizeLinear" and node.input[0] in bytes_ for node in network.model.graph.node)


def test_off_is_the_network_itself(network: Network) -> None:
    assert quantized(network, PlanOptions(), resolve_target("llvm", 1)) == (network, None)


@pytest.mark.parametrize(
    ("cpu", "bits", "has_data"),
    [("znver4", 8, True), ("haswell", 7, True), ("haswell", 7, False), ("x86-64", 8, False)],
)
def test_weights_have_the_bits_that_a_cpu_multiplies_exactly(
    network: Network, data: str, cpu: str, bits: int, has_data: bool
) -> None:
    """AVX2 adds two products in 16 bits; where products are those of floats, all bytes are exact."""
    made, found = quantize(network, cpu, data=data if has_data else "", quantize_max_loss=1.0)
    weights = (numpy_helper.to_array(weight) for weight in made.model.graph.initializer)
    largest = [abs(weight.astype(int)).max() for weight in weights if weight.dtype == np.int8 and weight.ndim > 1]
    assert len(largest) == (4 if has_data else 3)  # without data, the product at the end stays a float
    assert max(largest) == (64 if bits == 7 else 127)
    assert found.weight_bits == found.terms["weight_bits"] == bits
    assert ("with weights of 7," in found.summary) == (bits == 7)


def test_all_layers_are_quantised_where_they_may_lose_much(network: Network, data: str) -> None:
    made, found = quantize(network, data=data, quantize_max_loss=1.0)
    assert num_quantized(made) == len(found.layers) == 4
    assert (found.share, found.num_calibrated, found.num_judged) == (pytest.approx(1.0), 16, 4)
    assert {candidate.calibration for candidate in found.candidates} == {"minmax", "percentile", "entropy"}
    assert found.loss == min(candidate.loss for candidate in found.candidates)
    assert (made.name, made.inputs, made.outputs) == (network.name, network.inputs, network.outputs)


def test_layers_that_lose_most_stay_floats(network: Network, data: str) -> None:
    """The contract is kept on inputs of which ranges know nothing, by as few layers as possible."""
    _, whole = quantize(network, data=data, quantize_max_loss=1.0, quantize_loss="relative_error")
    allowed = whole.loss / 3
    made, found = quantize(network, data=data, quantize_max_loss=allowed, quantize_loss="relative_error")
    floats = [layer for layer in found.layers if not layer.is_quantized]
    assert found.loss <= allowed < whole.loss
    assert 0 < len(floats) < len(found.layers)
    assert num_quantized(made) == len(found.layers) - len(floats)
    losses = [layer.loss or 0.0 for layer in found.layers]
    assert min(layer.loss or 0.0 for layer in floats) == sorted(losses, reverse=True)[len(floats) - 1]
    fewer = [each for each in found.candidates if each.num_floats == len(floats) - 1]
    assert all(each.loss > allowed for each in fewer)


def test_the_loss_is_that_of_onnxruntime(network: Network, data: str) -> None:
    """The first fifth of the rows judges."""
    made, found = quantize(network, data=data, quantize_loss="relative_error", quantize_max_loss=1.0)
    rows = np.load(data)["data"][:4]
    outputs = []
    for each in (network, made):
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("session.x64quantprecision", "1")  # without VNNI sums of 16 bits saturate
        session = onnxruntime.InferenceSession(each.model.SerializeToString(), options)
        outputs.append([{"logits": session.run(None, {"data": row[None]})[0]} for row in rows])
    assert find_loss("relative_error")(*outputs) == pytest.approx(found.loss, rel=0.05, abs=1e-4)


def test_without_data_ranges_are_those_of_each_call(network: Network) -> None:
    made, found = quantize(network, quantize_max_loss=1.0)
    assert (found.calibration, found.num_calibrated) == ("dynamic", 0)
    assert "DynamicQuantizeLinear" in {node.op_type for node in made.model.graph.node}
    assert "no inputs" in found.summary


def test_a_loss_of_ones_own(network: Network, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_loss.py").write_text(
        "import numpy as np\n"
        "def largest(floats, quantized):\n"
        "    return max(np.abs(a['logits'] - b['logits']).max() for a, b in zip(floats, quantized))\n"
        "def broken(floats, quantized):\n"
        "    return {}['?']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    _, found = quantize(network, data=data, quantize_max_loss=1e3, quantize_loss="own_loss:largest")
    assert 0 < found.loss < 1e3
    with pytest.raises(UserInputError, match=r"quantize_loss=own_loss:broken: it ended with"):
        quantize(network, data=data, quantize_loss="own_loss:broken")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quantize_max_loss": 0.0, "quantize_loss": "relative_error"}, r"no layer may be quantised: at best"),
        ({"quantize_loss": "accuracy"}, r"quantize_loss=accuracy: there is no such function .* give one of cosine"),
        ({"quantize_loss": "json:nothing"}, r"quantize_loss=json:nothing: there is no such function"),
        ({"data": "missing.npz"}, r"data=missing.npz: there is no such file"),
    ],
)
def test_what_cannot_be_is_one_line(given: dict[str, object], message: str, network: Network, data: str) -> None:
    with pytest.raises(UserInputError, match=message) as caught:
        quantize(network, **{"data": data, **given})
    assert "\n" not in str(caught.value)


def test_one_input_cannot_judge_itself(network: Network, tmp_path: Path) -> None:
    np.savez(tmp_path / "one.npz", data=np.ones(SHAPE, np.float32))
    with pytest.raises(UserInputError, match="another one has to judge"):
        quantize(network, data=str(tmp_path / "one.npz"))


def test_a_concatenation_with_a_constant_stays_a_float(tmp_path: Path) -> None:
    """ONNX Runtime's tools make a vector of the constant."""
    builder = GraphBuilder(seed=0)
    data = builder.conv("conv0", builder.input("data", SHAPE), (8, 3, 3, 3), padding=1)
    plane = builder.constant("plane", np.ones((1, 1, 12, 12), np.float32))
    data = builder.node("Concat", "joined", data, plane, axis=1)
    builder.conv("conv1", data, (4, 9, 1, 1))
    onnx.save(builder.build("joined", {"conv1": (1, 4, 12, 12)}), tmp_path / "joined.onnx")
    np.savez(tmp_path / "data.npz", data=np.random.default_rng(0).normal(size=(8, *SHAPE[1:])).astype(np.float32))
    made, found = quantize(load_network(str(tmp_path / "joined.onnx")), data=str(tmp_path / "data.npz"))
    assert num_quantized(made) == len(found.layers) == 2


def test_layers_that_share_constants_have_their_own(tmp_path: Path) -> None:
    """ONNX Runtime's tools write `bias` of the second layer as `bias1`, which is another tensor here."""
    builder = GraphBuilder(seed=0)
    weight, bias = (
        builder.weight(name, np.ones(shape, np.float32)) for name, shape in (("w", (3, 3, 1, 1)), ("bias", 3))
    )
    first = builder.node("Conv", "bias1", builder.input("data", SHAPE), weight, bias)
    second = builder.node("Conv", "bias2", first, weight, bias)
    builder.node("Sub", "y", second, builder.node("Neg", "negative", first))
    onnx.save(builder.build("shared", {"y": SHAPE}), tmp_path / "shared.onnx")
    np.savez(tmp_path / "data.npz", data=np.random.default_rng(0).normal(size=(8, *SHAPE[1:])).astype(np.float32))
    made, found = quantize(load_network(str(tmp_path / "shared.onnx")), data=str(tmp_path / "data.npz"))
    assert num_quantized(made) == len(found.layers) == 2


def test_ranges_that_one_way_cannot_tell_another_does(tmp_path: Path) -> None:
    """There is no histogram of numbers as small as these."""
    builder = GraphBuilder(seed=0)
    data = builder.input("data", SHAPE)
    tiny = builder.node("Mul", "tiny", data, builder.constant("factor", np.float32(1e-44)))
    builder.node("Add", "y", builder.conv("conv0", tiny, (3, 3, 1, 1)), builder.conv("conv1", data, (3, 3, 1, 1)))
    onnx.save(builder.build("tiny", {"y": SHAPE}), tmp_path / "tiny.onnx")
    np.savez(tmp_path / "data.npz", data=np.random.default_rng(0).normal(size=(8, *SHAPE[1:])).astype(np.float32))
    _, found = quantize(load_network(str(tmp_path / "tiny.onnx")), data=str(tmp_path / "data.npz"))
    assert {candidate.calibration for candidate in found.candidates} == {"minmax"}


def test_a_quantised_network_is_refused(network: Network, data: str) -> None:
    made, _ = quantize(network, data=data, quantize_max_loss=1.0)
    with pytest.raises(UserInputError, match="the network is quantised already"):
        quantize(made, data=data)


def test_a_network_without_layers_is_refused(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 4))
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, 4))
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "relu", [value], [result])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "r.onnx")
    with pytest.raises(UserInputError, match="has no Conv, Gemm, MatMul with constant weights"):
        quantize(load_network(str(tmp_path / "r.onnx")))


@pytest.mark.parametrize(("shape", "number"), [((6,), 2), ((1, 6), 2), ((), 2), ((4, 6), 1)])
def test_biases_of_products_have_many_shapes(shape: tuple[int, ...], number: int, tmp_path: Path) -> None:
    """Only a vector, or what is one, is quantised with its product; (4, 8) -> (4, 6) -> (4, 6)."""
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=of).astype(np.float32) for of in ((8, 6), (6, 6), shape)]
    names_of = ["first", "second", "bias"]
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "first", "bias"], ["h"]), helper.make_node("MatMul", ["h", "second"], ["y"])],
        "products",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (4, 8))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (4, 6))],
        [onnx.numpy_helper.from_array(value, name) for value, name in zip(weights, names_of, strict=True)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "products.onnx")
    np.savez(tmp_path / "data.npz", x=rng.normal(size=(40, 8)).astype(np.float32))
    made, found = quantize(load_network(str(tmp_path / "products.onnx")), data=str(tmp_path / "data.npz"))
    assert sum(layer.is_quantized for layer in found.layers) == number
    assert found.loss < 0.01
    assert num_quantized(made) == number


@pytest.mark.parametrize(("name", "expected"), [("cosine", 0.0), ("relative_error", 0.0), ("disagreement", 0.0)])
def test_equal_outputs_lose_nothing(name: str, expected: float) -> None:
    outputs = [{"y": np.array([[1.0, 2.0, np.inf]], np.float32), "n": np.array([3])} for _ in range(2)]
    assert find_loss(name)(outputs, outputs) == pytest.approx(expected, abs=1e-12)


def test_losses_are_what_they_say() -> None:
    floats = [{"y": np.array([[3.0, 4.0]])}, {"y": np.array([[0.0, 1.0]])}]
    others = [{"y": np.array([[4.0, 3.0]])}, {"y": np.array([[0.0, 1.0]])}]
    assert find_loss("cosine")(floats, others) == pytest.approx((1 - 24 / 25) / 2)
    assert find_loss("relative_error")(floats, others) == pytest.approx(np.sqrt(2 / 26))
    assert find_loss("disagreement")(floats, others) == 0.5
    assert find_loss("cosine")(floats, [{"y": others[0]["y"] * np.nan}, others[1]]) == np.inf


def test_the_command_writes_a_file(
    network_file: Path,
    data: str,
    tmp_path: Path,
    run_here: RunCommand,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_here("quantize", str(network_file), "--data", data, "--output", "small.onnx") == 0
    assert "4 of 4 layers" in capsys.readouterr().out
    assert num_quantized(load_network("small.onnx")) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["small.onnx"]
    assert run_here("quantize", str(network_file), "--data", data, "--output", "missing/small.onnx") == 2
    assert "there is no directory missing" in capsys.readouterr().err


@pytest.mark.system
def test_a_quantised_network_goes_through_the_pipeline(
    network_file: Path, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run of the tuning has the contract, the model is that of 8 bits, and is compared with its float champion."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    given = {
        "network": str(network_file),
        "trials": 0,
        "baseline": "none",
        "rivals": "none",
        "turns": 1,
        "measure_s": 0.1,
        "register_as": "classifier",
        "promote": True,
        "alias": "champion",
    }
    api.pipeline(**given)
    made = api.pipeline(**given, quantize="int8", data=data, quantize_max_loss=1.0)
    assert made.promotion is not None
    assert made.promotion.outcome.value != "wrong"
    tuned = mlflow.get_run(mlflow.search_runs(filter_string="tags.`ansor.step` = 'tune'")["run_id"][0])
    artifacts = {file.path for file in mlflow.MlflowClient().list_artifacts(tuned.info.run_id)}
    assert {names.QUANTIZATION_FILE, names.QUANTIZATION_CHART, names.NETWORK_FILE} <= artifacts
    assert made.metrics[names.QUANTIZATION_LOSS] == tuned.data.metrics[names.QUANTIZATION_LOSS]
    assert made.metrics[names.QUANTIZED_SHARE] == pytest.approx(1.0)
    directory = Path(mlflow.artifacts.download_artifacts(made.model_uri))
    assert is_quantized(directory / names.NETWORK_FILE)
    said = Path(mlflow.artifacts.download_artifacts(f"runs:/{tuned.info.run_id}/{names.QUANTIZATION_FILE}"))
    contract = json.loads(said.read_text())["contract"]
    assert contract == {"loss": "cosine", "max_loss": 1.0, "minutes": 5.0}
    api.tune(resume_run=tuned.info.run_id, trials=8)
    records = f"runs:/{tuned.info.run_id}/{names.RECORDS_DIR}/{names.PROVENANCE_FILE}"
    kept = json.loads(Path(mlflow.artifacts.download_artifacts(records)).read_text())["quantization"]
    assert kept["contract"] == contract
