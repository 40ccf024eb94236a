"""A script that calls TVM's own tuning functions is logged as our own tuner logs, and runs as it would without."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partialmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlflow
import onnx
import pytest
from helpers.commands import ROOT
from helpers.fakes import FakeBuilder
from mlflow.entities import Run
from mlflow.utils.autologging_utils import autologging_is_disabled, disable_autologging, safety

import ansor_mlflow
from ansor_mlflow import names
from ansor_mlflow.autologging.call import make_trials
from ansor_mlflow.autologging.logged import INTEGRATION, open_run, runtime_num_threads
from ansor_mlflow.device import import_tensor_intrin
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.processes import Outcome
from ansor_mlflow.records import RECORD_FILE, WORKLOAD_FILE, changed_files, read_journal
from ansor_mlflow.records.applicability import device_key, read_fingerprint, read_provenance
from ansor_mlflow.tracking.memory import short_hash
from ansor_mlflow.workers import as_metaschedule_builder

if TYPE_CHECKING:
    from tvm.ir import IRModule

CPUS = os.cpu_count() or 1
TARGET = {"kind": "llvm", "num-cores": 2}
TIMES = (4e-3, 2e-3, 3e-3, 1e-3)
QUICK = {"strategy": "replay-trace", "cost_model": "random", "num_trials_per_iter": 2}


def matmul(size: int = 16) -> IRModule:
    from tvm import IRModule, te

    left, right = te.placeholder((size, size), name="left"), te.placeholder((size, size), name="right")
    k = te.reduce_axis((0, size), name="k")
    product = te.compute((size, size), lambda i, j: te.sum(left[i, k] * right[k, j], axis=k))
    return IRModule({"main": te.create_prim_func([left, right, product])})


def two_matmuls() -> IRModule:
    """A Relax function whose two tasks differ, the first of which is called twice."""
    from tvm import relax

    builder = relax.BlockBuilder()
    data = relax.Var("data", relax.TensorType((8, 8), "float32"))
    with builder.function("main", [data]):
        with builder.dataflow():
            square = builder.emit(relax.op.matmul(data, data))
            square = builder.emit(relax.op.matmul(square, square))
            result = builder.emit_output(relax.op.nn.relu(square))
        builder.emit_func_output(result)
    return relax.get_pipeline("zero")(builder.get())


def timer(times: Sequence[float] = TIMES, error: str | None = None) -> Any:
    """A runner of MetaSchedule that answers with these times, one program after the other, or with an error."""
    from tvm.ir.utils import derived_object
    from tvm.s_tir.meta_schedule.runner import PyRunner
    from tvm.s_tir.meta_schedule.runner.local_runner import LocalRunnerFuture

    @derived_object
    class Timer(PyRunner):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def run(self, inputs: Sequence[Any]) -> list[Any]:
            start, self.count = self.count, self.count + len(inputs)
            steps = range(start, self.count)
            if error is not None:
                return [LocalRunnerFuture(None, error) for _ in steps]
            return [LocalRunnerFuture([times[step % len(times)]], None) for step in steps]

    return Timer()


def breaking_builder(after: int) -> Any:
    """A builder of MetaSchedule that raises once it has built so many programs."""
    from tvm.ir.utils import derived_object
    from tvm.s_tir.meta_schedule.builder import BuilderResult, PyBuilder

    builder = FakeBuilder()
    fake = as_metaschedule_builder(builder)

    @derived_object
    class Breaking(PyBuilder):  # type: ignore[misc]
        def build(self, inputs: Sequence[Any]) -> list[BuilderResult]:
            if len(builder.mods) >= after:
                raise ValueError("the build farm burns")  # one of the few kinds that TVM passes on as they are
            return list(fake.build(inputs))

    return Breaking()


def parts() -> dict[str, Any]:
    return {"builder": as_metaschedule_builder(FakeBuilder()), "runner": timer(), "max_trials_global": 4}


def tune_tir(work_dir: Path, **options: Any) -> Any:
    from tvm.s_tir import meta_schedule as ms

    return ms.tune_tir(matmul(), TARGET, str(work_dir), **{**QUICK, **parts(), **options})


def tune_relax(work_dir: Path) -> Any:
    from tvm.s_tir.meta_schedule.relax_integration import tune_relax

    return tune_relax(two_matmuls(), {}, TARGET, str(work_dir), **{**QUICK, **parts(), "max_trials_per_task": 2})


def two_contexts() -> list[Any]:
    from tvm.s_tir.meta_schedule import TuneContext
    from tvm.target import Target

    target, space, strategy = Target(TARGET), "post-order-apply", "replay-trace"
    return [
        TuneContext(mod, target=target, space_generator=space, search_strategy=strategy)
        for mod in (matmul(), matmul(8))
    ]


def tune_tasks(work_dir: Path) -> Any:
    """Without a file."""
    from tvm.s_tir import meta_schedule as ms

    memory = {"database": "memory", "cost_model": "random", "max_trials_per_task": 2, "num_trials_per_iter": 2}
    tasks = {"tasks": two_contexts(), "task_weights": [2.0, 1.0], "work_dir": str(work_dir)}
    return ms.tune_tasks(**tasks, **parts(), **memory)


def tune_by_scheduler(work_dir: Path) -> Any:
    """With arguments by position."""
    from tvm.s_tir import meta_schedule as ms

    builder, runner, database = as_metaschedule_builder(FakeBuilder()), timer(), ms.database.MemoryDatabase()
    callbacks, cost_model = ms.MeasureCallback.create("default"), ms.CostModel.create("random")
    scheduler = ms.task_scheduler.RoundRobin()
    scheduler.tune(two_contexts(), [2, 1], 4, 2, 2, builder, runner, callbacks, database, cost_model)
    return database


@pytest.fixture(autouse=True)
def here(new_experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A script in a directory of its own, under MLflow's stricter checks of autologging."""
    import_tensor_intrin("llvm")
    _forget_tvms_logging()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_AUTOLOGGING_TESTING", "true")
    # those want callbacks of a metaclass of MLflow's, which an object of TVM cannot have
    exemption = safety.ValidationExemptArgument(INTEGRATION, "tune", lambda _: True, 8, "measure_callbacks")
    monkeypatch.setattr(safety, "_VALIDATION_EXEMPT_ARGUMENTS", [*safety._VALIDATION_EXEMPT_ARGUMENTS, exemption])
    ansor_mlflow.autolog()
    yield
    ansor_mlflow.autolog(disable=True)
    while mlflow.active_run():
        mlflow.end_run()
    _forget_tvms_logging()


