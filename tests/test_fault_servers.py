"""What a run knows when the tracking server or its database goes away."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path

import pytest
from helpers.site import AWAY, Site, assert_machine_error, assert_told_once, sync, wait_until
from helpers.tuner_process import assert_gone, assert_readable, tuning
from test_faults import assert_complete

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]


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
            urllib.request.urlopen(url, timeout=120)
        tuner.wait_for_rounds(tuner.num_rounds + 4)
        site.database.start()
        finished = tuner.wait()
    assert finished.exit_code == 0, finished.stderr
    assert_complete(site.only_run(), site.download(tmp_path / "run"), 60, tmp_path)
    assert_told_once(site, tuner)
