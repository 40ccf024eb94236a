"""MLflow's own server answers requests as docs/serving.md says: JSON, base64, Parquet, rightly or with a reason."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlflow
import numpy as np
import pandas as pd
import pytest
import requests
from helpers.commands import MLFLOW, ROOT, environment
from helpers.served import compiled, image_classifier, model_server, pairs
from mlflow.exceptions import MlflowException
from mlflow.pyfunc import scoring_server
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ansor_mlflow import flavor
from ansor_mlflow.model.package import CompiledNetwork
from ansor_mlflow.parameters import PipelineOptions, load_options
from ansor_mlflow.serving.pyfunc import SignatureKind, get_signature

if TYPE_CHECKING:
    from tvm.target import Target

JSON = "application/json"
PARQUET = "application/vnd.apache.parquet"
LOCAL = ("--env-manager", "local")
pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def network(host_target: Target, tmp_path_factory: pytest.TempPathFactory) -> CompiledNetwork:
    return compiled(pairs(batch=2), host_target, tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def models(network: CompiledNetwork, tmp_path_factory: pytest.TempPathFactory) -> dict[SignatureKind, Path]:
    """The network as models with either signature. Not to be written to."""
    kinds: tuple[SignatureKind, ...] = ("tensor", "binary")
    paths = {kind: tmp_path_factory.mktemp(kind) / "model" for kind in kinds}
    for kind, path in paths.items():
        signature = get_signature(network.inputs, network.outputs, kind)
        flavor.save_model(network, str(path), signature=signature)
    return paths


class Client:
    """Sends requests to a server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def post(self, body: Any, content_type: str = JSON) -> requests.Response:
        data = json.dumps(body) if content_type == JSON else body
        return requests.post(self.url, data=data, headers={"Content-Type": content_type}, timeout=200)


@pytest.fixture(scope="module", params=["tensor", "binary"])
def kind(request: pytest.FixtureRequest) -> SignatureKind:
    return request.param


