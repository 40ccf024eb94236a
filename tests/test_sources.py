"""Networks come from files and from MLflow, however large they are, and every source gives the same network."""

from __future__ import annotations

import dataclasses
import re
import resource
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import mlflow
import mlflow.onnx
import numpy as np
import onnx
import onnxruntime
import pytest
from helpers.exports import make_model, tensor
from helpers.servers import free_port
from mlflow.models import Model
from onnx import TensorProto, helper, numpy_helper

from ansor_mlflow import flavor, names
from ansor_mlflow.errors import MachineError, ModelError, UserInputError
from ansor_mlflow.model import Manifest
from ansor_mlflow.model.package import CompiledNetwork
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.networks.load import Network, load_network
from ansor_mlflow.networks.onnx_file import digest, external_files, write_onnx
from ansor_mlflow.parameters import CompileOptions, TuneOptions
from ansor_mlflow.steps.compiling import compile_network
from ansor_mlflow.steps.tuning.earlier import resumed_options
from ansor_mlflow.steps.tuning.tune import tune
from ansor_mlflow.tensors import random_inputs
from ansor_mlflow.tracking import sources

NO_RUN = "0" * 32


def run(network: Path | bytes, loaded: Network) -> list[np.ndarray]:
    model = network if isinstance(network, bytes) else str(network)
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return session.run(None, random_inputs(loaded.inputs, seed=0))


def assert_computes_the_same(loaded: Network, original: Path) -> None:
    for actual, expected in zip(run(loaded.model.SerializeToString(), loaded), run(original, loaded), strict=True):
        assert np.ptp(expected) > 0.01
        np.testing.assert_array_equal(actual, expected)


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary files of this test are, of which nothing may be left."""
    directory = tmp_path / "scratch"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    yield directory
    assert [path for path in directory.iterdir() if path.name.startswith("ansor")] == []


@pytest.fixture(scope="module")
def wide_onnx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two dense layers whose weights are large enough for external data; (2, 32) -> (2, 40)."""
    builder = GraphBuilder(seed=0)
    data = builder.relu("relu", builder.dense("hidden", builder.input("data", (2, 32)), units=64, in_units=32))
    builder.dense("logits", data, units=40, in_units=64)
    path = tmp_path_factory.mktemp("networks") / "wide.onnx"
    onnx.save(builder.build("wide", {"logits": (2, 40)}), path)
    return path


@dataclass(frozen=True)
class Logged:
    """What one run logged."""

    run_id: str
    artifacts: Path
    model_id: str
    model_directory: Path


