"""MLflow's own server answers requests for a model: as JSON, base64 and Parquet, rightly or with a reason."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlflow
import numpy as np
import pandas as pd
import pytest
import requests
from click.testing import CliRunner
from helpers.commands import MLFLOW, ROOT, environment, run
from helpers.served import compiled, model_server, pairs
from mlflow.exceptions import MlflowException
from mlflow.models.cli import commands as mlflow_models
from mlflow.pyfunc import scoring_server
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ansor_mlflow import flavor
from ansor_mlflow.model import Manifest
from ansor_mlflow.model.package import CompiledNetwork
from ansor_mlflow.serving.pyfunc import SignatureKind, get_signature

if TYPE_CHECKING:
    from tvm.target import Target

JSON = "application/json"
PARQUET = "application/vnd.apache.parquet"
LOCAL = ("--env-manager", "local")
pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def network(host_target: Target, tmp_path_factory: pytest.TempPathFactory) -> CompiledNetwork:
    """Two inputs, two outputs, a batch of two."""
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
    """MLflow's server for the model with this signature."""
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
    """Each row of each input as base64."""
    return {name: [base64.b64encode(row.tobytes()).decode() for row in array] for name, array in inputs.items()}


def split(cells: dict[str, list[Any]]) -> dict[str, Any]:
    return {"dataframe_split": {"columns": list(cells), "data": list(map(list, zip(*cells.values(), strict=True)))}}


def parquet(cells: dict[str, list[Any]]) -> bytes:
    buffer = io.BytesIO()
    pd.DataFrame(cells).to_parquet(buffer)
    return buffer.getvalue()


# -- requests --------------------------------------------------------------------------------------------------------


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


def test_lists_in_cells(client: Client, kind: SignatureKind) -> None:
    inputs = rows(3)
    answer = client.post(split({name: [row.ravel().tolist() for row in array] for name, array in inputs.items()}))
    if kind == "tensor":
        assert_products(answer, inputs)
    else:
        assert_refused(answer, "could not be converted to the expected shape of: '(-1,)'")


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


# -- the same without a server ---------------------------------------------------------------------------------------


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


def test_arrays_pass_either_signature(binary: Any) -> None:
    inputs = rows(2)
    np.testing.assert_allclose(binary.predict(inputs)["flat"], (inputs["image"] * inputs["gain"]).reshape(2, 12))


CELL_RULE = (
    r"column 'image': its cells must be tensors .* the base64 of 48 bytes, which are float32 \(3, 4\) in C order"
)


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (base64.b64encode(bytes(44)).decode(), rf"{CELL_RULE}, little-endian; one has 44 bytes"),
        (bytes(52), rf"{CELL_RULE}, little-endian; one has 52 bytes"),
        ("", rf"{CELL_RULE}, little-endian; one has 0 bytes"),
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


# -- environments ----------------------------------------------------------------------------------------------------


def needed(*distributions: str) -> set[str]:
    """These distributions and all that they require, without extras."""
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


def test_dockerfile(models: dict[SignatureKind, Path], tmp_path: Path) -> None:
    arguments = ["--model-uri", str(models["tensor"]), "--output-directory", str(tmp_path / "image")]
    done = CliRunner().invoke(mlflow_models, ["generate-dockerfile", *arguments])
    assert done.exit_code == 0, done.output
    lines = (tmp_path / "image" / "Dockerfile").read_text().splitlines()
    version = ".".join(map(str, sys.version_info[:3]))
    assert f"FROM python:{version}-slim" in lines
    assert f"RUN pip install mlflow=={mlflow.__version__}" in lines
    (copied,) = [line.split()[1] for line in lines if line.startswith("COPY") and line.endswith(" /opt/ml/model")]
    assert "_install_pyfunc_deps('/opt/ml/model'" in "".join(lines)
    assert lines[-1].startswith("ENTRYPOINT")
    assert "C._serve('local')" in lines[-1]
    model = tmp_path / "image" / copied
    assert Manifest.read(model) == Manifest.read(models["tensor"])
    assert (model / "code" / "ansor_mlflow" / "flavor.py").is_file()
    assert (model / "requirements.txt").read_text() == (models["tensor"] / "requirements.txt").read_text()


@pytest.mark.nightly
def test_load(models: dict[SignatureKind, Path], tmp_path: Path) -> None:
    """Eight clients at once, each with inputs of its own: nothing is lost and no answer is another's."""
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "serving_load.py"), "--seconds", "2", "--clients", "8"]
    done = run([*command, "--model", str(models["tensor"]), "--json", str(figures)], tmp_path, environment(""))
    assert done.exit_code == 0, done.stdout + done.stderr
    found = json.loads(figures.read_text())
    assert (found["lost"], found["alone"]["lost"]) == (0, 0)
    assert found["requests"] > 8
    assert found["latency_ms"] >= found["library_ms"] > 0
    assert len(found["memory_mib"]) > 2