@pytest.fixture(scope="module")
def client(
    kind: SignatureKind, models: dict[SignatureKind, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    with model_server(["--model-uri", str(models[kind]), *LOCAL], log) as server:
        yield Client(server.url)


def rows(count: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(count)
    return {
        "image": rng.standard_normal((count, 3, 4), np.float32),
        "gain": rng.standard_normal((count, 1, 1), np.float32),
    }


def assert_products(response: requests.Response, inputs: dict[str, np.ndarray]) -> None:
    assert response.status_code == 200, response.text
    outputs, product = response.json()["predictions"], inputs["image"] * inputs["gain"]
    assert list(outputs) == ["positive", "flat"]
    np.testing.assert_allclose(outputs["positive"], product.clip(min=0), rtol=1e-6)
    np.testing.assert_allclose(outputs["flat"], product.reshape(-1, 12), rtol=1e-6)


def assert_refused(response: requests.Response, *messages: str) -> None:
    assert response.status_code == 400, response.text
    answer = response.json()
    assert answer["error_code"] in ("BAD_REQUEST", "INVALID_PARAMETER_VALUE")
    for message in messages:
        assert message in answer["message"]


def nested(inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: array.tolist() for name, array in inputs.items()}


def text_cells(inputs: dict[str, np.ndarray]) -> dict[str, list[str]]:
    return {name: [base64.b64encode(row.tobytes()).decode() for row in array] for name, array in inputs.items()}


def split(cells: dict[str, list[Any]]) -> dict[str, Any]:
    return {"dataframe_split": {"columns": list(cells), "data": list(map(list, zip(*cells.values(), strict=True)))}}


def parquet(cells: dict[str, list[Any]]) -> bytes:
    buffer = io.BytesIO()
    pd.DataFrame(cells).to_parquet(buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_named_tensors_as_json(client: Client, count: int) -> None:
    inputs = rows(count)
    assert_products(client.post({"inputs": nested(inputs)}), inputs)


@pytest.mark.parametrize("layout", ["split", "records"])
def test_base64(client: Client, kind: SignatureKind, layout: str) -> None:
    inputs = rows(3)
    cells = text_cells(inputs)
    records = [{name: column[row] for name, column in cells.items()} for row in range(3)]
    answer = client.post(split(cells) if layout == "split" else {"dataframe_records": records})
    if kind == "binary":
        assert_products(answer, inputs)
    else:
        assert_refused(answer, "Failed to convert column image to type 'float32'")


@pytest.mark.parametrize("cells", ["lists", "bytes"])
def test_parquet(client: Client, kind: SignatureKind, cells: str) -> None:
    inputs = rows(3)
    convert = np.ndarray.ravel if cells == "lists" else np.ndarray.tobytes
    body = parquet({name: [convert(row) for row in array] for name, array in inputs.items()})
    answer = client.post(body, PARQUET)
    if (kind, cells) in (("tensor", "lists"), ("binary", "bytes")):
        assert_products(answer, inputs)
    else:
        assert_refused(answer, "The input pandas dataframe column 'image'" if cells == "bytes" else "'(-1,)'")


def test_a_wrong_shape_is_told_the_expected_one(client: Client, kind: SignatureKind) -> None:
    expected = "(-1, 3, 4)" if kind == "tensor" else "'image': float32 (2, 3, 4), 'gain': float32 (2, 1, 1)"
    answer = client.post({"inputs": {**nested(rows(2)), "image": [[[1.0, 2.0]]]}})
    assert_refused(answer, "(1, 1, 2)", expected)


def test_what_is_no_tensor_is_refused(client: Client) -> None:
    ragged = {**nested(rows(2)), "image": [[[1.0, 2.0], [1.0]]]}
    assert_refused(client.post({"inputs": ragged}))
    assert_refused(client.post({"inputs": {**nested(rows(2)), "image": "much"}}))
    assert_refused(client.post({"inputs": {"image": nested(rows(2))["image"]}}), "gain")
    assert_refused(client.post({"rows": 1}), "exactly one of the input fields")


def test_the_server_answers_after_refusals(client: Client) -> None:
    inputs = rows(2)
    for _ in range(3):
        assert_refused(client.post({"inputs": {**nested(inputs), "image": [[[1.0]]]}}))
        too_deep = requests.post(client.url, data="[" * 50_000, headers={"Content-Type": JSON}, timeout=200)
        assert too_deep.status_code == 500  # MLflow's own
        assert_products(client.post({"inputs": nested(inputs)}), inputs)


@pytest.fixture(scope="module")
def binary(models: dict[SignatureKind, Path]) -> Iterator[Any]:
    before = list(sys.path)
    yield mlflow.pyfunc.load_model(str(models["binary"]))
    sys.path[:] = before


@pytest.mark.parametrize("wrap", [lambda text: text, lambda text: f"{text[:5]}\n{text[5:]}\n"], ids=["", "lines"])
def test_base64_may_have_lines(binary: Any, wrap: Any) -> None:
    inputs = rows(2)
    frame = pd.DataFrame({name: [wrap(cell) for cell in cells] for name, cells in text_cells(inputs).items()})
    np.testing.assert_allclose(binary.predict(frame)["flat"], (inputs["image"] * inputs["gain"]).reshape(2, 12))


def test_a_cell_may_hold_several_rows(binary: Any) -> None:
    inputs = rows(3)
    frame = pd.DataFrame({name: [array.tobytes()] for name, array in inputs.items()})
    np.testing.assert_allclose(binary.predict(frame)["flat"], (inputs["image"] * inputs["gain"]).reshape(3, 12))


CELL_RULE = (
    r"column 'image': its cells must be tensors .* the base64 of 48 bytes, which are float32 \(3, 4\) in C order"
)


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (base64.b64encode(bytes(44)).decode(), rf"{CELL_RULE}, little-endian; one has 44 bytes"),
        ("no base64!", rf"{CELL_RULE}, little-endian; one is no base64"),
        ("AAA", rf"{CELL_RULE}, little-endian; one is no base64"),
    ],
)
def test_a_cell_that_is_no_tensor(binary: Any, cell: str | bytes, message: str) -> None:
    frame = pd.DataFrame({"image": [cell], "gain": [bytes(4)]})
    with pytest.raises(MlflowException, match=message) as caught:
        binary.predict(frame)
    assert caught.value.get_http_status_code() == 400


def status(model: Any, body: bytes, content_type: str) -> int:
    """What MLflow's server answers with, called as it calls itself."""
    try:
        schema = model.metadata.get_input_schema()
        return int(scoring_server.invocations(body, content_type, model, schema).status)
    except MlflowException as err:
        return err.get_http_status_code()


@pytest.mark.parametrize(
    "image",
    [
        *(b"[" * depth + b"1" + b"]" * depth for depth in (60, 900)),
        *(b"NaN", b"1e999", b"1" + b"0" * 400, b"null", b"{}", b"[]", b'"\\ud800"', b'[["a",1],null]', b'["AAA"]'),
    ],
    ids=lambda image: image[:12].decode(),
)
def test_json_of_any_kind_is_refused(binary: Any, image: bytes) -> None:
    assert status(binary, b'{"inputs": {"image": ' + image + b', "gain": [[[1]]]}}', JSON) == 400


def test_damaged_parquet_is_refused(binary: Any) -> None:
    """Or read, where the bit was one of a number."""
    whole = parquet({name: [row.tobytes() for row in array] for name, array in rows(2).items()})
    assert status(binary, whole, PARQUET) == 200
    for length in range(0, len(whole), 97):
        assert status(binary, whole[:length], PARQUET) == 400
    for place in range(4, len(whole), 61):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        assert status(binary, bytes(flipped), PARQUET) in (200, 400)


def needed(*distributions: str) -> set[str]:
    found: set[str] = set()
    todo = [canonicalize_name(name) for name in distributions]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        try:
            requirements = [Requirement(text) for text in requires(name) or []]
        except PackageNotFoundError:  # a marker may exclude it here
            continue
        todo += [canonicalize_name(r.name) for r in requirements if not r.marker or r.marker.evaluate({"extra": ""})]
    return found


HIDE = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
"""
PREDICT = """
import mlflow, numpy as np
model = mlflow.pyfunc.load_model(MODEL)
print(model.predict({"image": np.ones((3, 3, 4), "f4"), "gain": np.ones((3, 1, 1), "f4")})["flat"].sum())
import ansor_mlflow
print(ansor_mlflow.__file__)
"""


def test_a_model_is_loaded_with_its_requirements_and_its_code_alone(
    models: dict[SignatureKind, Path], tmp_path: Path
) -> None:
    """Where only what `requirements.txt` names is installed; what else is there is hidden from the process."""
    model = models["tensor"]
    listed = [Requirement(line).name for line in (model / "requirements.txt").read_text().splitlines()]
    allowed = needed(*listed)
    hidden = {
        module
        for module, distributions in packages_distributions().items()
        if not allowed & {canonicalize_name(name) for name in distributions}
    }
    assert {"ansor_mlflow", "pytest", "onnxruntime", "xgboost"} <= hidden
    hidden.remove("ansor_mlflow")  # it must be that of the model
    (tmp_path / "predict.py").write_text(f"HIDDEN, MODEL = {hidden!r}, {str(model)!r}\n{HIDE}{PREDICT}")
    command = [sys.executable, str(tmp_path / "predict.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    total, code = done.stdout.split()
    assert float(total) == 36
    assert Path(code).is_relative_to(model / "code")


PYENV = """#!/bin/sh
# Stands in for pyenv where it has the Python of the model.
case "$1" in
    install) test "$2 $3" = "--skip-existing {version}" ;;
    root) echo {root} ;;
    *) exit 1 ;;