def _forget_tvms_logging() -> None:
    """Undoes what a tuning set up, to which pytest adds a handler without a name; TVM's next set-up wants names."""
    logger = logging.getLogger("tvm.s_tir.meta_schedule")
    logger.handlers.clear()
    logger.propagate = True


def runs(experiment_id: str) -> list[Run]:
    return mlflow.search_runs([experiment_id], order_by=["attributes.start_time ASC"], output_format="list")


def the_run(experiment_id: str) -> Run:
    (run,) = runs(experiment_id)
    return run


def fetch(run: Run, name: str) -> Path:
    return Path(mlflow.artifacts.download_artifacts(run_id=run.info.run_id, artifact_path=name))


def read_json(run: Run, name: str) -> Any:
    return json.loads(fetch(run, name).read_text())


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def records_of(run: Run) -> list[Any]:
    return lines_of(fetch(run, names.RECORDS_DIR) / RECORD_FILE)


@pytest.mark.parametrize(
    ("tune", "tasks"),
    [
        (tune_tir, {"main": 1}),
        (tune_relax, {"matmul": 1, "fused_matmul_relu": 1}),
        (tune_tasks, {"main": 2, "main_1": 1}),
        (tune_by_scheduler, {"main": 2, "main_1": 1}),
    ],
)
def test_each_entry_point_is_logged_once_and_as_our_own_tuner_logs(
    tune: Callable[[Path], Any], tasks: dict[str, int], new_experiment: str, tmp_path: Path
) -> None:
    database = tune(tmp_path / "work")
    assert len(database.get_all_tuning_records()) == 4
    assert mlflow.active_run() is None
    run = the_run(new_experiment)
    assert run.info.status == "FINISHED"
    assert run.data.tags[names.TAG_STEP] == "tune"
    assert run.data.tags[names.TAG_TARGET].startswith("llvm ×")
    assert run.data.tags[names.TAG_STOP_REASON] == "trials"
    assert run.data.tags["mlflow.autologging"] == "ansor_mlflow"
    title = "main" if len(tasks) == 1 else "2 tasks"
    assert re.fullmatch(rf"tune {title} · 4 trials · llvm ×\d+", str(run.info.run_name))
    expected = {"num_tasks": str(len(tasks)), "num_trials": "4", "trials": "4", "num_trials_per_round": "2"}
    assert expected.items() <= run.data.params.items()

    assert run.data.metrics[names.TRIALS_MEASURED] == run.data.metrics["trials/ok"] == 4
    assert {row["task"]: row["weight"] for row in read_json(run, names.TASKS_FILE)} == tasks
    latencies = {name: run.data.metrics[names.task_latency_us(name)] for name in tasks}
    best_ms = sum(weight * latencies[name] for name, weight in tasks.items()) / 1e3
    assert run.data.metrics[names.BEST_LATENCY_MS] == pytest.approx(best_ms, rel=1e-4)
    points = mlflow.MlflowClient().get_metric_history(run.info.run_id, names.TRIALS_MEASURED)
    assert [(point.step, point.value) for point in points][:2] == [(2, 2), (4, 4)]
    assert {names.TIME_SEARCH_S, names.TIME_BUILD_S, names.TIME_RUN_S, names.TIME_LOG_S} <= run.data.metrics.keys()
    assert run.data.metrics[names.TIME_BUILD_S] > 0

    rows = read_json(run, names.TRIALS_TABLE)["data"]
    assert [row[0] for row in rows] == [1, 2, 3, 4]
    assert {row[1] for row in rows} == tasks.keys()
    assert sorted(row[3] for row in rows) == [1000, 2000, 3000, 4000]
    assert [row[5] for row in rows] == sorted(row[5] for row in rows)
    assert {row[6] for row in rows} == {"direct"}
    assert all(row[7:] == ["metaschedule", row[8]] and re.search(r"\d×\d", row[8]) for row in rows)
    assert fetch(run, names.CONVERGENCE_FIGURE).read_bytes()[:4] == b"\x89PNG"
    assert not list(tmp_path.glob(".ansor/*"))


