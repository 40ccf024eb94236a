"""Every wrong input ends a command with one line that says what to do and the exit code of its kind.

A parameter that is not usable opens no run; what goes wrong later leaves a FAILED one.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import pickle
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
import onnx
import pytest
from helpers.commands import ANSOR_MLFLOW, FAST, Finished, environment, flags, run
from helpers.exports import make_model, tensor
from helpers.hostile import Touch
from helpers.servers import ACCESS_KEY, SECRET_KEY, S3Server, free_port, s3_server
from mlflow.entities import Run
from mlflow.utils.mlflow_tags import MLFLOW_PROJECT_ENTRY_POINT
from onnx import helper, numpy_helper

import ansor_mlflow as am
from ansor_mlflow import flavor, names
from ansor_mlflow.cli.main import main
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.model import CompiledNetwork
from ansor_mlflow.records import RECORD_FILE, WORKLOAD_FILE

USER, MACHINE, RECORDS, MODEL, CORRECTNESS = 2, 3, 5, 6, 7
NO_RUN = "0" * 32


@dataclass(frozen=True)
class Failed:
    finished: Finished
    run: Run | None
    client: mlflow.MlflowClient
    cwd: Path


RunCommand = Callable[..., Failed]


def assert_failed(failed: Failed, exit_code: int, message: str) -> None:
    """Asserts all that holds for every failure: its line, its exit code, its run, and that no records are about.

    The line is the last one, but for the ID of a run that the command opened.
    """
    finished, run = failed.finished, failed.run
    assert finished.exit_code == exit_code, finished.stderr
    (error,) = finished.errors
    lines = finished.stderr.splitlines()
    assert lines[lines.index(error) + 1 :] in ([], [f"run    {run.info.run_id}"] if run else [])
    assert re.search(message, error), error
    assert "Traceback" not in finished.stdout + finished.stderr
    assert not [path for path in failed.cwd.glob(".ansor/**/database_*.json") if path.stat().st_size]
    if run is not None:
        assert run.info.status == "FAILED"
        assert run.data.tags[names.TAG_ERROR] == error.removeprefix("Error: ")
        assert run.data.tags[names.TAG_EXIT_CODE] == str(exit_code)


@pytest.fixture
def here(
    new_experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[RunCommand]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    monkeypatch.setattr(sys, "path", [*sys.path])  # a model's own code is put before it
    client = mlflow.MlflowClient()
    log = logging.getLogger("ansor_mlflow")

    def run_here(*args: str) -> Failed:
        capfd.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(args)
        out, err = capfd.readouterr()
        runs = client.search_runs([new_experiment])
        assert len(runs) <= 1
        return Failed(Finished(int(str(caught.value.code)), out, err), runs[0] if runs else None, client, tmp_path)

    yield run_here
    log.handlers.clear()  # it writes to a standard error that ends with the test


def save_nodes(path: Path, op_types: list[str], shape: list[int | str]) -> None:
    """Writes a chain of operators with one input and one output, from "x" to "y"."""
    tensors = ["x", *(f"value{index}" for index in range(1, len(op_types))), "y"]
    pairs = zip(op_types, itertools.pairwise(tensors), strict=False)
    nodes = [helper.make_node(op_type, [source], [target]) for op_type, (source, target) in pairs]
    onnx.save(make_model(nodes, [tensor("x", shape)], [tensor("y", shape)], {}), path)


@pytest.fixture
def files(tmp_path: Path, small_onnx: Path) -> None:
    shutil.copy(small_onnx, tmp_path / "small.onnx")
    (tmp_path / "broken.onnx").write_bytes(small_onnx.read_bytes()[:500])
    save_nodes(tmp_path / "dynamic.onnx", ["Relu"], ["batch", 3, "H", 8])
    save_nodes(tmp_path / "unknown.onnx", ["RandomNormalLike", "Relu", "RandomUniformLike"], [1, 3, 8, 8])
    for name in ("pickle.onnx", "pickle.pt2", "pickle.pt"):
        (tmp_path / name).write_bytes(pickle.dumps(Touch(tmp_path / "unpickled")))
    (tmp_path / "typo.yaml").write_text("trails: 640\n")


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("parameters", "exit_code", "message"),
    [
        ({"network": "broken.onnx"}, USER, "network=broken.onnx: not a valid ONNX file, or cut short"),
        (
            {"network": "dynamic.onnx"},
            USER,
            r"""input 'x' has dynamic H \(dimension 2\) .*; give input_shapes='\{"x": \[1, 3, 224, 8\]\}', which""",
        ),
        ({"network": "small.onnx", "input_shapes": '{"data": [3, 16, 16]}'}, USER, "but it has 4, .*; give 4"),
        ({"network": "pickle.onnx"}, USER, "network=pickle.onnx: (not a valid ONNX file|the file holds no ONNX model)"),
        (
            {"network": "unknown.onnx", "partition": "off"},
            USER,
            r"network=unknown.onnx: TVM cannot compute RandomNormalLike \(.*\), RandomUniformLike \(.*; partition=auto",
        ),
        ({"network": "models:/nobody"}, USER, "network=models:/nobody: no URI of a model; write models:/name/version"),
        ({"target": "nvidia/quantum"}, USER, "target='nvidia/quantum' is unknown to TVM: .*; use auto, a tag, JSON"),
        ({"target": "nvidia/nvidia-h100"}, MACHINE, "cannot be measured on this host: it is made for cuda"),
        ({"num_threads": 100_000}, USER, "num_threads=100000, but this process may use [0-9]+ CPUs"),
        ({"warm_start": "nowhere"}, USER, "warm_start='nowhere' is neither a run's ID .* nor a file or directory"),
        ({"resume_run": NO_RUN}, USER, f"cannot resume the run {NO_RUN}: .*not found"),
        ({"trials": 1}, USER, r"trials=1, but the network has \d tasks and each needs a trial; give at least \d"),
    ],
)
def test_what_cannot_be_tuned(here: RunCommand, parameters: dict[str, Any], exit_code: int, message: str) -> None:
    failed = here("tune", *flags({**FAST, "network": "small.onnx", **parameters}))
    assert_failed(failed, exit_code, message)
    assert failed.run is None
    assert list(failed.cwd.glob(".ansor/*")) == []
    assert not (failed.cwd / "unpickled").exists()


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"promote": "true"}, "promote=true: only a registered model has a champion; give register_as, too"),
        ({"register_as": "small/fast"}, "register_as='small/fast': it must be a model name, without / and :"),
        ({"resume_run": NO_RUN}, f"cannot resume the run {NO_RUN}: .*not found"),
    ],
)
def test_what_a_pipeline_refuses_before_it_opens_its_run(
    new_experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parameters: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserInputError, match=message):
        am.pipeline(**{**FAST, "network": "small.onnx", **parameters})
    assert mlflow.search_runs([new_experiment], output_format="list") == []


PARSE_ERRORS = [
    (["tune", "--trials", "abc"], "trials='abc': it must be a whole number, 0 or more, or auto"),
    (["tune", "--input-shapes", "[1, 3]"], "input_shapes='.*': it must be a JSON object of shapes"),
    (["tune", "--config", "typo.yaml"], "config=typo.yaml: unknown key 'trails'; perhaps you meant trials"),
    (["tune", "--trails", "640"], "No such option '?--trails.*--trials"),
    (["tune", "640"], "unexpected extra argument"),
    (["tuna"], "No such command 'tuna'"),
    (["recompile", "--run", "7"], "the command recompile is gone: `ansor-mlflow compile --tune-run RUN --allow-m"),
    (["evaluate"], "model_uri='': it must be models:/…, runs:/… or a model's directory"),
    (["tune", "--network", "resnet-17"], "network='resnet-17' is neither .*; perhaps you meant resnet-18"),
    (["compile", "--network", "pickle.pt"], r"pickle.pt: pickles of PyTorch do not say .*; export the model to ONNX"),
    (["main", "--network", "pickle.pt2"], r"pickle.pt2: reading a model of PyTorch can run any code .*trust=true"),
]


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(("args", "message"), PARSE_ERRORS)
def test_command_line_that_cannot_be_parsed(here: RunCommand, args: list[str], message: str) -> None:
    failed = here(*args)
    assert_failed(failed, USER, message)
    assert failed.run is None  # it is said before a run is opened


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("args", "message"), [PARSE_ERRORS[0], (["tune", "--network", "resnet-17"], "perhaps you meant")]
)
def test_the_run_that_mlflow_run_opened_carries_the_error(
    here: RunCommand, new_experiment: str, monkeypatch: pytest.MonkeyPatch, args: list[str], message: str
) -> None:
    opened = mlflow.MlflowClient().create_run(new_experiment, tags={MLFLOW_PROJECT_ENTRY_POINT: "tune"})
    monkeypatch.setenv("MLFLOW_RUN_ID", opened.info.run_id)
    failed = here(*args)
    assert failed.finished.exit_code == USER
    (error,) = failed.finished.errors
    assert re.search(message, error)
    assert failed.run is not None
    assert failed.run.info.run_id == opened.info.run_id
    assert failed.run.data.tags[names.TAG_ERROR] == error.removeprefix("Error: ")
    assert failed.run.data.tags[names.TAG_EXIT_CODE] == "2"
    assert failed.run.data.tags[names.TAG_STEP] == "tune"


VALID_LINE = json.dumps([0, [[[], []], [0.001], {"kind": "llvm", "mcpu": "apple-m1", "num-cores": 4}, []]])


def write_records(directory: Path, *lines: str) -> None:
    directory.mkdir()
    (directory / WORKLOAD_FILE).write_text('["1", "workload"]\n')
    (directory / RECORD_FILE).write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture
def record_directories(tmp_path: Path, small_onnx: Path) -> None:
    shutil.copy(small_onnx, tmp_path / "small.onnx")
    (tmp_path / "empty").mkdir()
    write_records(tmp_path / "no_lines")
    write_records(tmp_path / "damaged", VALID_LINE[:30])
    write_records(tmp_path / "foreign", VALID_LINE)
    write_records(tmp_path / "alone", VALID_LINE)
    (tmp_path / "alone" / WORKLOAD_FILE).unlink()


@pytest.mark.usefixtures("record_directories")
@pytest.mark.parametrize(
    ("parameters", "exit_code", "message"),
    [
        ({}, USER, "tune_run and records: neither was given; give the ID of a tuning run, or records=…"),
        ({"tune_run": NO_RUN, "records": "foreign"}, USER, "tune_run and records: both were given; give the ID"),
        ({"tune_run": NO_RUN}, USER, f"cannot read the records of run {NO_RUN}: .*not found"),
        ({"records": "empty"}, USER, f"records=empty: the directory has no {RECORD_FILE}"),
        ({"records": "alone"}, USER, f"the workload file {WORKLOAD_FILE} is missing beside {RECORD_FILE}"),
        ({"records": f"runs:/{NO_RUN}/records"}, USER, "cannot read records=runs:/.*not found"),
        ({"records": "no_lines"}, RECORDS, "there is no valid record in it; tune first"),
        (
            {"records": "damaged"},
            RECORDS,
            f"damaged/{RECORD_FILE}: line 1 is not a tuning record of TVM, and there is no",
        ),
        ({"records": "foreign"}, RECORDS, "the records are for llvm apple-m1 ×4, this is llvm .*; tune on this device"),
    ],
)
def test_records_that_cannot_be_used(
    here: RunCommand, parameters: dict[str, Any], exit_code: int, message: str, tmp_path: Path
) -> None:
    given = {name: path.read_bytes() for name in ("damaged", "foreign") for path in (tmp_path / name).iterdir()}
    failed = here("compile", *flags({"network": "small.onnx", **parameters}))
    assert_failed(failed, exit_code, message)
    assert (failed.run is None) == (exit_code == USER)  # what is wrong with records is known when they are taken
    for name in ("damaged", "foreign"):
        assert given[name] in [path.read_bytes() for path in (tmp_path / name).iterdir()]


def test_tuning_run_that_has_no_records(here: RunCommand, experiment_id: str) -> None:
    other = mlflow.MlflowClient().create_run(experiment_id).info.run_id
    failed = here("compile", "--tune-run", other)
    assert_failed(failed, USER, f"run {other} has no records; give the ID of a tuning run")
    assert failed.run is None


def test_tuning_run_whose_records_say_nothing_of_their_network(
    here: RunCommand, experiment_id: str, tmp_path: Path
) -> None:
    client = mlflow.MlflowClient()
    other = client.create_run(experiment_id).info.run_id
    write_records(tmp_path / "foreign", VALID_LINE)
    client.log_artifacts(other, str(tmp_path / "foreign"), names.RECORDS_DIR)
    failed = here("compile", "--tune-run", other)
    assert_failed(failed, RECORDS, "provenance.json of the tuning run is missing or damaged .*; give the records with")


@pytest.mark.parametrize(
    ("model_uri", "exit_code", "message"),
    [
        (
            "models:/nobody/1",
            USER,
            "cannot read the model models:/nobody/1: Registered Model with name=nobody not found",
        ),
        ("models:/nobody/one/two@x", USER, "model_uri=models:/nobody/one/two@x: no URI of a model; write models:/name"),
        (f"runs:/{NO_RUN}/model", USER, f"Run with id={NO_RUN} not found"),
        (".", MODEL, "it has no flavor 'tvm'; give a model that compile logged"),
    ],
)
def test_model_that_cannot_be_found(here: RunCommand, model_uri: str, exit_code: int, message: str) -> None:
    failed = here("evaluate", "--model-uri", model_uri)
    assert_failed(failed, exit_code, message)
    assert (failed.run is None) == (exit_code == USER)


@pytest.mark.nightly
@pytest.mark.system
def test_model_whose_library_computes_something_else(
    here: RunCommand, compiled_network: CompiledNetwork, tmp_path: Path
) -> None:
    """Beside it is a network with other weights than the one that was compiled; every digest is right."""
    model = onnx.load(compiled_network.network)
    weight = next(weight for weight in model.graph.initializer if weight.name == "logits.weight")
    weight.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(weight), weight.name))
    onnx.save(model, tmp_path / "other.onnx")
    other = dataclasses.replace(compiled_network, network=tmp_path / "other.onnx")
    flavor.save_model(other, str(tmp_path / "model"))

    failed = here("evaluate", "--model-uri", "model")
    message = "the outputs of small differ from ONNX Runtime's by max_rel_error=.*, allowed is 0.0001; do not deploy"
    assert_failed(failed, CORRECTNESS, message)
    assert failed.run is not None
    assert failed.run.data.metrics[names.MAX_REL_ERROR] > 1e-2
    assert set(failed.run.data.metrics) == {names.MAX_ABS_ERROR, names.MAX_REL_ERROR}


@pytest.fixture
def elsewhere(new_experiment: str, tmp_path: Path) -> RunCommand:

    def run_elsewhere(*command: str, **extra: str) -> Failed:
        tracking_uri = mlflow.get_tracking_uri()
        finished = run(command, tmp_path, environment(tracking_uri, {"MLFLOW_EXPERIMENT_ID": new_experiment, **extra}))
        client = mlflow.MlflowClient()
        runs = client.search_runs([extra.get("MLFLOW_EXPERIMENT_ID", new_experiment)])
        assert len(runs) <= 1
        return Failed(finished, runs[0] if runs else None, client, tmp_path)

    return run_elsewhere


def test_the_command_ends_with_one_line_and_its_exit_code(elsewhere: RunCommand) -> None:
    failed = elsewhere(ANSOR_MLFLOW, "tune", "--network", "resnet-17")
    assert_failed(failed, USER, "perhaps you meant resnet-18")
    assert failed.run is None
    assert len(failed.finished.stderr.splitlines()) == 1
    assert failed.finished.stdout == ""


@pytest.mark.nightly
def test_tracking_server_that_cannot_be_reached(elsewhere: RunCommand) -> None:
    started = time.monotonic()
    failed = elsewhere(
        ANSOR_MLFLOW,
        "tune",
        "--network",
        "dense:4,32,16",
        MLFLOW_TRACKING_URI=f"http://someone:a-password@127.0.0.1:{free_port()}",
    )
    assert time.monotonic() - started < 180  # MLflow alone would try for ten minutes
    assert_failed(failed, MACHINE, "cannot start a run: .*; check MLFLOW_TRACKING_URI and that the server runs")
    assert failed.run is None
    assert "a-password" not in failed.finished.stderr


@pytest.mark.nightly
def test_store_whose_driver_is_not_installed(elsewhere: RunCommand) -> None:
    uri = "mssql+pymssql://someone:a-password@127.0.0.1/mlflow"
    failed = elsewhere(ANSOR_MLFLOW, "tune", "--network", "dense:4,32,16", MLFLOW_TRACKING_URI=uri)
    assert_failed(
        failed, MACHINE, r"cannot start a run: a package is missing \(No module named 'pymssql'\); install it"
    )
    assert "a-password" not in failed.finished.stderr


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3"), "bucket") as server:
        yield server


@pytest.mark.system
def test_artifact_store_that_refuses_files(
    elsewhere: RunCommand, s3: S3Server, small_onnx: Path, tmp_path: Path
) -> None:
    """It is said before the tuning, not after hours of it."""
    experiment = mlflow.MlflowClient().create_experiment(f"{tmp_path} in S3", "s3://bucket/artifacts")
    command = [ANSOR_MLFLOW, "tune", *flags({**FAST, "network": small_onnx, "trials": 5})]
    failed = elsewhere(*command, **{**s3.environment("another-secret-key"), "MLFLOW_EXPERIMENT_ID": experiment})
    assert_failed(
        failed, MACHINE, "the S3 artifact store answered: .*SignatureDoesNotMatch.*; check the bucket, AWS_ACC"
    )
    assert failed.run is not None
    where = ("lowering ", "start  ", "tune run ", "run    ")
    said = [line for line in failed.finished.stderr.splitlines() if not line.startswith(where)]
    assert said == failed.finished.errors
    assert "tuning small" not in failed.finished.stderr
    shown = json.dumps([failed.run.to_dictionary(), failed.finished.stdout, failed.finished.stderr])
    assert not [secret for secret in (SECRET_KEY, "another-secret-key", ACCESS_KEY) if secret in shown]
    assert list(s3.directory.rglob("*")) == [s3.directory / "bucket"]


@pytest.mark.nightly
def test_artifact_store_that_refuses_to_be_read(elsewhere: RunCommand, s3: S3Server) -> None:
    command = [ANSOR_MLFLOW, "evaluate", "--model-uri", "s3://bucket/artifacts/model"]
    failed = elsewhere(*command, **s3.environment("another-secret-key"))
    message = "cannot read the model .*: the S3 artifact store answered: .*signature.*; check the bucket, AWS_ACCESS"
    assert_failed(failed, MACHINE, message)