@pytest.fixture(scope="module")
def logged(
    wide_onnx: Path,
    compiled_network: CompiledNetwork,
    _mlflow_store: tuple[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Logged:
    """A run with ONNX files among its artifacts, and models: two versions of "wide", and "tuned"."""
    uri, experiment_id = _mlflow_store
    directory = tmp_path_factory.mktemp("logged")
    for name in ("external", "other", "damaged", "escaping"):
        (directory / name).mkdir()
    write_onnx(onnx.load(wide_onnx), directory / "external" / "wide.onnx", max_weight_bytes=0)
    other = Model()
    other.add_flavor("python_function", loader_module="mlflow.sklearn")
    other.add_flavor("sklearn", pickled_model="model.pkl")
    other.save(str(directory / "other" / "MLmodel"))
    (directory / "damaged" / "MLmodel").write_text("flavors: [onnx\n")
    (directory / "escaping" / "MLmodel").write_text("flavors: {onnx: {data: ../wide.onnx}}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", uri)
        with mlflow.start_run(experiment_id=experiment_id) as run_:
            mlflow.log_artifact(str(wide_onnx))
            mlflow.log_artifacts(str(directory))
            model = mlflow.onnx.log_model(onnx.load(wide_onnx), name="logged", pip_requirements=["onnx"])
            flavor.log_model(compiled_network, name="compiled", registered_model_name="tuned")
        for _ in range(2):
            mlflow.register_model(model.model_uri, "wide")
        client = mlflow.MlflowClient()
        client.set_registered_model_alias("wide", "champion", "1")
        client.create_registered_model("no-version")
        location = client.get_logged_model(model.model_id).artifact_location
    return Logged(
        run_id=run_.info.run_id,
        artifacts=Path(run_.info.artifact_uri.removeprefix("file://")),
        model_id=model.model_id,
        model_directory=Path(location.removeprefix("file://")),
    )


@pytest.mark.parametrize(
    ("template", "name", "source"),
    [
        ("models:/wide/1", "wide", "models:/wide/1"),
        ("models:/wide@champion", "wide", "models:/wide/1"),
        ("models:/wide/latest", "wide", "models:/wide/2"),
        ("models:/{model_id}", "{model_id}", "models:/{model_id}"),
        ("runs:/{run_id}/logged", "logged", "runs:/{run_id}/logged"),
        ("runs:/{run_id}/logged/model.onnx", "model", "runs:/{run_id}/logged/model.onnx"),
        ("runs:/{run_id}/wide.onnx", "wide", "runs:/{run_id}/wide.onnx"),
        ("file://{artifacts}/external/wide.onnx", "wide", "file://{artifacts}/external/wide.onnx"),
        ("file://{model_directory}", "artifacts", "file://{model_directory}"),
        ("{model_directory}", "artifacts", None),
        ("{artifacts}/external/wide.onnx", "wide", None),
    ],
)
@pytest.mark.usefixtures("experiment_id")
def test_every_source_gives_the_network(
    logged: Logged, wide_onnx: Path, template: str, name: str, source: str | None
) -> None:
    values = dataclasses.asdict(logged)
    network = sources.fetch_network(template.format(**values))
    assert network.name == name.format(**values)
    assert network.source == (source and source.format(**values))
    assert network.path is not None
    original = load_network(str(wide_onnx))
    assert (network.inputs, network.outputs) == (original.inputs, original.outputs)
    assert_computes_the_same(network, wide_onnx)


@pytest.mark.usefixtures("logged", "experiment_id")
def test_a_tuned_model_can_be_tuned_again(small_onnx: Path, small_network: Network) -> None:
    network = sources.fetch_network("models:/tuned/1")
    assert (network.name, network.source) == ("tuned", "models:/tuned/1")
    assert network.sha256 == small_network.sha256
    assert_computes_the_same(network, small_onnx)


@pytest.mark.system
def test_a_run_compiles_the_network_with_the_values_and_the_batch_that_it_tuned(
    tmp_path: Path, new_experiment: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever reads the copy in the run need not know of them."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["xw"]), helper.make_node("Mul", ["xw", "gain"], ["y"])]
    inputs = [tensor("x", ["N", 16]), tensor("gain", [1])]
    model = make_model(nodes, inputs, [tensor("y", None)], {"w": np.eye(16, dtype=np.float32)})
    onnx.save(model, tmp_path / "gained.onnx")
    options = TuneOptions(
        network=str(tmp_path / "gained.onnx"),
        input_values={"gain": 2.5},
        trials=2,
        strategy="random",
        min_repeat_ms=0,
        number=1,
    )
    tuning = tune(options)
    assert [message for message in caplog.messages if "its batch is dynamic" in message] == [
        f"network={options.network}: its batch is dynamic (dimension 0 of 'x') and taken as 1; "
        "give batch_size for another"
    ]
    assert mlflow.get_run(tuning.run_id).data.params["input_values"] == '{"gain": 2.5}'
    (tmp_path / "gained.onnx").unlink()
    goes_on = resumed_options(TuneOptions(resume_run=tuning.run_id, trials=3))
    assert goes_on.input_values == {"gain": 2.5}
    compiled = compile_network(CompileOptions(tune_run=tuning.run_id))
    loaded = flavor.load_model(compiled.model_uri)
    np.testing.assert_allclose(loaded.run({"x": np.ones((1, 16), np.float32)})["y"], 2.5 * np.ones((1, 16)), rtol=1e-5)


def test_names_and_files_are_still_networks(wide_onnx: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "resnet-18").mkdir()
    (tmp_path / "resnet-18" / "MLmodel").write_text("")
    monkeypatch.chdir(tmp_path)
    builtin = sources.fetch_network("resnet-18", input_shapes={"data": [1, 3, 32, 32]}, seed=3)
    assert builtin.sha256 == load_network("resnet-18", input_shapes={"data": [1, 3, 32, 32]}, seed=3).sha256
    assert (builtin.path, builtin.source) == (None, None)
    assert sources.fetch_network(str(wide_onnx)).source is None


MALFORMED = [
    ("models:/", r"network=models:: no URI of a model; write models:/name/version, models:/name@alias, or models:/m-"),
    ("models://wide/1", "no URI of a model"),
    ("models:/wide", "no URI of a model"),
    ("models:/wide@champion@1", "no URI of a model"),
    ("runs:/", "no URI of an artifact; write runs:/<run ID>/<path>"),
    (f"runs:/{NO_RUN}", "no URI of an artifact"),
    ("foo:/bar/model.onnx", "MLflow reads no foo: URIs; it reads .*, s3, "),
]

MISSING = [
    ("models:/nobody/1", "cannot read network=models:/nobody/1: .*nobody.* not found"),
    ("models:/wide/7", "cannot read network=models:/wide/7: .*version=7.* not found"),
    ("models:/no-version/latest", "network=models:/no-version/latest: the registered model has no version"),
    ("models:/wide@nobody", "alias nobody not found"),
    (f"models:/m-{NO_RUN}", f"'m-{NO_RUN}' not found"),
    ("models:/wide/1/missing.onnx", "No such artifact: 'missing.onnx'"),
    (f"runs:/{NO_RUN}/wide.onnx", f"{NO_RUN}.* not found"),
    ("runs:/{run_id}/missing.onnx", "Failed to download artifacts from path 'missing.onnx'"),
    ("file://{artifacts}/missing.onnx", "No such artifact: 'missing.onnx'"),
    (
        "runs:/{run_id}/other",
        "other: the model has the flavors python_function, sklearn; give one with the flavor onnx or pytorch",
    ),
    ("runs:/{run_id}/external", "external: a folder without the file MLmodel; give an MLflow model, or a file in it"),
    ("runs:/{run_id}/damaged", "damaged: its file MLmodel is damaged"),
    ("runs:/{run_id}/escaping", "escaping: the model lacks the ONNX file that MLmodel names"),
    ("runs:/{run_id}/damaged/MLmodel", "damaged/MLmodel: not a valid ONNX file, or cut short|holds no ONNX model"),
]


@pytest.mark.parametrize(("template", "message"), [*MALFORMED, *MISSING])
@pytest.mark.usefixtures("experiment_id")
def test_what_is_wrong_with_a_source_is_said_in_one_line(logged: Logged, template: str, message: str) -> None:
    with pytest.raises(UserInputError, match=message) as caught:
        sources.fetch_network(template.format(**dataclasses.asdict(logged)))
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("experiment_id")
def test_weights_that_are_missing_beside_an_artifact(logged: Logged, tmp_path: Path) -> None:
    (tmp_path / "wide.onnx").write_bytes((logged.artifacts / "external" / "wide.onnx").read_bytes())
    with pytest.raises(UserInputError, match=r"No such artifact: 'wide\.onnx\.data'"):
        sources.fetch_network((tmp_path / "wide.onnx").as_uri())


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd"])
def test_weights_are_not_taken_from_elsewhere(logged: Logged, tmp_path: Path, location: str) -> None:
    model = onnx.load(logged.artifacts / "external" / "wide.onnx", load_external_data=False)
    for weights in model.graph.initializer:
        for entry in weights.external_data:
            entry.value = location if entry.key == "location" else entry.value
    (tmp_path / "secret").write_bytes(bytes(1 << 20))
    (tmp_path / "model").mkdir()
    onnx.save(model, tmp_path / "model" / "wide.onnx")
    for network in (str(tmp_path / "model" / "wide.onnx"), (tmp_path / "model" / "wide.onnx").as_uri()):
        with pytest.raises(UserInputError, match="its external data cannot be read"):
            sources.fetch_network(network)


@pytest.mark.parametrize("network", ["models:/wide/1", "models:/wide@champion", f"runs:/{NO_RUN}/wide.onnx"])
def test_a_server_that_is_away(monkeypatch: pytest.MonkeyPatch, network: str) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://someone:a-password@127.0.0.1:{free_port()}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(MachineError, match=f"cannot read network={network}: .*MLFLOW_TRACKING_URI") as caught:
        sources.fetch_network(network)
    assert "\n" not in str(caught.value)
    assert "a-password" not in str(caught.value)


def test_credentials_in_a_uri_are_not_repeated() -> None:
    with pytest.raises(UserInputError, match="MLflow reads no http: URIs") as caught:
        sources.fetch_network("http://someone:a-password@127.0.0.1/model.onnx")
    assert "a-password" not in str(caught.value)


@pytest.mark.system
@pytest.mark.usefixtures("logged")
def test_a_run_records_where_its_network_came_from(
    experiment_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wide_onnx: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", experiment_id)
    run_id = tune(
        TuneOptions(
            network="models:/wide@champion", trials=4, strategy="random", cost_model="none", min_repeat_ms=0, number=1
        )
    ).run_id
    data = mlflow.get_run(run_id).data
    assert data.params["network"] == "models:/wide@champion"
    assert data.tags[names.TAG_NETWORK] == "wide"
    assert data.tags[names.TAG_NETWORK_SOURCE] == "models:/wide/1"
    provenance = mlflow.artifacts.load_dict(f"runs:/{run_id}/{names.RECORDS_DIR}/{names.PROVENANCE_FILE}")
    assert provenance["network"] == "models:/wide@champion"
    assert provenance["from_file"]
    copy = sources.fetch_network(f"runs:/{run_id}/{names.NETWORK_FILE}")
    assert copy.sha256 == provenance["network_sha256"]
    assert_computes_the_same(copy, wide_onnx)


def test_small_and_large_weights_outside_of_the_file(tmp_path: Path) -> None:
    """Shapes depend on the values of the small ones; the large one is not read to infer them.

    ONNX cannot infer this Expand, so that ONNX Runtime is asked, which needs the folder.
    """
    nodes = [
        helper.make_node("Gather", ["table", "index"], ["row"]),
        helper.make_node("Reshape", ["row", "square"], ["matrix"]),
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Equal", ["shape", "minus_one"], ["is_free"]),
        helper.make_node("Where", ["is_free", "one", "shape"], ["wanted"]),
        helper.make_node("Expand", ["matrix", "wanted"], ["expanded"]),
        helper.make_node("Add", ["expanded", "x"], ["y"]),
    ]
    weights = {
        "table": np.random.default_rng(0).standard_normal((300, 256), np.float32),
        "index": np.array(7, np.int64),
        "square": np.array([16, 16], np.int64),
        "minus_one": np.array([-1], np.int64),
        "one": np.array([1], np.int64),
    }
    model = make_model(nodes, [tensor("x", ["N", 16, 16])], [tensor("y", None)], weights)
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    assert external_files(path, "model") == ["weights.bin"]

    network = load_network(str(path), input_shapes={"x": [3, 16, 16]})
    assert network.outputs[0].shape == (3, 16, 16)
    x = random_inputs(network.inputs, 0)["x"]
    (tmp_path / "weights.bin").unlink()
    np.testing.assert_array_equal(
        run(network.model.SerializeToString(), network)[0], weights["table"][7].reshape(16, 16) + x
    )


@dataclass(frozen=True)
class Large:
    """What a process saw of a large network."""

    output_shape: tuple[int, ...]
    sha256: str
    last_bytes: bytes
    peak_bytes: int


def read_large(path: str) -> Large:
    network = load_network(path, input_shapes={"ids": [4]})
    (table,) = network.model.graph.initializer
    sha256, last_bytes = network.sha256, table.raw_data[-4:]
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Large(network.outputs[0].shape, sha256, last_bytes, peak_bytes)


@pytest.mark.nightly
def test_a_network_of_more_than_two_gib_is_read(tmp_path: Path) -> None:
    """In a process of its own, because of the memory. On the disk only the end of the table takes space."""
    num_bytes = 2**31 + 4096
    table = TensorProto(name="table", data_type=TensorProto.FLOAT, dims=[num_bytes // 4096, 1024])
    table.data_location = TensorProto.EXTERNAL
    table.external_data.add(key="location", value="table.bin")
    nodes = [helper.make_node("Gather", ["table", "ids"], ["rows"]), helper.make_node("Relu", ["rows"], ["y"])]
    inputs = [helper.make_tensor_value_info("ids", TensorProto.INT64, ["N"])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "large", inputs, outputs, [table])
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    onnx.save(model, tmp_path / "large.onnx")
    with (tmp_path / "table.bin").open("wb") as file:
        file.seek(num_bytes - 4)
        file.write(b"last")

    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        large = pool.submit(read_large, str(tmp_path / "large.onnx")).result()
    assert large.output_shape == (4, 1024)
    assert re.fullmatch("[0-9a-f]{64}", large.sha256)
    assert large.last_bytes == b"last"
    assert large.peak_bytes < 2.5 * num_bytes


def test_a_network_beyond_the_limit_is_written_as_two_files(wide_onnx: Path, tmp_path: Path) -> None:
    network = load_network(str(wide_onnx))
    before = network.model.SerializeToString(deterministic=True)
    path = tmp_path / "copy.onnx"
    assert write_onnx(network.model, path, max_weight_bytes=10_000) == [path, tmp_path / "copy.onnx.data"]
    assert path.stat().st_size < 2000
    assert network.model.SerializeToString(deterministic=True) == before
    copy = load_network(str(path))
    for limit in (0, 10_000):
        assert digest(copy.model, max_weight_bytes=limit) == digest(network.model, max_weight_bytes=limit)
    np.testing.assert_array_equal(run(path, network)[0], run(wide_onnx, network)[0])
    assert write_onnx(network.model, path) == [path]
    assert external_files(path, "copy") == []


def test_the_digest_depends_on_the_graph_and_on_every_weight(wide_onnx: Path) -> None:
    digests = set()
    for changed in (None, "graph", "hidden.weight", "logits.weight"):
        model = onnx.load(wide_onnx)
        if changed == "graph":
            model.graph.node[0].name = "other"
        for weight in model.graph.initializer:
            if weight.name == changed:
                weight.raw_data = bytes(4) + weight.raw_data[4:]
        digests |= {digest(model), digest(model, max_weight_bytes=0)}
    assert len(digests) == 8


@pytest.mark.parametrize("size", [0, 5000])
def test_weights_cut_short(wide_onnx: Path, tmp_path: Path, size: int) -> None:
    write_onnx(onnx.load(wide_onnx), tmp_path / "wide.onnx", max_weight_bytes=0)
    with (tmp_path / "wide.onnx.data").open("r+b") as file:
        file.truncate(size)
    with pytest.raises(UserInputError, match=r"wide\.onnx: its external data cannot be read") as caught:
        load_network(str(tmp_path / "wide.onnx"))
    assert "\n" not in str(caught.value)


def test_a_model_has_the_weights_of_its_network(compiled_network: CompiledNetwork, tmp_path: Path) -> None:
    model = onnx.load(compiled_network.network)
    model.graph.initializer.append(numpy_helper.from_array(np.ones(1000, np.float32), "unused"))
    network, data = write_onnx(model, tmp_path / "network.onnx", max_weight_bytes=0)
    flavor.save_model(dataclasses.replace(compiled_network, network=network), str(tmp_path / "model"))
    saved = tmp_path / "model" / data.name
    assert saved.read_bytes() == data.read_bytes()
    assert Manifest.read(tmp_path / "model").files.keys() >= {"network.onnx", "network.onnx.data"}
    assert_computes_the_same(sources.fetch_network(str(tmp_path / "model")), compiled_network.network)
    saved.write_bytes(bytes(saved.stat().st_size))
    with pytest.raises(ModelError, match=r"network\.onnx\.data does not match the SHA-256"):
        sources.fetch_network(str(tmp_path / "model"))
