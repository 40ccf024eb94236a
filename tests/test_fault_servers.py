"""What a run knows when servers go away, or lie: Ceph's S3 gateway, PostgreSQL, and an MLflow server on it."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import mlflow
import pytest
from helpers.ceph import CephS3, ceph_s3
from helpers.commands import ANSOR_MLFLOW, Finished, environment, run
from helpers.postgres import postgres_server
from helpers.servers import SECRET_KEY, Service, free_port, mlflow_server
from helpers.tuner_process import Tuning, assert_gone, assert_readable, tuning
from mlflow.entities import Run
from test_faults import assert_complete, assert_exactly
from test_pool import DEVICE, found

from ansor_mlflow import names
from ansor_mlflow.records.transfer.parts import PARTS_DIR
from ansor_mlflow.tracking.record_pool import RecordPool

pytestmark = pytest.mark.faults

BUCKET = "faults"
OUTAGE_S = 60
AWAY = "the MLflow run cannot be reached and will be told later"
BACK = "the MLflow run is reached again"


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CephS3]:
    """The gateway of a cluster."""
    with ceph_s3(tmp_path_factory.mktemp("ceph"), BUCKET) as service:
        yield service


@pytest.fixture(scope="session")
def database() -> Iterator[Service]:
    """PostgreSQL."""
    with postgres_server() as service:
        yield service


@pytest.fixture(scope="session")
def tracking(database: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """An MLflow server on the database."""
    directory, port = tmp_path_factory.mktemp("tracking"), free_port()
    service = Service(f"http://127.0.0.1:{port}", lambda: mlflow_server(directory, port=port, store=database.url))
    service.start()
    yield service
    service.stop()


@dataclass(frozen=True)
class Site:
    """What a team has: servers, all of them running when a test begins, and an experiment of this test alone."""

    s3: CephS3
    database: Service
    tracking: Service
    experiment_id: str

    @property
    def environment(self) -> dict[str, str]:
        """Of a command."""
        return environment(self.tracking.url, {**self.s3.environment(), "MLFLOW_EXPERIMENT_ID": self.experiment_id})

    @property
    def client(self) -> mlflow.MlflowClient:
        return mlflow.MlflowClient(self.tracking.url)

    def only_run(self) -> Run:
        (run,) = self.client.search_runs([self.experiment_id])
        return run

    def download(self, destination: Path) -> Path:
        """Downloads the artifacts of the only run."""
        destination.mkdir()
        return Path(self.client.download_artifacts(self.only_run().info.run_id, "", str(destination)))

    def parts(self) -> list[str]:
        """The keys of the parts that the only run has of its records."""
        prefix = f"{self.only_run().info.artifact_uri.removeprefix(f's3://{BUCKET}/')}/{names.RECORDS_DIR}/{PARTS_DIR}/"
        listed = self.s3.client().list_objects_v2(Bucket=BUCKET, Prefix=prefix)
        return sorted(found["Key"] for found in listed.get("Contents", []))


@pytest.fixture
def site(s3: CephS3, database: Service, tracking: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    for service in (s3, database, tracking):
        service.start()
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    client = mlflow.MlflowClient(tracking.url)
    experiment_id = client.create_experiment(str(tmp_path), f"s3://{BUCKET}/{tmp_path.name}")
    return Site(s3, database, tracking, experiment_id)


def wait_until(condition: Callable[[], object], tuner: Tuning, timeout_s: float = 60) -> None:
    """Waits for something that happens while a tuning goes on."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert tuner.process.poll() is None, tuner.stderr
        assert time.monotonic() < deadline, tuner.stderr
        time.sleep(0.1)


def assert_machine_error(finished: Finished, message: str) -> str:
    """Asserts that a command ended with one line about its environment, and returns the line without its prefix."""
    assert finished.exit_code == 3, finished.stderr
    (error,) = finished.errors
    assert re.search(message, error), error
    assert "Traceback" not in finished.stderr
    return error.removeprefix("Error: ")


def assert_told_once(site: Site, tuner: Tuning) -> None:
    """Asserts that a run has the curve of a tuning that was interrupted by an outage, each round once."""
    assert AWAY in tuner.stderr
    assert BACK in tuner.stderr
    totals = [int(text) for text in re.findall(r"^ +(\d+) trials +[\d.]+ s  ", tuner.stderr, flags=re.MULTILINE)]
    history = site.client.get_metric_history(site.only_run().info.run_id, names.TRIALS_MEASURED)
    assert sorted(metric.step for metric in history) == totals
    assert list(tuner.cwd.glob(".ansor/*/outbox")) == []


