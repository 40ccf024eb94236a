"""A team's servers, which tests break: S3 (rclone, nightly also Ceph), PostgreSQL, and an MLflow server on it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import mlflow
import pytest
from helpers.ceph import CephS3, ceph_s3
from helpers.commands import ANSOR_MLFLOW, Finished, environment, run
from helpers.postgres import postgres_server
from helpers.servers import RcloneS3, Service, free_port, mlflow_server
from helpers.tuner_process import Tuning
from mlflow.entities import Run

from ansor_mlflow import names
from ansor_mlflow.records import PARTS_DIR

BUCKET = "faults"
AWAY = "the MLflow run cannot be reached and will be told later"
BACK = "the MLflow run is reached again"


@pytest.fixture(scope="session", params=["rclone", pytest.param("ceph", marks=pytest.mark.nightly)])
def s3(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RcloneS3 | CephS3]:
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "ceph":
        with ceph_s3(directory, BUCKET) as service:
            yield service
        return
    rclone = RcloneS3(directory, BUCKET)
    rclone.start()
    yield rclone
    rclone.stop()


@pytest.fixture(scope="session")
def database() -> Iterator[Service]:
    with postgres_server() as service:
        yield service


@pytest.fixture(scope="session")
def tracking(database: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    directory, port = tmp_path_factory.mktemp("tracking"), free_port()
    service = Service(f"http://127.0.0.1:{port}", lambda: mlflow_server(directory, port=port, store=database.url))
    service.start()
    yield service
    service.stop()


@dataclass(frozen=True)
class Site:
    """What a team has: servers, all of them running when a test begins, and an experiment of this test alone."""

    s3: RcloneS3 | CephS3
    database: Service
    tracking: Service
    experiment_id: str

    @property
    def environment(self) -> dict[str, str]:
        own = {"MLFLOW_EXPERIMENT_ID": self.experiment_id, names.GRACE_VARIABLE: "3"}
        return environment(self.tracking.url, {**self.s3.environment(), **own})

    @property
    def client(self) -> mlflow.MlflowClient:
        return mlflow.MlflowClient(self.tracking.url)

    def only_run(self) -> Run:
        (run,) = self.client.search_runs([self.experiment_id])
        return run

    def download(self, destination: Path) -> Path:
        destination.mkdir()
        return Path(self.client.download_artifacts(self.only_run().info.run_id, "", str(destination)))

    def parts(self) -> list[str]:
        """The keys of the parts that the only run has of its records."""
        prefix = f"{self.only_run().info.artifact_uri.removeprefix(f's3://{BUCKET}/')}/{names.RECORDS_DIR}/{PARTS_DIR}/"
        listed = self.s3.client().list_objects_v2(Bucket=BUCKET, Prefix=prefix)
        return sorted(found["Key"] for found in listed.get("Contents", []))


@pytest.fixture
def site(
    s3: RcloneS3 | CephS3, database: Service, tracking: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Site:
    for service in (s3, database, tracking):
        service.start()
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    client = mlflow.MlflowClient(tracking.url)
    experiment_id = client.create_experiment(str(tmp_path), f"s3://{BUCKET}/{tmp_path.name}")
    return Site(s3, database, tracking, experiment_id)


def wait_until(condition: Callable[[], object], tuner: Tuning, timeout_s: float = 400) -> None:
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