def test_records_are_those_of_the_users_database_with_their_device(new_experiment: str, tmp_path: Path) -> None:
    from tvm.s_tir.meta_schedule.database import JSONDatabase

    tune_tir(tmp_path / "work")
    records = fetch(the_run(new_experiment), names.RECORDS_DIR)
    assert changed_files(records) == ()
    assert len(JSONDatabase(work_dir=str(records)).get_all_tuning_records()) == 4
    for name in (RECORD_FILE, WORKLOAD_FILE):
        assert lines_of(records / name) == lines_of(tmp_path / "work" / name)
    device = read_fingerprint(records)
    assert device is not None
    assert device.target["num-cores"] == 2
    provenance = read_provenance(records)
    assert provenance.estimated_latency_ms == pytest.approx(1.0)
    assert provenance.trials_per_task == 4
    assert provenance.lowering_version == 0  # so that no tuning of ours goes on from other tasks
    tags = the_run(new_experiment).data.tags
    assert tags[names.TAG_DEVICE] == device_key(device)
    assert tags[names.TAG_WORKLOADS] == short_hash(read_journal(records)[0].workload_hash)
    assert tags[names.TAG_TRIALS_PER_TASK] == "4.0"
    assert [entry.run_s for entry in read_journal(records)] == [(seconds,) for seconds in TIMES]


@pytest.mark.nightly
def test_a_second_tuning_begins_with_what_is_in_the_work_directory(new_experiment: str, tmp_path: Path) -> None:
    tune_tir(tmp_path / "work")
    database = tune_tir(tmp_path / "work", runner=timer([5e-3]))
    assert len(database.get_all_tuning_records()) == 8, "the user's database is his"
    first, second = runs(new_experiment)
    assert len(records_of(first)) == 4
    assert len(records_of(second)) == 8
    assert second.data.metrics[names.TRIALS_MEASURED] == 4
    assert second.data.metrics[names.BEST_LATENCY_MS] == pytest.approx(1.0)