esac
"""


def write_pyenv(directory: Path) -> Path:
    """A folder with the program `pyenv`, which knows the Python that runs these tests."""
    version = ".".join(map(str, sys.version_info[:3]))
    python = directory / "versions" / version / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(Path(sys._base_executable).resolve())  # type: ignore[attr-defined]
    (directory / "pyenv").write_text(PYENV.format(version=version, root=directory))
    (directory / "pyenv").chmod(0o755)
    return directory


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("env_manager", ["uv", "virtualenv"])
def test_a_server_in_an_environment_of_its_own(
    models: dict[SignatureKind, Path], tmp_path: Path, env_manager: str
) -> None:
    """The package is in no index, so that its code can only come from the model."""
    path = os.pathsep.join([str(write_pyenv(tmp_path / "pyenv")), str(Path(MLFLOW).parent), os.environ["PATH"]])
    variables = {"MLFLOW_ENV_ROOT": str(tmp_path / "envs"), "PATH": path, "PIP_NO_COMPILE": "0"}  # 0 switches it on
    arguments = ["--model-uri", str(models["binary"]), "--env-manager", env_manager]
    inputs = rows(3)
    with model_server(arguments, tmp_path / "server.log", variables, timeout_s=500) as server:
        client = Client(server.url)
        assert_products(client.post({"inputs": nested(inputs)}), inputs)
        assert_products(client.post(split(text_cells(inputs))), inputs)
    (python,) = (tmp_path / "envs").glob("*/bin/python")
    listed = subprocess.run([python, "-c", "import ansor_mlflow"], cwd=tmp_path, capture_output=True, check=False)
    assert b"ModuleNotFoundError" in listed.stderr


BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", (ROOT / "docs" / "serving.md").read_text(), re.M | re.S)
DOCUMENTED = "http://127.0.0.1:5001/invocations"


def blocks(language: str, *words: str) -> list[str]:
    return [text for name, text in BLOCKS if name == language and all(word in text for word in words)]


@dataclass(frozen=True)
class Desk:
    """Where a reader of the guide works, with a server that runs."""

    directory: Path
    url: str
    variables: dict[str, str]

    def run(self, script: str) -> str:
        """Runs a block of commands, with the server's port instead of the documented one; returns what it prints."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script.replace(DOCUMENTED, self.url)],
            cwd=self.directory,
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, f"{script}\n{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def desk(
    host_target: Target, _mlflow_store: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Desk]:
    """A registered model with the inputs and outputs of ResNet-18, served as the guide says."""
    uri, experiment_id = _mlflow_store
    network = compiled(image_classifier(), host_target, tmp_path_factory.mktemp("classifier"))
    signature = get_signature(network.inputs, network.outputs, "binary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", uri)
        with mlflow.start_run(experiment_id=experiment_id):
            flavor.log_model(network, name="model", registered_model_name="resnet-18", signature=signature)
    (serve,) = blocks("bash", "mlflow models serve")
    words = shlex.split(serve)
    assert words[:3] == ["mlflow", "models", "serve"]
    assert words[-2:] == ["--port", "5001"]
    directory = tmp_path_factory.mktemp("desk")
    variables = environment(uri)
    with model_server(words[3:-2], directory / "server.log", variables) as server:
        yield Desk(directory, server.url, variables)


