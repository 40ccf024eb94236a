"""What a run knows when a server of a team goes away, refuses, or damages what it holds."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path

import pytest
from helpers.servers import SECRET_KEY
from helpers.site import AWAY, BUCKET, Site, assert_machine_error, assert_told_once, sync, wait_until
from helpers.tuner_process import assert_gone, assert_readable, tuning
from test_faults import assert_complete, assert_exactly

from ansor_mlflow import names

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]


def test_what_a_tracking_server_that_stays_away_was_not_told_is_delivered_by_sync(
    small_onnx: Path, site: Site, tmp_path: Path, short_path: Path
) -> None:
    cwd, env = short_path / "cwd", {**site.environment, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
    with tuning(small_onnx, cwd, env, trials=40) as tuner:
        tuner.wait_for_rounds(4)
        descendants = tuner.descendants
        site.tracking.stop()
        finished = tuner.wait()
        assert_gone(descendants)
        message = r"\d+ messages to the run \w+ are undelivered .*outbox, beside the records; .*ansor-mlflow sync"
        assert_machine_error(finished, message)
        assert_readable(tuner.records, tmp_path / "best", min_trials=40)
    message = "cannot deliver the messages to the run .*; check MLFLOW_TRACKING_URI"
    assert_machine_error(sync(cwd, env), message)
    site.tracking.start()
    assert sync(cwd, env).exit_code == 0
    assert_complete(site.only_run(), site.download(tmp_path / "run"), 40, tmp_path)
    assert not (cwd / ".ansor").exists()


@pytest.mark.nightly
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
            urllib.request.urlopen(url, timeout=120)
        tuner.wait_for_rounds(tuner.num_rounds + 4)
        site.database.start()
        finished = tuner.wait()
    assert finished.exit_code == 0, finished.stderr
    assert_complete(site.only_run(), site.download(tmp_path / "run"), 60, tmp_path)
    assert_told_once(site, tuner)


@pytest.mark.nightly
def test_an_s3_server_that_is_away_for_a_while_gets_everything(
    small_onnx: Path, site: Site, tmp_path: Path, short_path: Path
) -> None:
    parameters = {"trials": 64, "num_trials_per_round": 8, "min_repeat_ms": 200}  # takes longer than the outage
    env = {**site.environment, names.UPLOADS_VARIABLE: "3"}
    with tuning(small_onnx, short_path / "cwd", env, **parameters) as tuner:
        tuner.wait_for_rounds(1)
        site.s3.stop()
        wait_until(lambda: AWAY in tuner.stderr, tuner)
        tuner.wait_for_rounds(tuner.num_rounds + 2)  # the tuning goes on
        site.s3.start()
        finished = tuner.wait()
    assert finished.exit_code == 0, finished.stderr
    assert_exactly(site.only_run(), site.download(tmp_path / "run"), 64, tmp_path)
    assert_told_once(site, tuner)
    assert site.parts() == []


@pytest.mark.nightly
def test_a_secret_key_that_is_replaced_in_the_middle(
    small_onnx: Path, site: Site, tmp_path: Path, short_path: Path
) -> None:
    cwd = short_path / "cwd"
    with tuning(small_onnx, cwd, site.environment, trials=48, min_repeat_ms=200) as tuner:
        tuner.wait_for_rounds(1)
        with site.s3.another_secret_key():
            assert tuner.process.poll() is None, tuner.stderr
            finished = tuner.wait()
            assert_machine_error(finished, r"are undelivered \(.*(SignatureDoesNotMatch|403|Forbidden)")
            assert_machine_error(sync(cwd, site.environment), "AWS_SECRET_ACCESS_KEY")
    assert SECRET_KEY not in finished.stderr
    assert sync(cwd, site.environment).exit_code == 0
    assert_complete(site.only_run(), site.download(tmp_path / "run"), 48, tmp_path)


@pytest.mark.parametrize("which", [0, pytest.param(-1, marks=pytest.mark.nightly)], ids=["first", "last"])
def test_a_flipped_bit_in_a_part_costs_the_trials_behind_it(
    small_onnx: Path, site: Site, tmp_path: Path, short_path: Path, which: int
) -> None:
    """The tuner is killed, and goes on on another machine, as it were."""
    trials = 96  # more than a part holds
    parameters, env = {"trials": 5000, "num_trials_per_round": 16}, {**site.environment, names.UPLOADS_VARIABLE: "3"}
    with tuning(small_onnx, short_path / "killed", env, **parameters) as tuner:
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
        finished = tuner.wait()
    assert finished.exit_code == 0, finished.stderr
    assert f"{Path(key).name} is damaged; what it and later parts hold is measured again" in finished.stderr
    assert_exactly(site.only_run(), site.download(tmp_path / "run"), trials, tmp_path)
    assert site.parts() == []