def test_an_active_run_is_used_and_left_as_it_was(new_experiment: str, tmp_path: Path) -> None:
    with mlflow.start_run(run_name="mine") as active:
        mlflow.log_param("num_trials", "as many as it takes")
        mlflow.log_table({"column": [1]}, "mine.json")
        mlflow.set_tag(names.TAG_NETWORK, "my network")
        tune_tir(tmp_path / "work")
        assert mlflow.active_run().info.run_id == active.info.run_id
        mlflow.log_metric("mine", 1)
    run = the_run(new_experiment)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "mine"
    assert run.data.params["num_trials"] == "as many as it takes"
    assert run.data.params["num_tasks"] == "1"
    assert run.data.metrics[names.TRIALS_MEASURED] == 4
    assert names.CONVERGENCE_FIGURE in {file.path for file in mlflow.MlflowClient().list_artifacts(run.info.run_id)}
    tables = {table["path"] for table in json.loads(run.data.tags["mlflow.loggedArtifacts"])}
    assert tables == {"mine.json", names.TRIALS_TABLE}
    assert "mlflow.autologging" not in run.data.tags


@pytest.mark.nightly
def test_tunings_in_one_run_do_not_collide(new_experiment: str, tmp_path: Path) -> None:
    with mlflow.start_run() as active:
        tune_tir(tmp_path / "one")
        tune_tir(tmp_path / "two", max_trials_global=2)
        tune_relax(tmp_path / "three")
    parent, second, third = runs(new_experiment)
    assert parent.info.run_id == active.info.run_id
    assert [run.data.metrics[names.TRIALS_MEASURED] for run in (parent, second, third)] == [4, 2, 4]
    assert {run.data.tags["mlflow.parentRunId"] for run in (second, third)} == {active.info.run_id}
    assert {run.info.status for run in (parent, second, third)} == {"FINISHED"}


@pytest.mark.parametrize("is_active", [False, True])
def test_a_tuning_that_fails_raises_its_error_and_keeps_its_records(
    is_active: bool, new_experiment: str, tmp_path: Path
) -> None:
    if is_active:
        mlflow.start_run()
    with pytest.raises(ValueError, match="the build farm burns"):
        tune_tir(tmp_path / "work", builder=breaking_builder(after=2))
    run = the_run(new_experiment)
    assert run.info.status == ("RUNNING" if is_active else "FAILED")
    assert (mlflow.active_run() is not None) == is_active
    assert "the build farm burns" in run.data.tags[names.TAG_ERROR]
    assert run.data.tags[names.TAG_STOP_REASON] == "interrupted"
    assert run.data.metrics[names.TRIALS_MEASURED] == 2
    assert len(read_json(run, names.TRIALS_TABLE)["data"]) == 2
    assert len(records_of(run)) == 2


def test_the_users_callbacks_are_called_and_replace_the_defaults_as_ever(new_experiment: str, tmp_path: Path) -> None:
    from tvm.ir.utils import derived_object
    from tvm.s_tir.meta_schedule.measure_callback import PyMeasureCallback

    seen: list[int] = []

    @derived_object
    class Mine(PyMeasureCallback):  # type: ignore[misc]
        def apply(self, _scheduler: Any, _task: int, candidates: Sequence[Any], *_: Any) -> None:
            seen.append(len(candidates))

    database = tune_tir(tmp_path / "work", measure_callbacks=[Mine()])
    assert seen == [2, 2]
    assert len(database.get_all_tuning_records()) == 0
    run = the_run(new_experiment)
    assert run.data.metrics[names.TRIALS_MEASURED] == 4
    assert len(records_of(run)) == 4


@pytest.mark.system
def test_the_cost_model_is_not_logged_where_xgboost_is(new_experiment: str, tmp_path: Path) -> None:
    mlflow.xgboost.autolog(log_models=False)
    try:
        tune_tir(tmp_path / "work", cost_model="xgb")
        assert "num_boost_round" not in the_run(new_experiment).data.params
        assert not autologging_is_disabled("xgboost")
    finally:
        mlflow.xgboost.autolog(disable=True)


def test_ctrl_c_kills_the_run(new_experiment: str) -> None:
    """From within a callback it reaches nobody: TVM makes it a RuntimeError."""
    with pytest.raises(KeyboardInterrupt), open_run({}):
        raise KeyboardInterrupt
    assert the_run(new_experiment).info.status == "KILLED"
    assert mlflow.active_run() is None