def sync(cwd: Path, env: Mapping[str, str]) -> Finished:
    return run([ANSOR_MLFLOW, "sync"], cwd, env)


# -- MLflow's server and its database ----------------------------------------------------------------------------------


def test_a_tracking_server_that_comes_back_knows_everything(
    small_onnx: Path, site: Site, tmp_path: Path, short_path: Path
) -> None:
    with tuning(small_onnx, short_path / "cwd", site.environment, trials=60, min_repeat_ms=50) as tuner:
        tuner.wait_for_rounds(4)
        site.tracking.stop()
        tuner.wait_for_rounds(tuner.num_rounds + 4)  # the tuning goes on
        site.tracking.start()
        finished = tuner.wait(120)
    assert finished.exit_code == 0, finished.stderr
    assert_complete(site.only_run(), site.download(tmp_path / "run"), 60, tmp_path)
    assert_told_once(site, tuner)


def test_what_a_tracking_server_that_stays_away_was_not_told_is_delivered_by_sync(
    small_onnx: Path, site: Site, tmp_path: Path, short_path: Path
) -> None:
    cwd, env = short_path / "cwd", {**site.environment, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
    with tuning(small_onnx, cwd, env, trials=40) as tuner:
        tuner.wait_for_rounds(4)
        descendants = tuner.descendants
        site.tracking.stop()
        finished = tuner.wait(180)
        assert_gone(descendants, 5)
        message = r"\d+ messages to the run \w+ are undelivered .*outbox, beside the records; .*ansor-mlflow sync"
        assert_machine_error(finished, message)
        assert_readable(tuner.records, tmp_path / "best", min_trials=40)
    message = "cannot deliver the messages to the run .*; check MLFLOW_TRACKING_URI"
    assert_machine_error(sync(cwd, env), message)
    site.tracking.start()
    assert sync(cwd, env).exit_code == 0
    assert_complete(site.only_run(), site.download(tmp_path / "run"), 40, tmp_path)
    assert "nothing is left to deliver" in sync(cwd, env).stdout
    assert not (cwd / ".ansor").exists()


def test_a_database_that_is_killed_and_started_again(
    small_onnx: Path, site: Site, tmp_path: Path, short_path: Path
) -> None:
    """The tracking server answers all the while, but with errors of its own."""
    with tuning(small_onnx, short_path / "cwd", site.environment, trials=60, min_repeat_ms=50) as tuner:
        tuner.wait_for_rounds(4)
        site.database.stop()
        wait_until(lambda: AWAY in tuner.stderr, tuner)
        url = f"{site.tracking.url}/api/2.0/mlflow/experiments/get?experiment_id={site.experiment_id}"
        with pytest.raises(urllib.error.HTTPError, match=r"HTTP Error 5\d\d"):
            urllib.request.urlopen(url, timeout=30)
        tuner.wait_for_rounds(tuner.num_rounds + 4)
        site.database.start()
        finished = tuner.wait(120)
    assert finished.exit_code == 0, finished.stderr
    assert_complete(site.only_run(), site.download(tmp_path / "run"), 60, tmp_path)
    assert_told_once(site, tuner)


# -- S3 ----------------------------------------------------------------------------------------------------------------


def test_an_s3_server_that_is_away_for_a_minute_gets_everything(
    small_onnx: Path, site: Site, tmp_path: Path, short_path: Path
) -> None:
    parameters = {"trials": 150, "num_trials_per_round": 16, "min_repeat_ms": 500}  # takes longer than the outage
    with tuning(small_onnx, short_path / "cwd", site.environment, **parameters) as tuner:
        tuner.wait_for_rounds(1)
        site.s3.stop()
        time.sleep(OUTAGE_S)
        assert tuner.process.poll() is None, tuner.stderr
        site.s3.start()
        finished = tuner.wait(180)
    assert finished.exit_code == 0, finished.stderr
    assert_exactly(site.only_run(), site.download(tmp_path / "run"), 150, tmp_path)
    assert_told_once(site, tuner)
    assert site.parts() == []


def test_what_an_s3_server_that_stays_away_was_not_given_is_delivered_by_sync(
    small_onnx: Path, site: Site, tmp_path: Path, short_path: Path
) -> None:
    cwd = short_path / "cwd"
    with tuning(small_onnx, cwd, site.environment, trials=24) as tuner:
        tuner.wait_for_rounds(4)
        site.s3.stop()
        finished = tuner.wait(180)
    message = assert_machine_error(finished, r"messages to the run \w+ are undelivered \(.*Could not connect")
    run = site.only_run()
    assert run.info.status == "FAILED"
    assert run.data.tags[names.TAG_ERROR] == message
    assert run.data.metrics[names.TRIALS_MEASURED] == 24  # the tracking server was told
    site.s3.start()
    assert sync(cwd, site.environment).exit_code == 0
    assert_complete(site.only_run(), site.download(tmp_path / "run"), 24, tmp_path)


def test_a_secret_key_that_is_replaced_in_the_middle(
    small_onnx: Path, site: Site, tmp_path: Path, short_path: Path
) -> None:
    """Nothing is lost, and no secret is told."""
    cwd = short_path / "cwd"
    with tuning(small_onnx, cwd, site.environment, trials=48, min_repeat_ms=200) as tuner:
        tuner.wait_for_rounds(1)
        with site.s3.another_secret_key():
            assert tuner.process.poll() is None, tuner.stderr
            finished = tuner.wait(180)
            assert_machine_error(finished, r"are undelivered \(.*(SignatureDoesNotMatch|403|Forbidden)")
            assert_machine_error(sync(cwd, site.environment), "AWS_SECRET_ACCESS_KEY")
    assert SECRET_KEY not in finished.stderr
    assert sync(cwd, site.environment).exit_code == 0
    assert_complete(site.only_run(), site.download(tmp_path / "run"), 48, tmp_path)


@pytest.mark.parametrize("which", [0, -1], ids=["first", "last"])
def test_a_flipped_bit_in_a_part_costs_the_trials_behind_it(
    small_onnx: Path, site: Site, tmp_path: Path, short_path: Path, which: int
) -> None:
    """The tuner is killed, and goes on on another machine, as it were."""
    trials = 160
    parameters = {"trials": 5000, "num_trials_per_round": 16}
    with tuning(small_onnx, short_path / "killed", site.environment, **parameters) as tuner:
        tuner.wait_for_rounds(1)
        wait_until(lambda: len(site.parts()) >= 2, tuner)
        tuner.process.kill()
        tuner.process.wait()
    client, key = site.s3.client(), site.parts()[which]
    content = bytearray(client.get_object(Bucket=BUCKET, Key=key)["Body"].read())
    content[len(content) // 2] ^= 1
    client.put_object(Bucket=BUCKET, Key=key, Body=bytes(content))
    parameters = {"trials": trials, "num_trials_per_round": 16, "resume_run": site.only_run().info.run_id}
    with tuning(small_onnx, short_path / "resumed", site.environment, **parameters) as tuner:
        finished = tuner.wait(180)
    assert finished.exit_code == 0, finished.stderr
    assert f"{Path(key).name} is damaged; what it and later parts hold is measured again" in finished.stderr
    assert_exactly(site.only_run(), site.download(tmp_path / "run"), trials, tmp_path)
    assert site.parts() == []


# -- the record pool ---------------------------------------------------------------------------------------------------

PUSH = """
import json, sys
from test_pool import DEVICE, found
from ansor_mlflow.tracking.record_pool import RecordPool

number = int(sys.argv[2])
pool = RecordPool(sys.argv[1])
for workload in range(5):
    pool.push(DEVICE, [found(workload, 0), found(workload, number, 100 + number)])
"""


def test_eight_processes_push_to_a_pool_at_once(site: Site, tmp_path: Path) -> None:
    pool_uri = f"s3://{BUCKET}/pools/{tmp_path.name}"
    processes = [
        subprocess.Popen([sys.executable, "-c", PUSH, pool_uri, str(number)], cwd=Path(__file__).parent)
        for number in range(1, 9)
    ]
    assert [process.wait(120) for process in processes] == [0] * 8
    expected = [found(workload, 0) for workload in range(5)]
    expected += [found(workload, number, 100 + number) for workload in range(5) for number in range(1, 9)]
    pulled = RecordPool(pool_uri).pull(DEVICE)
    assert sorted(map(repr, pulled)) == sorted(map(repr, expected))
