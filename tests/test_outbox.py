"""Messages to a run are on the disk until MLflow has them, and are delivered in their order."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import mlflow
import pytest
from helpers.commands import RunCommand
from helpers.servers import free_port

from ansor_mlflow import names
from ansor_mlflow.commands import sync
from ansor_mlflow.records.store import RECORD_FILE
from ansor_mlflow.tracking.killed import LOCK_FILE, OUTBOX_DIR, has_messages, is_held
from ansor_mlflow.tracking.outbox import (
    Message,
    Outbox,
    UndeliveredError,
    _write,
    deliver_left,
    forget_end,
    leave_message,
    open_outbox,
)


@pytest.fixture(autouse=True)
def _cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run_id(experiment_id: str) -> str:
    return str(mlflow.MlflowClient().create_run(experiment_id).info.run_id)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    uri = mlflow.get_tracking_uri()
    nowhere = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")

    def set_there(is_there: bool) -> None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri if is_there else nowhere)

    return set_there


@pytest.fixture
def outbox(run_id: str, tmp_path: Path) -> Iterator[Outbox]:
    box = Outbox(run_id, tmp_path)
    yield box
    box.close(10)


def test_a_message_of_every_kind(outbox: Outbox, run_id: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "inside.txt").write_text("inside")
    (tmp_path / "file.txt").write_text("file")
    message = Message(
        metrics={"latency": 2.5, "trials": 7},
        step=7,
        params={"network": "resnet-18"},
        tags={"kind": "test"},
        artifacts=[("file.txt", ""), ("folder", "records"), ("file.txt", "below")],
        status="FINISHED",
    )
    outbox.put(message)
    assert outbox.flush(10)
    run = mlflow.get_run(run_id)
    assert run.data.metrics == {"latency": 2.5, "trials": 7}
    assert run.data.params == {"network": "resnet-18"}
    assert run.data.tags["kind"] == "test"
    assert run.info.status == "FINISHED"
    (metric,) = mlflow.MlflowClient().get_metric_history(run_id, "latency")
    assert (metric.step, metric.timestamp) == (7, message.time_ms)
    artifacts = Path(mlflow.artifacts.download_artifacts(run_id=run_id, dst_path=str(tmp_path / "down")))
    found = sorted(str(path.relative_to(artifacts)) for path in artifacts.rglob("*") if path.is_file())
    assert found == ["below/file.txt", "file.txt", "records/inside.txt"]
    assert not has_messages(tmp_path)


def test_metrics_have_five_significant_digits(run_id: str, tmp_path: Path) -> None:
    """The user interface shows every digit. What was counted is not rounded."""
    metrics = {"per_s": 19940.97663, "trials/ok": 1234567, "epochs": 7654321.0, "ratio": -1.0, "tiny": 1.23456789e-9}
    Message(metrics=metrics).deliver(run_id, tmp_path)
    rounded = {**metrics, "per_s": 19941.0, "tiny": 1.2346e-9}
    assert mlflow.get_run(run_id).data.metrics == rounded


def test_messages_wait_for_a_server_and_keep_their_order(
    outbox: Outbox, run_id: str, server: Callable[[bool], None], caplog: pytest.LogCaptureFixture
) -> None:
    server(False)
    for step in range(5):
        outbox.put(Message(metrics={"latency": step}, step=step, tags={"last": str(step)}))
    started_s = time.monotonic()
    assert not outbox.flush(200)
    assert time.monotonic() - started_s < 100  # nobody waits for a server that is away
    with caplog.at_level(logging.WARNING, "ansor_mlflow"):
        server(True)
        outbox.close(30)
    assert mlflow.get_run(run_id).data.tags["last"] == "4"
    assert [metric.step for metric in mlflow.MlflowClient().get_metric_history(run_id, "latency")] == list(range(5))
    assert "the MLflow run is reached again" in caplog.text


def test_what_is_left_is_said_and_delivered_later(run_id: str, server: Callable[[bool], None], tmp_path: Path) -> None:
    outbox = Outbox(run_id, tmp_path)
    server(False)
    outbox.put(Message(tags={"first": "1"}))
    outbox.put(Message(tags={"second": "2"}))
    with pytest.raises(UndeliveredError, match=f"2 messages to the run {run_id} are undelivered .* ansor-mlflow sync"):
        outbox.close(0.5)
    leave_message(tmp_path, Message(status="FAILED"))
    server(True)
    assert deliver_left(run_id, tmp_path) == 3
    run = mlflow.get_run(run_id)
    assert (run.data.tags["first"], run.data.tags["second"], run.info.status) == ("1", "2", "FAILED")
    assert not has_messages(tmp_path)


def test_a_message_that_arrives_twice_counts_once(run_id: str, tmp_path: Path) -> None:
    """As when the answer to it was lost."""
    message = Message(metrics={"latency": 1.0}, step=3, params={"network": "a"}, tags={"kind": "test"})
    for _ in range(2):
        message.deliver(run_id, tmp_path)
    assert len(mlflow.MlflowClient().get_metric_history(run_id, "latency")) == 1


def test_no_secret_is_on_the_disk(run_id: str, server: Callable[[bool], None], tmp_path: Path) -> None:
    outbox = Outbox(run_id, tmp_path)
    server(False)
    outbox.put(Message(params={"network": "https://bob:hunter2@host/net"}, tags={"uri": "s3://bob:hunter2@host/x"}))
    with pytest.raises(UndeliveredError):
        outbox.close(0.1)
    (path,) = (tmp_path / "outbox").glob("*.json")
    assert "hunter2" not in path.read_text()
    assert "https://…@host/net" in path.read_text().encode().decode("unicode_escape")


def test_the_error_that_ended_a_step_is_the_one_to_report(
    run_id: str, server: Callable[[bool], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ansor_mlflow.tracking.outbox.GRACE_AFTER_ERROR_S", 0.1)
    server(False)
    with pytest.raises(ZeroDivisionError):
        put_and_fail(run_id, tmp_path)
    assert has_messages(tmp_path)


def put_and_fail(run_id: str, directory: Path) -> None:
    with open_outbox(run_id, directory) as outbox:
        outbox.put(Message(tags={"first": "1"}))
        1 / 0  # noqa: B018


@pytest.mark.system
def test_sync_ends_a_run_as_its_messages_say(
    run_id: str,
    server: Callable[[bool], None],
    run_here: RunCommand,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory = tmp_path / ".ansor" / run_id
    outbox = Outbox(run_id, directory)
    server(False)
    outbox.put(Message(tags={"kind": "late"}, status="FINISHED"))
    assert run_here("sync") == 2
    assert f"Error: run {run_id} still goes on in this directory, or is being" in capsys.readouterr().err
    with pytest.raises(UndeliveredError):
        outbox.close(0.1)
    assert run_here("sync") == 3
    assert "--drop" not in capsys.readouterr().out  # the server comes back
    server(True)
    mlflow.MlflowClient().set_tag(run_id, names.TAG_ERROR, "1 messages are undelivered")
    assert run_here("sync") == 0
    assert capsys.readouterr().out == f"run {run_id}: 1 messages delivered\n"
    run = mlflow.get_run(run_id)
    assert (run.info.status, run.data.tags["kind"]) == ("FINISHED", "late")
    assert names.TAG_ERROR not in run.data.tags
    assert not (tmp_path / ".ansor").exists()
    assert run_here("sync") == 0
    assert capsys.readouterr().out == "nothing is left to deliver\n"


def test_sync_leaves_the_records_of_a_tuner_that_was_killed(run_id: str, run_here: RunCommand, tmp_path: Path) -> None:
    """Its last trials may be nowhere else, and its run has not ended."""
    directory = tmp_path / ".ansor" / run_id
    records = directory / names.RECORDS_DIR / RECORD_FILE
    records.parent.mkdir(parents=True)
    records.write_text("[0, []]\n")
    (directory / OUTBOX_DIR).mkdir()
    _write(directory / OUTBOX_DIR / "000001.json", Message(tags={"kind": "late"}))
    assert run_here("sync") == 0
    run = mlflow.get_run(run_id)
    assert (run.info.status, run.data.tags["kind"]) == ("RUNNING", "late")
    assert records.read_text() == "[0, []]\n"


def test_a_run_that_goes_on_forgets_how_it_ended(run_id: str, tmp_path: Path) -> None:
    """Though MLflow was away when it ended, and is told only now."""
    (tmp_path / OUTBOX_DIR).mkdir()
    _write(tmp_path / OUTBOX_DIR / "000001.json", Message(metrics={"latency": 1.0}))
    leave_message(tmp_path, Message(tags={names.TAG_ERROR: "away", names.TAG_EXIT_CODE: "3"}, status="FAILED"))
    forget_end(tmp_path)
    assert deliver_left(run_id, tmp_path) == 2
    run = mlflow.get_run(run_id)
    assert (run.info.status, run.data.metrics) == ("RUNNING", {"latency": 1.0})
    assert not names.END_TAGS & run.data.tags.keys()


@pytest.mark.system
def test_a_run_that_still_goes_on_is_not_touched(
    run_id: str, run_here: RunCommand, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mlflow.MlflowClient().set_tag(run_id, names.TAG_STEP, "tune")
    before = mlflow.get_run(run_id)
    with open_outbox(run_id, tmp_path / ".ansor" / run_id):
        assert run_here("tune", "--resume-run", run_id) == 2
    assert f"Error: run {run_id} still goes on in this directory" in capsys.readouterr().err
    after = mlflow.get_run(run_id)
    assert (after.info.status, after.data.tags) == ("RUNNING", before.data.tags)


def test_sync_goes_on_behind_a_run_that_is_refused_for_good(
    experiment_id: str, run_here: RunCommand, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client = mlflow.MlflowClient()
    deleted, broken, alive = sorted(client.create_run(experiment_id).info.run_id for _ in range(3))
    for run_id in (deleted, broken, alive):
        (tmp_path / ".ansor" / run_id / OUTBOX_DIR).mkdir(parents=True)
        message = Message(artifacts=[("gone.png", "")], metrics={"latency": 1.0}, status="FINISHED")
        _write(tmp_path / ".ansor" / run_id / OUTBOX_DIR / "000001.json", message)
    client.delete_run(deleted)
    (tmp_path / ".ansor" / broken / OUTBOX_DIR / "000001.json").write_text("{")
    assert run_here("sync") == 2
    told = capsys.readouterr()
    assert f"run {alive}: 1 messages delivered\n" in told.out
    assert f"ansor-mlflow sync --drop {deleted} removes what is left of it here\n" in told.out
    assert f"{broken}/{OUTBOX_DIR}/000001.json: the message is damaged; " in told.out
    assert told.err.splitlines()[-1].endswith(" (2 of 3 runs are left; their lines say why)")
    assert (mlflow.get_run(alive).info.status, mlflow.get_run(alive).data.metrics) == ("FINISHED", {"latency": 1.0})
    for run_id in (deleted, broken):
        assert run_here("sync", "--drop", run_id) == 0
    assert not (tmp_path / ".ansor").exists()
    assert run_here("sync", "--drop", "../..") == 2


@pytest.mark.parametrize("args", [["sync"], ["sync", "--drop", "{}"]])
def test_no_process_can_go_on_with_records_that_are_being_removed(
    run_id: str, run_here: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str]
) -> None:
    records = tmp_path / ".ansor" / run_id / names.RECORDS_DIR
    records.mkdir(parents=True)
    (records.parent / LOCK_FILE).touch()
    (records / RECORD_FILE).write_text("[0, 1]\n")
    client = mlflow.MlflowClient()
    client.log_artifacts(run_id, str(records), names.RECORDS_DIR)
    client.set_terminated(run_id, "FAILED")
    was_held = []
    for name in ("fetch_run", "remove_directory"):
        done = getattr(sync, name)

        def seen(*given: object, done: Callable[..., object] = done) -> object:
            was_held.append(is_held(records.parent))
            return done(*given)

        monkeypatch.setattr(sync, name, seen)
    assert run_here(*(arg.format(run_id) for arg in args)) == 0
    assert set(was_held) == {True}
    assert not records.exists()


@pytest.mark.parametrize("there", ["nothing", "some", "all", "other"])
@pytest.mark.parametrize("status", ["FAILED", "FINISHED"])
def test_sync_removes_records_only_where_the_run_has_them(
    run_id: str, run_here: RunCommand, tmp_path: Path, there: str, status: str
) -> None:
    directory = tmp_path / ".ansor" / run_id
    records = directory / names.RECORDS_DIR
    records.mkdir(parents=True)
    texts = {"nothing": "", "some": "[0, 1]\n", "all": "[0, 1]\n[0, 2]\n[0, 3]\n", "other": "[0, 1]\n[0, 9]\n"}
    (records / RECORD_FILE).write_text(texts[there])
    client = mlflow.MlflowClient()
    if there != "nothing":
        client.log_artifacts(run_id, str(records), names.RECORDS_DIR)
    (records / RECORD_FILE).write_text("[0, 1]\n[0, 2]\n")
    client.set_terminated(run_id, status)
    assert run_here("sync") == 0
    assert (records / RECORD_FILE).exists() == (there != "all")
