"""One model has a library for each of several devices: compiled from several tuning runs, or added to it."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlflow
import onnx
import pytest
from helpers.commands import RunCommand
from helpers.untuned import assert_computes

from ansor_mlflow import flavor, names
from ansor_mlflow.device import DeviceFingerprint, available_cpus
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.lowering import LOWERING_VERSION
from ansor_mlflow.model import CompiledNetwork, Manifest, load_package
from ansor_mlflow.networks import Network
from ansor_mlflow.records import RECORD_FILE, WORKLOAD_FILE, Provenance, write_description
from ansor_mlflow.steps.fetching import tuning_of

CPUS = available_cpus()
LogTuning = Callable[..., str]
LogCompiled = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def elsewhere(compiled_network: CompiledNetwork) -> DeviceFingerprint:
    """An older CPU than any that this runs on, with more threads than there are here."""
    target = {**compiled_network.fingerprint.target, "mcpu": "x86-64", "num-cores": CPUS + 1}
    return DeviceFingerprint(
        target=target, machine="x86_64", cpu_model="Older", features=("64bit", "sse2"), num_threads=CPUS + 1
    )


@pytest.fixture
def log_tuning(
    new_experiment: str, small_onnx: Path, small_network: Network, tuned_records: Path, tmp_path: Path
) -> LogTuning:
    """Logs what a tuning run leaves behind: the records of this host, as if they were of a device."""
    provenance = Provenance(
        network="small.onnx",
        from_file=True,
        network_sha256=small_network.sha256,
        batch_size=1,
        input_shapes={},
        seed=0,
        layout="auto",
        dtype="float32",
        pad_channels="auto",
        target="auto",
        num_threads=1,
        lowering_version=LOWERING_VERSION,
        tvm_version="0.27",
        host="elsewhere",
        measure={},
    )

    def log(device: DeviceFingerprint, **changed: Any) -> str:
        with mlflow.start_run(experiment_id=new_experiment, tags={names.TAG_STEP: "tune"}) as run:
            files = tmp_path / run.info.run_id
            records = files / names.RECORDS_DIR
            records.mkdir(parents=True)
            shutil.copy(small_onnx, files / names.NETWORK_FILE)
            shutil.copy(tuned_records / WORKLOAD_FILE, records)
            text = (tuned_records / RECORD_FILE).read_text()
            text = re.sub(r'"mcpu":"[^"]+"', f'"mcpu":"{device.target["mcpu"]}"', text)
            text = re.sub(r'"num-cores":\d+', f'"num-cores":{device.target["num-cores"]}', text)
            (records / RECORD_FILE).write_text(text)
            write_description(records, device, replace(provenance, **changed))
            mlflow.log_artifacts(str(files))
        return str(run.info.run_id)

    return log


def download(model_uri: str, directory: Path) -> tuple[Path, Manifest]:
    directory.mkdir(exist_ok=True)
    path = Path(mlflow.artifacts.download_artifacts(artifact_uri=model_uri, dst_path=str(directory)))
    return path, Manifest.read(path)


@pytest.mark.nightly
def test_several_tuning_runs_make_one_model(
    log_tuning: LogTuning,
    run_here: RunCommand,
    new_experiment: str,
    compiled_network: CompiledNetwork,
    elsewhere: DeviceFingerprint,
    small_onnx: Path,
    tmp_path: Path,
) -> None:
    here = compiled_network.fingerprint
    runs = [log_tuning(elsewhere), log_tuning(here)]
    assert run_here("compile", "--tune-run", ", ".join(runs)) == 0
    (run,) = mlflow.search_runs([new_experiment], "tags.`ansor.step` = 'compile'", output_format="list")
    assert run.data.tags[names.TAG_TUNE_RUN] == ",".join(runs)
    assert run.data.tags[names.TAG_TARGET] == f"{elsewhere.description}, {here.description}"
    directory, manifest = download(run.data.tags[names.TAG_MODEL_URI], tmp_path / "model")
    assert [entry.fingerprint for entry in manifest.libraries] == [elsewhere, here]
    assert [entry.provenance["tune_run"] for entry in manifest.libraries] == runs
    least = min(entry.coverage["flops_share"] for entry in manifest.libraries)
    assert run.data.metrics[names.COVERAGE_FLOPS] == pytest.approx(least, rel=1e-4)
    assert manifest.libraries[1].coverage["task_share"] == 1.0
    model = load_package(directory, manifest)
    assert (model.choice.level, model.entry.fingerprint) == ("exact", here)
    assert_computes(model, small_onnx)
    made_elsewhere = load_package(directory, replace(manifest, libraries=manifest.libraries[:1]))
    assert made_elsewhere.choice.level == "compatible"
    assert_computes(made_elsewhere, small_onnx)
    with pytest.raises(UserInputError, match=f"was compiled with several tunings; give one of {runs[0]},{runs[1]}$"):
        tuning_of(run)


@pytest.mark.system
def test_what_a_fleet_tuned_is_for_its_device_in_every_command(
    log_tuning: LogTuning,
    run_here: RunCommand,
    new_experiment: str,
    elsewhere: DeviceFingerprint,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run says target=auto, which was the server, and not this host."""
    tuned = log_tuning(elsewhere, measure={"rpc_key": "boards"})
    compile_ = ["compile", "--tune-run", tuned]
    for command in (compile_, [*compile_, "--allow-missing"], ["explain", tuned]):
        assert run_here(*command) == 0, command
    assert elsewhere.description in capsys.readouterr().out
    runs = mlflow.search_runs([new_experiment], f"tags.`{names.TAG_TUNE_RUN}` = '{tuned}'", output_format="list")
    assert [run.data.tags[names.TAG_STEP] for run in runs] == ["compile", "compile"]
    assert {run.data.tags[names.TAG_TARGET] for run in runs} == {elsewhere.description}


