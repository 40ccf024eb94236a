"""Fixtures that several test files share. They are real parts, made once for the whole session."""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import mlflow
import onnx
import pytest
from helpers.commands import RunCommand
from hypothesis import settings

from ansor_mlflow.cli.main import main
from ansor_mlflow.device import Device, available_cpus, fingerprint, resolve_target
from ansor_mlflow.lowering import LoweredNetwork
from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.model import CompiledNetwork, compile_tuned
from ansor_mlflow.networks import Network, load_network
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.parameters import TuneOptions
from ansor_mlflow.records import RecordPair, distill
from ansor_mlflow.tuning import TuningJob, require_valid_trials, tune_job

if TYPE_CHECKING:
    from helpers.finished import MadeOnce
    from tvm.target import Target

pytest_plugins = ["helpers.finished", "helpers.site"]

# How long an example takes says more of the machine than of us.
settings.register_profile("few", deadline=None, max_examples=20)
settings.register_profile("many", deadline=None, max_examples=200)
settings.load_profile("few")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--durations-file", type=Path, help="file for how long each test took, with its fixtures")


def _forbidden_skips(config: pytest.Config) -> list[pytest.TestReport]:
    """The tests that were skipped where `CI` is set: a gate that leaves tests out passes for nothing."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return reporter.stats.get("skipped", []) if reporter and os.environ.get("CI") else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files with the longest timeouts first, so that no worker begins with one when the others are done."""
    timeouts: dict[Path, float] = {}
    for item in items:
        marker = item.get_closest_marker("timeout")
        timeouts[item.path] = max(timeouts.get(item.path, 0.0), marker.args[0] if marker else 0.0)
    items.sort(key=lambda item: -timeouts[item.path])


def pytest_collection_finish() -> None:
    """Spares collections of garbage the million objects that imports made."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails a session with skipped tests in CI."""
    if session.exitstatus == pytest.ExitCode.OK and _forbidden_skips(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _write_durations(reporter: pytest.TerminalReporter, path: Path) -> None:
    """Writes the seconds of every test, the longest first."""
    seconds: Counter[str] = Counter()
    for reports in reporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid] += report.duration
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{duration:8.2f}  {test}\n" for test, duration in seconds.most_common()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Writes how long tests took, and says why a session with skipped tests fails."""
    if path := config.getoption("durations_file"):
        _write_durations(terminalreporter, path)
    skipped = _forbidden_skips(config)
    if skipped:
        terminalreporter.section("skipped tests", red=True)
        terminalreporter.line(f"CI is set, so no test may be skipped, but {len(skipped)} were; the reasons are below")


@pytest.fixture(autouse=True)
def _fresh_log() -> None:
    """Lets a command write its log to the standard error of its own test: what an earlier one set up is of another."""
    logging.getLogger("ansor_mlflow").handlers.clear()


@pytest.fixture(scope="module")
def _keep_sys_path() -> Iterator[None]:
    """Pyfunc puts a model's code first in `sys.path`, which processes of later tests would inherit."""
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Like `tmp_path`, for processes whose TMPDIR it is: the path of a socket in there has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="tuner-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


@pytest.fixture(scope="session")
def host_target() -> Target:
    """`target=auto` with every CPU this process may use."""
    return resolve_target("auto", available_cpus())