def test_the_first_command_has_parameters_of_the_pipeline() -> None:
    command = shlex.split(blocks("bash", "mlflow run")[0])
    parameters = dict(word.split("=") for flag, word in pairwise(command) if flag == "-P")
    options = load_options(PipelineOptions, parameters)
    assert (options.signature, options.register_as) == ("binary", "resnet-18")


@pytest.mark.nightly
def test_programs_and_requests(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order, since some write what others send."""
    monkeypatch.chdir(desk.directory)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", desk.variables["MLFLOW_TRACKING_URI"])
    monkeypatch.setattr(sys, "path", list(sys.path))  # pyfunc puts a model's code first
    shapes = []
    for language, text in BLOCKS:
        if language == "python":
            exec(text.replace(DOCUMENTED, desk.url), {})
        elif language == "bash" and "--fail" in text:
            shapes.append(np.shape(json.loads(desk.run(text))["predictions"]))
    assert shapes == [(3, 1000), (1, 1000), (3, 1000)]


@pytest.mark.nightly
def test_what_is_refused(desk: Desk) -> None:
    (command,) = (text for text in blocks("bash", "curl") if "--fail" not in text)
    (message,) = blocks("text")
    answer = json.loads(desk.run(command))
    assert message.strip() in answer["message"]
    assert answer["error_code"] == "INVALID_PARAMETER_VALUE"