def test_autolog_twice_logs_once_and_its_tags_are_those_of_new_runs(new_experiment: str, tmp_path: Path) -> None:
    ansor_mlflow.autolog(extra_tags={names.TAG_NETWORK: "my network", "team": "compilers"})
    tune_tir(tmp_path / "work")
    run = the_run(new_experiment)
    assert run.data.tags["team"] == "compilers"
    assert str(run.info.run_name).startswith("tune my network · ")
    assert read_json(run, f"{names.RECORDS_DIR}/{names.PROVENANCE_FILE}")["network"] == "my network"


def test_nothing_is_logged_when_it_is_disabled(new_experiment: str, tmp_path: Path) -> None:
    with disable_autologging():
        tune_tir(tmp_path / "one")
    ansor_mlflow.autolog(disable=True)
    tune_tir(tmp_path / "two")
    assert runs(new_experiment) == []
    ansor_mlflow.autolog(exclusive=True)
    with mlflow.start_run():
        tune_tir(tmp_path / "three")
    assert the_run(new_experiment).data.metrics == {}


def test_another_tvm_is_left_alone_if_that_is_wished(
    new_experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import tvm

    monkeypatch.setattr(tvm, "__version__", "0.28.0")
    ansor_mlflow.autolog(disable_for_unsupported_versions=True)
    tune_tir(tmp_path / "one")
    assert runs(new_experiment) == []
    with caplog.at_level(logging.WARNING, "ansor_mlflow"):
        ansor_mlflow.autolog()
    assert "this is 0.28.0" in caplog.text


def test_an_error_between_batches_does_not_reach_the_tuning(
    new_experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_AUTOLOGGING_TESTING")
    from tvm.ir.utils import derived_object
    from tvm.s_tir.meta_schedule.measure_callback import MeasureCallback, PyMeasureCallback

    @derived_object
    class Vandal(PyMeasureCallback):  # type: ignore[misc]
        def apply(self, *_: Any) -> None:
            for path in tmp_path.glob(f".ansor/*/{names.RECORDS_DIR}/{RECORD_FILE}"):
                if path.is_file():
                    path.unlink()
                    path.mkdir()

    database = tune_tir(tmp_path / "work", measure_callbacks=[*MeasureCallback.create("default"), Vandal()])
    assert len(database.get_all_tuning_records()) == 4
    assert len(runs(new_experiment)) == 1


def test_a_server_that_is_away_costs_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_AUTOLOGGING_TESTING")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    database = tune_tir(tmp_path / "work")
    assert len(database.get_all_tuning_records()) == 4
    assert mlflow.active_run() is None


@pytest.mark.parametrize(
    ("build_error", "run_error", "status"),
    [
        (None, None, "ok"),
        ("LocalBuilder: Timeout, killed after 30.0 seconds", "", "timed_out"),
        ("failed: TVMError: undefined", "", "build_failed"),
        (None, "LocalRunner: Timeout, killed after 30 seconds\n", "timed_out"),
        (None, "LocalRunner: An exception occurred\nTVMError: …", "run_failed"),
    ],
)
def test_failures_are_told_apart(build_error: str | None, run_error: str | None, status: str) -> None:
    from tvm.s_tir.meta_schedule.builder import BuilderResult
    from tvm.s_tir.meta_schedule.runner import RunnerResult

    error = build_error or run_error
    built = BuilderResult(None if build_error else "library.tar", build_error)
    (trial,) = make_trials(7, "matmul", [built], [RunnerResult(None if error else [1e-3, 3e-3], error)])
    assert (trial.step, trial.task, trial.status.value) == (7, "matmul", status)
    assert trial.error == (error or "").strip()
    assert trial.latency_s == (None if error else pytest.approx(2e-3))


@pytest.mark.parametrize("is_active", [False, True])
def test_a_tuning_without_a_valid_trial_says_so(
    is_active: bool, new_experiment: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failures = {2: Outcome[Any](failure="crashed", error="the worker process died (SIGSEGV)")}
    builder = as_metaschedule_builder(FakeBuilder(failures))
    with caplog.at_level(logging.WARNING, "ansor_mlflow"), mlflow.start_run() if is_active else nullcontext():
        tune_tir(tmp_path / "work", builder=builder, runner=timer(error="s3://bob:hunter2@host\nis no device"))
    run = the_run(new_experiment)
    message = "1 of 1 tasks have no valid trial, such as main after 4 trials (run_failed: s3://…@host is no device)"
    assert run.data.tags[names.TAG_ERROR] == message
    assert caplog.messages == [f"run {run.info.run_id} has no latency: {message}"]
    assert run.info.status == "FINISHED"  # the script goes on as it would without us
    counts = {status: run.data.metrics[f"trials/{status}"] for status in ("ok", "crashed", "run_failed")}
    assert counts == {"ok": 0, "crashed": 1, "run_failed": 3}
    assert names.BEST_LATENCY_MS not in run.data.metrics
    assert "no device" in str(read_json(run, names.TRIALS_TABLE)["data"])


@pytest.mark.system
def test_a_run_says_the_threads_that_the_runner_has(
    new_experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is older than the tuning, and the environment may have changed meanwhile."""
    from tvm.s_tir.meta_schedule.runner import LocalRunner

    monkeypatch.setenv("TVM_NUM_THREADS", "1")
    runner = LocalRunner()
    monkeypatch.setenv("TVM_NUM_THREADS", "2")
    tune_tir(tmp_path / "work", runner=runner, max_trials_global=2)
    run = the_run(new_experiment)
    assert str(run.info.run_name) == "tune main · 2 trials · llvm ×1"
    assert run.data.tags[names.TAG_NUM_THREADS] == "1"
    assert read_json(run, names.ENVIRONMENT_FILE)["num_threads"] == 1
    assert read_provenance(fetch(run, names.RECORDS_DIR)).num_threads == 1


@pytest.mark.parametrize(
    ("given", "num_threads"), [("1", 1), (" 2,1", min(2, CPUS)), (str(CPUS + 7), CPUS), ("0", 1), ("all", None)]
)
@pytest.mark.nightly
def test_the_threads_of_another_runner_are_those_that_tvm_takes(
    given: str, num_threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("TVM_NUM_THREADS", raising=False)
    default = runtime_num_threads()
    monkeypatch.setenv("TVM_NUM_THREADS", given)
    assert runtime_num_threads() == (num_threads or default)
    code = "import tvm; print(tvm.runtime.num_threads())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(said) == runtime_num_threads()


@pytest.mark.nightly
def test_tvm_may_be_imported_later() -> None:
    code = (
        "import sys, ansor_mlflow; ansor_mlflow.autolog(); assert 'tvm' not in sys.modules\n"
        "from tvm.s_tir.meta_schedule.task_scheduler import GradientBased\n"
        "assert hasattr(GradientBased.tune, '__wrapped__')\n"
        "ansor_mlflow.autolog(disable=True)\n"
        "assert not hasattr(GradientBased.tune, '__wrapped__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def quick_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the processes of TVM's own builder import TVM in a few seconds, and gives them minutes for it: on a busy
    machine their timeout is shorter than their import.
    """
    from tvm.s_tir.meta_schedule.builder import LocalBuilder

    monkeypatch.setattr(LocalBuilder, "__init__", partialmethod(LocalBuilder.__init__, timeout_sec=300.0))
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "from ansor_mlflow.device import tvm_import\nkept = tvm_import._getmodule_memoised()\nkept.__enter__()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))


@pytest.mark.system
@pytest.mark.usefixtures("quick_workers")
@pytest.mark.nightly
def test_the_script_in_the_documentation_runs_as_it_stands(new_experiment: str, tmp_path: Path) -> None:
    builder = GraphBuilder(seed=0)
    builder.relu("relu", builder.dense("dense", builder.input("data", (1, 32)), units=16, in_units=32))
    onnx.save(builder.build("one_layer", {"relu": (1, 16)}), "model.onnx")
    text = (ROOT / "docs" / "autolog.md").read_text()
    (script,) = re.findall(r"```python\n(# tune\.py\n.*?)```", text, flags=re.DOTALL)
    exec(compile(script, "tune.py", "exec"), {"__name__": "__main__"})
    run = the_run(new_experiment)
    assert run.info.status == "FINISHED"
    assert run.data.tags[names.TAG_NETWORK] == "my-model"
    assert run.data.metrics[names.BEST_LATENCY_MS] > 0
    assert read_json(run, f"{names.RECORDS_DIR}/{names.PROVENANCE_FILE}")["measure"]["min_repeat_ms"] == 100
    recorded = (tmp_path / "tuning_logs" / RECORD_FILE).read_text().splitlines()
    assert run.data.metrics[names.TRIALS_MEASURED] == len(recorded) > 0