def test_tunings_that_make_no_model_together(
    log_tuning: LogTuning,
    run_here: RunCommand,
    elsewhere: DeviceFingerprint,
    compiled_network: CompiledNetwork,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, there, again = log_tuning(compiled_network.fingerprint), log_tuning(elsewhere), log_tuning(elsewhere)
    other_network = log_tuning(elsewhere, network_sha256="0")
    foreign = log_tuning(replace(elsewhere, machine="sparc64"))
    mismatch = "allow_target_mismatch with several tuning runs: each is compiled for its own device"
    for runs, given, exit_code, message in (
        ((here, other_network), (), 2, f"tune_run: {here} tuned .+ and {other_network} tuned .+, or other weights of"),
        ((there, again), (), 2, f"tune_run: {there} and {again} are both for llvm x86-64 .+: give one of"),
        ((there, "0"), ("--allow-target-mismatch",), 2, mismatch),
        ((foreign, here), (), 3, r"libraries for sparc64 are linked with sparc64-linux-gnu-g\+\+, which is not here"),
    ):
        if exit_code == 3:
            monkeypatch.setenv("PATH", "")
        assert run_here("compile", "--tune-run", ",".join(runs), *given) == exit_code
        (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Error: ")]
        assert re.match(f"Error: {message}", error)


@pytest.fixture
def log_compiled(new_experiment: str) -> LogCompiled:
    """Logs a model as `compile` does; returns the ID of the run and the URI of the model."""

    def log(compiled: CompiledNetwork, **options: Any) -> tuple[str, str]:
        with mlflow.start_run(experiment_id=new_experiment) as run:
            model_uri = str(flavor.log_model(compiled, name="model", **options).model_uri)
            mlflow.set_tags({names.TAG_STEP: "compile", names.TAG_MODEL_URI: model_uri})
        return str(run.info.run_id), model_uri

    return log


def test_a_library_is_added(
    log_compiled: LogCompiled,
    compiled_network: CompiledNetwork,
    elsewhere: DeviceFingerprint,
    small_onnx: Path,
    tmp_path: Path,
) -> None:
    registered = tmp_path.name
    foreign = tmp_path / "foreign.py"
    foreign.touch()
    _, base = log_compiled(
        replace(compiled_network, fingerprint=elsewhere),
        registered_model_name=registered,
        metadata={"team": "vision"},
        extra_pip_requirements=["pillow"],
        code_paths=[str(Path(flavor.__file__).parent), str(foreign)],
    )
    run, _ = log_compiled(compiled_network)
    info = flavor.add_library(base, run, registered_model_name=registered)
    assert info.model_uri != base
    assert mlflow.get_logged_model(info.model_id).tags[names.TAG_EXTENDED_FROM] == base
    assert mlflow.get_logged_model(info.model_id).name == "model"
    assert info.metadata == {"team": "vision"}
    directory, manifest = download(f"models:/{registered}/2", tmp_path / "extended")
    assert [entry.fingerprint for entry in manifest.libraries] == [elsewhere, compiled_network.fingerprint]
    assert "pillow" not in (directory / "requirements.txt").read_text() + (directory / "conda.yaml").read_text()
    assert [path.name for path in (directory / "code").iterdir()] == ["ansor_mlflow"]
    model = flavor.load_model(f"models:/{registered}/2")
    assert (model.choice.level, model.entry.fingerprint) == ("exact", compiled_network.fingerprint)
    assert_computes(model, small_onnx)
    _, unchanged = download(base, tmp_path / "base")
    assert [entry.fingerprint for entry in unchanged.libraries] == [elsewhere]


def test_nothing_is_built_to_log_a_model_for_another_device(
    log_compiled: LogCompiled,
    compiled_network: CompiledNetwork,
    elsewhere: DeviceFingerprint,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """MLflow calls a model when it is logged."""
    log_compiled(replace(compiled_network, fingerprint=replace(elsewhere, features=("avx1024f",))))
    assert not [record for record in caplog.records if "building" in record.getMessage()]


def test_the_library_of_a_device_is_replaced(
    log_compiled: LogCompiled, compiled_network: CompiledNetwork, tmp_path: Path
) -> None:
    """The old one may be of an older version of TVM, for no library of it is left."""
    old = {"tvm_version": "0.20.0"}
    new = {"tvm_version": importlib.metadata.version("apache-tvm"), "trials": "more"}
    _, base = log_compiled(replace(compiled_network, provenance=old), pip_requirements=["apache-tvm==0.20.0"])
    _, newer = log_compiled(replace(compiled_network, provenance=new))
    info = flavor.add_library(base, newer, name="newer")
    assert mlflow.get_logged_model(info.model_id).name == "newer"
    directory, manifest = download(info.model_uri, tmp_path / "extended")
    (entry,) = manifest.libraries
    assert entry.provenance == new
    requirements = (directory / "requirements.txt").read_text()
    assert "apache-tvm==0.20.0" not in requirements
    assert "apache-tvm==" in requirements


def test_libraries_of_two_versions_of_tvm(
    log_compiled: LogCompiled, compiled_network: CompiledNetwork, elsewhere: DeviceFingerprint
) -> None:
    _, base = log_compiled(replace(compiled_network, fingerprint=elsewhere, provenance={"tvm_version": "0.20.0"}))
    run, _ = log_compiled(replace(compiled_network, provenance={"tvm_version": "0.21.0"}))
    with pytest.raises(UserInputError, match=r"of TVM 0\.20\.0 and 0\.21\.0 and .+, and a model has one environment"):
        flavor.add_library(base, run)


def test_a_library_of_another_network(
    log_compiled: LogCompiled, compiled_network: CompiledNetwork, tmp_path: Path
) -> None:
    network = onnx.load(compiled_network.network)
    network.graph.initializer[0].raw_data = bytes(len(network.graph.initializer[0].raw_data))
    onnx.save(network, tmp_path / "other.onnx")
    _, base = log_compiled(compiled_network)
    run, _ = log_compiled(replace(compiled_network, network=tmp_path / "other.onnx", name="other"))
    with pytest.raises(UserInputError, match="other cannot be added to small: the graph or the weights are others"):
        flavor.add_library(base, run)


def test_a_run_without_a_model(
    log_compiled: LogCompiled, log_tuning: LogTuning, compiled_network: CompiledNetwork
) -> None:
    _, base = log_compiled(compiled_network)
    run = log_tuning(compiled_network.fingerprint)
    with pytest.raises(
        UserInputError, match=f"run={run}: the run has no model; .+ ansor-mlflow compile --tune-run {run}"
    ):
        flavor.add_library(base, run)
