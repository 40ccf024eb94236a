"""The MLflow project: what `mlflow run` does with a network, and what it leaves in the store and in S3."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import mlflow
import numpy as np
import onnxruntime
import pytest
import yaml
from helpers.commands import ANSOR_MLFLOW, FAST, ROOT, Finished, environment, flags, run_project
from helpers.commands import run as run_command
from helpers.servers import ACCESS_KEY, SECRET_KEY, S3Server, s3_server
from mlflow.entities import Run
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE

from ansor_mlflow import names
from ansor_mlflow.foreign import duration
from ansor_mlflow.networks.load import Network
from ansor_mlflow.parameters import RunOptions, TuneOptions, listed
from ansor_mlflow.tensors import random_inputs
from ansor_mlflow.trials import TrialStatus

NUM_TRIALS = 12
EVALUATED = [name for name in names.summary_metrics(["onnxruntime"]) if name != names.INSTANT_LATENCY_MS]
pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Store:
    """An sqlite store, and an experiment in it whose artifacts are in S3."""

    uri: str
    database: Path
    experiment_id: str
    s3: S3Server

    @property
    def client(self) -> mlflow.MlflowClient:
        return mlflow.MlflowClient(self.uri)

    def environment(self) -> dict[str, str]:
        return environment(self.uri, self.s3.environment())

    def artifacts(self, run: Run) -> Path:
        return self.s3.directory / run.info.artifact_uri.removeprefix("s3://")

    def children(self, run: Run) -> dict[str, Run]:
        runs = self.client.search_runs(
            [self.experiment_id], f"tags.mlflow.parentRunId = '{run.info.run_id}'", max_results=50
        )
        children = {child.data.tags[names.TAG_STEP]: child for child in runs}
        assert len(children) == len(runs)
        return children

    def parent(self) -> Run:
        runs = self.client.search_runs([self.experiment_id], max_results=50)
        (parent,) = (run for run in runs if "mlflow.parentRunId" not in run.data.tags)
        return parent


@dataclass(frozen=True)
class Pipeline:
    """A finished `mlflow run` of the entry point `main`."""

    finished: Finished
    store: Store
    cwd: Path
    parent: Run
    tune: Run
    compile: Run
    evaluate: Run
    promote: Run

    @property
    def runs(self) -> list[Run]:
        return [self.parent, self.tune, self.compile, self.evaluate, self.promote]


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3"), "bucket") as server:
        yield server


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store") / "mlflow.db"


def make_experiment(database: Path, s3: S3Server, name: str) -> Store:
    uri = f"sqlite:///{database}"
    experiment_id = mlflow.MlflowClient(uri).create_experiment(name, f"s3://bucket/{name}")
    return Store(uri, database, experiment_id, s3)


@pytest.fixture(scope="module")
def pipeline(database: Path, s3: S3Server, small_onnx: Path, tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    store = make_experiment(database, s3, "pipeline")
    parameters = {
        **FAST,
        "network": small_onnx,
        "trials": NUM_TRIALS,
        "num_trials_per_round": 2,
        "rivals": "onnxruntime",
        "register_as": "small",
        "promote": "true",
        "alias": "champion",
    }
    cwd = tmp_path_factory.mktemp("cwd")
    finished = run_project(ROOT, parameters, cwd, store.environment(), experiment_id=store.experiment_id)
    assert finished.exit_code == 0, finished.stderr
    parent = store.parent()
    return Pipeline(finished, store, cwd, parent, **store.children(parent))


def test_every_run_is_finished_and_says_what_it_is(pipeline: Pipeline) -> None:
    assert [run.info.status for run in pipeline.runs] == ["FINISHED"] * 5
    steps = ["main", "tune", "compile", "evaluate", "promote"]
    assert [run.data.tags[names.TAG_STEP] for run in pipeline.runs] == steps
    for run in pipeline.runs:
        assert run.data.tags[names.TAG_NETWORK] == "small"
        assert run.data.tags[names.TAG_TARGET].startswith("llvm ")
        assert names.TAG_ERROR not in run.data.tags
    target = pipeline.tune.data.tags[names.TAG_TARGET]
    title = f"small · {NUM_TRIALS} trials · strategy random · {target}"
    assert [run.info.run_name for run in pipeline.runs] == [
        title,
        f"tune {title}",
        f"compile small · {target}",
        f"evaluate {title}",
        "promote small/1 · no_champion",
    ]


def test_params_are_those_of_the_entry_point(pipeline: Pipeline) -> None:
    params = pipeline.tune.data.params
    known = set(TuneOptions.model_fields) - set(RunOptions.model_fields)
    assert set(params) >= known & {*listed(TuneOptions), *names.SEARCH_PARAMS}
    written = yaml.safe_load((pipeline.store.artifacts(pipeline.tune) / names.PARAMETERS_FILE).read_text())
    assert {"repeat", *names.SEARCH_PARAMS} <= written.keys() <= known
    assert (params["trials"], params["strategy"], params["num_trials_per_round"]) == (str(NUM_TRIALS), "random", "2")
    assert params["num_trials"] == str(NUM_TRIALS)
    assert int(params["num_tasks"]) > 1
    assert pipeline.compile.data.params["tune_run"] == pipeline.tune.info.run_id


def test_the_parent_sums_up_its_children(pipeline: Pipeline) -> None:
    metrics = pipeline.parent.data.metrics
    assert set(metrics) >= {
        *EVALUATED,
        names.BEST_LATENCY_MS,
        names.TRIALS_MEASURED,
        names.TRIALS_PER_MINUTE,
        names.COVERAGE_TASKS,
        names.COVERAGE_FLOPS,
        names.LIBRARY_GROWTH_MIB,
    }
    assert all(np.isfinite(value) for value in metrics.values())
    assert metrics[names.COVERAGE_TASKS] == metrics[names.COVERAGE_FLOPS] == 1
    assert metrics[names.TRIALS_MEASURED] == NUM_TRIALS
    assert 0 <= metrics[names.MAX_REL_ERROR] <= 1e-4
    assert metrics[names.LATENCY_P90_MS] >= metrics[names.LATENCY_MS] > 0
    assert metrics[names.THROUGHPUT_PER_S] == pytest.approx(1e3 / metrics[names.LATENCY_MS], rel=1e-4)
    ratio = metrics[names.UNTUNED_LATENCY_MS] / metrics[names.LATENCY_MS]
    assert metrics[names.SPEEDUP_VS_UNTUNED] == pytest.approx(ratio, rel=1e-4)
    for name in EVALUATED:
        assert metrics[name] == pipeline.evaluate.data.metrics[name]
    (made,) = pipeline.store.client.get_run(pipeline.parent.info.run_id).outputs.model_outputs
    assert pipeline.parent.data.tags[names.TAG_MODEL_URI] == f"models:/{made.model_id}"
    note = pipeline.parent.data.tags[MLFLOW_RUN_NOTE]
    assert f": **{duration(metrics[names.LATENCY_MS] / 1e3)}**, " in note
    assert f"trials: {NUM_TRIALS}\n" in note
    assert "mlflow run . --env-manager local -P network=" in note


def test_the_evaluation_is_the_models(pipeline: Pipeline) -> None:
    client = pipeline.store.client
    compiled = client.get_run(pipeline.compile.info.run_id)  # a search leaves out the models of runs
    evaluated, promoted = (client.get_run(run.info.run_id) for run in (pipeline.evaluate, pipeline.promote))
    (output,) = compiled.outputs.model_outputs
    assert compiled.data.tags[names.TAG_MODEL_URI] == f"models:/{output.model_id}"
    for run in (evaluated, promoted):
        assert [model.model_id for model in run.inputs.model_inputs] == [output.model_id]
    model = client.get_logged_model(output.model_id)
    assert model.name.startswith("small-llvm-")
    metrics = {metric.key: metric.value for metric in model.metrics if metric.run_id == evaluated.info.run_id}
    for name in (names.LATENCY_MS, names.LATENCY_P99_MS, names.SPEEDUP_VS_BEST, names.MAX_REL_ERROR):
        assert metrics[name] == evaluated.data.metrics[name]
    assert len(client.get_metric_history(evaluated.info.run_id, names.LATENCY_MS)) == 1
    for name in names.TUNING_METRICS:  # the leaderboard has one row for a model
        assert evaluated.data.metrics[name] == pipeline.tune.data.metrics[name]
    tags = {names.TAG_NETWORK: "small", names.TAG_DTYPE: "float32", names.TAG_TUNE_RUN: pipeline.tune.info.run_id}
    assert model.tags.items() >= {**tags, names.TAG_NUM_TRIALS: str(NUM_TRIALS)}.items()
    assert model.tags[names.TAG_TARGET] == evaluated.data.tags[names.TAG_TARGET]
    assert model.tags.get(names.TAG_UNRELIABLE) == evaluated.data.tags.get(names.TAG_UNRELIABLE)


def test_every_round_is_a_step_of_the_curves(pipeline: Pipeline) -> None:
    def history(name: str) -> list[tuple[int, float]]:
        metrics = pipeline.store.client.get_metric_history(pipeline.tune.info.run_id, name)
        return sorted((metric.step, metric.value) for metric in metrics)

    measured = history(names.TRIALS_MEASURED)
    assert [value for _, value in measured] == [step for step, _ in measured]
    log = (pipeline.store.artifacts(pipeline.tune) / names.LOG_FILE).read_text()
    rounds = [int(trials) for trials in re.findall(r"INFO +(\d+) trials +[\d.]+ s  ", log)]
    assert [step for step, _ in measured] == rounds
    assert len(rounds) > NUM_TRIALS / 2
    assert rounds[-1] == NUM_TRIALS
    for name in (names.trials_with(TrialStatus.OK), names.TIME_SEARCH_S):
        assert {step for step, _ in history(name)} == {step for step, _ in measured}
    assert sum(pipeline.tune.data.metrics.get(names.trials_with(status), 0) for status in TrialStatus) == NUM_TRIALS

    best = history(names.BEST_LATENCY_MS)
    assert best
    assert [step for step, _ in best] == [step for step, _ in measured][-len(best) :]  # from when every task has one
    assert all(later <= earlier for (_, earlier), (_, later) in pairwise(best))
    assert pipeline.tune.data.metrics[names.BEST_LATENCY_MS] == best[-1][1]


def test_every_task_has_a_curve(pipeline: Pipeline) -> None:
    metrics = pipeline.tune.data.metrics
    tasks = json.loads((pipeline.store.artifacts(pipeline.tune) / names.TASKS_FILE).read_text())
    assert len(tasks) == int(pipeline.tune.data.params["num_tasks"])
    for task in tasks:
        assert metrics[names.task_latency_us(task["task"])] == pytest.approx(task["latency_us"], rel=1e-4)
    total_ms = sum(task["weight"] * task["latency_us"] for task in tasks) / 1e3
    assert metrics[names.BEST_LATENCY_MS] == pytest.approx(total_ms, rel=1e-4)


def test_records_and_what_explains_them_are_artifacts(pipeline: Pipeline) -> None:
    directory = pipeline.store.artifacts(pipeline.tune)
    files = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    assert files >= {
        "records/database_tuning_record.json",
        "records/database_workload.json",
        "records/best/database_tuning_record.json",
        "records/best/database_workload.json",
        "records/fingerprint.json",
        "records/provenance.json",
        "records/manifest.json",
        "trials.json",
        "tasks.json",
        "convergence.png",
        "environment.json",
        "tuning.log",
        "network.onnx",
    }
    assert len((directory / "records/database_tuning_record.json").read_text().splitlines()) == NUM_TRIALS
    num_tasks = int(pipeline.tune.data.params["num_tasks"])
    assert len((directory / "records/best/database_tuning_record.json").read_text().splitlines()) == num_tasks
    assert (directory / "convergence.png").read_bytes().startswith(b"\x89PNG\r\n")
    provenance = json.loads((directory / "records/provenance.json").read_text())
    assert provenance["from_file"] is True
    assert json.loads((directory / "records/fingerprint.json").read_text())["target"]["kind"] == "llvm"
    assert json.loads((directory / "environment.json").read_text())["packages"]["mlflow"] == mlflow.__version__
    assert f"{NUM_TRIALS} trials in " in (directory / "tuning.log").read_text()


def test_everything_is_in_s3_and_nothing_elsewhere(pipeline: Pipeline) -> None:
    assert all(run.info.artifact_uri.startswith("s3://bucket/pipeline/") for run in pipeline.runs)
    assert list(pipeline.cwd.iterdir()) == []
    ids = [run.info.run_id for run in pipeline.runs]
    assert not [path for run_id in ids for path in (*ROOT.glob(f"mlruns/*/{run_id}"), *ROOT.glob(f".ansor/{run_id}"))]
    assert list(pipeline.store.s3.directory.glob("bucket/pipeline/models/*/artifacts/libraries/*/*"))


def test_credentials_are_nowhere(pipeline: Pipeline) -> None:
    """In no param, tag or metric (which are in the database), artifact, or line of output."""
    secrets = [SECRET_KEY.encode(), ACCESS_KEY.encode()]
    output = (pipeline.finished.stdout + pipeline.finished.stderr).encode()
    stored = [path for path in pipeline.store.s3.directory.rglob("*") if path.is_file()]
    assert len(stored) > 20
    for content in (output, pipeline.store.database.read_bytes(), *(path.read_bytes() for path in stored)):
        assert not [secret for secret in secrets if secret in content]


def test_the_registered_version_carries_the_evidence(pipeline: Pipeline) -> None:
    version = pipeline.store.client.get_model_version("small", "1")
    of_promotion = {names.TAG_PROMOTION, names.TAG_PROMOTION_RUN}
    assert set(version.tags) == {names.LATENCY_MS, names.TAG_NETWORK, names.TAG_TARGET, *of_promotion}
    note = pipeline.parent.data.tags["mlflow.note.content"]
    assert version.description == pipeline.store.client.get_registered_model("small").description == note
    latency_ms = pipeline.parent.data.metrics[names.LATENCY_MS]
    assert float(version.tags[names.LATENCY_MS]) == pytest.approx(latency_ms, rel=1e-4)
    assert pipeline.parent.data.tags[names.TAG_MODEL_URI] == pipeline.compile.data.tags[names.TAG_MODEL_URI]
    assert "registered as version 1" in pipeline.finished.stdout


def test_the_registered_model_loads_from_s3_and_is_right(
    pipeline: Pipeline, small_network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**pipeline.store.s3.environment(), "MLFLOW_TRACKING_URI": pipeline.store.uri}.items():
        monkeypatch.setenv(name, value)
    model = mlflow.pyfunc.load_model("models:/small/1")
    session = onnxruntime.InferenceSession(small_network.model.SerializeToString())
    for seed in range(3):
        inputs = random_inputs(small_network.inputs, seed)
        (expected,) = session.run(None, inputs)
        assert np.ptp(expected) > 0.1
        np.testing.assert_allclose(model.predict(inputs), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.nightly
def test_records_in_an_artifact_store_compile_the_network(pipeline: Pipeline, small_onnx: Path, tmp_path: Path) -> None:
    parameters = {"network": small_onnx, "records": f"runs:/{pipeline.tune.info.run_id}/records"}
    env = {**pipeline.store.environment(), "MLFLOW_EXPERIMENT_NAME": "elsewhere"}
    finished = run_command([ANSOR_MLFLOW, "compile", *flags(parameters)], tmp_path, env)
    assert finished.exit_code == 0, finished.stderr
    lines = r"computed by [a-z,]+; coverage 100% of tasks, 100.0% of operations\nrun    \w{32}\nmodel  models:/m-\w+\n"
    assert re.fullmatch(lines, finished.stdout)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the project, so that what a failed run leaves beside it is left there."""
    for name in ("MLproject", "conda.yaml"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "pipelines", tmp_path / "pipelines", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.mark.nightly
def test_a_step_that_fails_fails_the_pipeline_with_its_message(
    project: Path, database: Path, s3: S3Server, small_onnx: Path
) -> None:
    store = make_experiment(database, s3, "failure")
    finished = run_project(
        project,
        {**FAST, "network": small_onnx, "trials": 1},
        project,
        store.environment(),
        experiment_id=store.experiment_id,
    )
    assert finished.exit_code != 0
    message = r"trials=1, but the network has \d tasks and each needs a trial; give at least \d, or auto, or 0 to .*"
    tune_error, main_error = finished.errors
    assert re.fullmatch(f"Error: {message}", tune_error)
    assert main_error == f"Error: tune: {tune_error.removeprefix('Error: ')}"

    parent = store.parent()
    children = store.children(parent)
    assert list(children) == ["tune"]
    for run, error in ((parent, main_error), (children["tune"], tune_error)):
        assert run.info.status == "FAILED"
        assert run.data.tags[names.TAG_ERROR] == error.removeprefix("Error: ")
        assert run.data.tags[names.TAG_EXIT_CODE] == "2"
    assert not (store.artifacts(children["tune"]) / names.RECORDS_DIR).exists()