@pytest.fixture(scope="session")
def small_onnx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ONNX file: convolution, batch norm, relu, global average pool, dense; (1, 3, 16, 16) -> (1, 10)."""
    builder = GraphBuilder(seed=0)
    data = builder.input("data", (1, 3, 16, 16))
    data = builder.conv("conv", data, (8, 3, 3, 3), padding=1)
    data = builder.relu("relu", builder.batch_norm("bn", data, 8))
    data = builder.node("Flatten", "flatten", builder.node("GlobalAveragePool", "pool", data), axis=1)
    builder.dense("logits", data, units=10, in_units=8)
    path = tmp_path_factory.mktemp("networks") / "small.onnx"
    onnx.save(builder.build("small", {"logits": (1, 10)}), path)
    return path


@pytest.fixture(scope="session")
def small_network(small_onnx: Path) -> Network:
    """The network of `small_onnx`, loaded."""
    return load_network(str(small_onnx))


@pytest.fixture(scope="session")
def small_lowered(small_network: Network, host_target: Target) -> LoweredNetwork:
    """The tasks of `small_network` for this host."""
    return lower(small_network.model, host_target)


@pytest.fixture(scope="session")
def dense(host_target: Target) -> LoweredNetwork:
    """Two dense layers: two tasks whose spaces are large and quick to search.

    The first argument of the tasks has the shape (4, 32) and (4, 16).
    """
    builder = GraphBuilder(seed=0)
    data = builder.input("data", (4, 32))
    data = builder.relu("relu", builder.dense("hidden", data, units=16, in_units=32))
    builder.dense("logits", data, units=8, in_units=16)
    return lower(builder.build("dense", {"logits": (4, 8)}), host_target)


@pytest.fixture(scope="session")
def single(host_target: Target) -> LoweredNetwork:
    """One dense layer."""
    builder = GraphBuilder(seed=0)
    builder.relu("relu", builder.dense("dense", builder.input("data", (4, 32)), units=16, in_units=32))
    return lower(builder.build("single", {"relu": (4, 16)}), host_target)


@pytest.fixture(scope="session")
def tiny(host_target: Target) -> LoweredNetwork:
    """A task with a handful of programs."""
    builder = GraphBuilder(seed=0)
    builder.relu("relu", builder.input("data", (2, 2)))
    return lower(builder.build("tiny", {"relu": (2, 2)}), host_target)


@pytest.fixture(scope="session")
def tuned_records(small_lowered: LoweredNetwork, host_target: Target, made_once: MadeOnce) -> Path:
    """A work directory of TVM with two random schedules of every task of the small network, measured on this host.

    Not to be written to.
    """
    random = {"space": "metaschedule", "strategy": "random", "cost_model": "none", "min_repeat_ms": 0}
    options = TuneOptions(trials=2 * len(small_lowered.tasks), trials_per_task=2, **random)

    def fill(directory: Path) -> None:
        device = Device.of(host_target, available_cpus())
        job = TuningJob(network="small", lowered=small_lowered, device=device, records=directory)
        require_valid_trials(tune_job(job, options, options))

    return made_once("tuned", fill)


@pytest.fixture(scope="session")
def compiled_network(
    small_onnx: Path,
    small_network: Network,
    small_lowered: LoweredNetwork,
    tuned_records: Path,
    host_target: Target,
    made_once: MadeOnce,
) -> CompiledNetwork:
    """The small network, compiled with `tuned_records`. Its files are not to be written to."""
    device = fingerprint(host_target, available_cpus())

    def fill(directory: Path) -> None:
        distill(RecordPair.in_directory(tuned_records), directory / "best", device.target)
        coverage = compile_tuned(small_lowered, host_target, directory / "best", directory / "model.so")
        (directory / "coverage.json").write_text(json.dumps(coverage.to_dict()))

    directory = made_once("compiled", fill)
    return CompiledNetwork(
        name="small",
        network=small_onnx,
        inputs=small_network.inputs,
        outputs=small_network.outputs,
        library=directory / "model.so",
        records=directory / "best",
        fingerprint=device,
        coverage=json.loads((directory / "coverage.json").read_text()),
        provenance={"layout": "NHWC"},
    )


@pytest.fixture(scope="session")
def _mlflow_store(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """URI of a sqlite store, and the ID of its experiment."""
    from mlflow import MlflowClient

    directory = tmp_path_factory.mktemp("mlflow")
    shutil.copy(empty_store, directory / "mlflow.db")
    uri = f"sqlite:///{directory}/mlflow.db"
    return uri, MlflowClient(uri).create_experiment("tests", artifact_location=(directory / "artifacts").as_uri())


@pytest.fixture
def experiment_id(_mlflow_store: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """An MLflow experiment; its store is the tracking server of this test and of processes that it starts."""
    uri, experiment_id = _mlflow_store
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return experiment_id


@pytest.fixture
def new_experiment(experiment_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An experiment of this test alone, for this process and those it starts."""
    new_id = mlflow.MlflowClient().create_experiment(str(tmp_path), (tmp_path / "artifacts").as_uri())
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", new_id)
    return new_id


@pytest.fixture
def own_directory(new_experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory whose experiment has the runs of this test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunCommand]:
    """Runs a command line in this process and returns its exit code."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # the command sets it, too
    on_sigterm = signal.getsignal(signal.SIGTERM)

    def run(*args: str) -> int:
        try:
            main(args)
        except SystemExit as err:
            return int(str(err.code))
        return 0

    yield run
    signal.signal(signal.SIGTERM, on_sigterm)
